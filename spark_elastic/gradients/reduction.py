"""How tensors are reduced: Horovod's reductions, compressors and checked arguments, and the options of an exchange of
gradients. Values only, for all frameworks."""

from __future__ import annotations

import enum
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spark_elastic.config import operations_from_env
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.buckets import BUCKET_BYTES
from spark_elastic.gradients.process_sets import ALL, ProcessSet

Scale = tuple[float, float]  # factors before and after a reduction


class Compressor:
    """How tensors travel in fewer bytes. Users write their own with `compress` and `decompress`. The compressors that
    come with the package name a format of the engine, which sends float32 as 16 bits and accumulates it as float32."""

    # The engine's wire format of float32; None: only `compress` and `decompress` change what is exchanged.
    wire: str | None = None

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return (the tensor to exchange, what `decompress` needs)."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the result, made from the exchanged tensor."""
        return tensor


class NoneCompressor(Compressor):
    """Leaves tensors as they are."""


class FP16Compressor(Compressor):
    """Sends tensors as float16: 11 bits of precision, up to 65504."""

    wire = "fp16"
    dtype = "float16"

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        is_wide = "float32" in str(tensor.dtype) or "float64" in str(tensor.dtype)
        return (_cast(tensor, cls.dtype), tensor.dtype) if is_wide else (tensor, None)

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor if ctx is None else _cast(tensor, ctx)


class BF16Compressor(FP16Compressor):
    """Sends tensors as bfloat16: 8 bits of precision, the range of float32."""

    wire = "bf16"
    dtype = "bfloat16"


class Compression:
    """The values of `compression=`."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def _cast(tensor: Any, dtype: Any) -> Any:
    """dtype: one of the tensor's framework, or a name."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return tensor.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)
    return sys.modules["tensorflow"].cast(tensor, dtype)


def resolve_compressor(compression: object) -> type[Compressor]:
    """Return the class of a compressor; None stands for `NoneCompressor`."""
    if compression is None:
        return NoneCompressor
    kind = compression if isinstance(compression, type) else type(compression)
    if not issubclass(kind, Compressor):
        raise InvalidInput(
            f"compression must be Compression.none, fp16, bf16 or a Compressor of your own; got {compression!r}."
        )
    return kind


class ReduceOp(enum.Enum):
    """What a reduction computes. The value is the name that the engine uses."""

    AVERAGE = "average"
    SUM = "sum"
    ADASUM = "adasum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"


Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT


def resolve_op(average: bool | None, op: ReduceOp | None) -> ReduceOp:
    if average is not None and op is not None:
        raise InvalidInput("take either average or op; op is the newer one: leave average out.")
    if op is not None and not isinstance(op, ReduceOp):
        raise InvalidInput(f"op must be Average, Sum, Adasum, Min, Max or Product; got {op!r}.")
    return op if op is not None else (Sum if average is False else Average)


@dataclass(frozen=True)
class ReduceOptions:
    """How a reduction is computed, and by whom: Horovod's arguments after all checks."""

    op: ReduceOp  # over the ranks of `process_set`
    scale: Scale = (1.0, 1.0)  # factors before and after the reduction
    compression: type[Compressor] = NoneCompressor  # while arrays travel; results have the arrays' type
    process_set: ProcessSet = ALL  # the ranks that take part

    @classmethod
    def from_args(
        cls,
        average: bool | None,
        op: ReduceOp | None,
        scale: Scale,
        process_set: ProcessSet,
        compression: object = None,
    ) -> ReduceOptions:
        """Check the arguments of an allreduce. This and the next two raise InvalidInput if an argument is wrong."""
        return cls(resolve_op(average, op), _floats(scale), resolve_compressor(compression), process_set)

    @classmethod
    def from_reducescatter_args(
        cls, count: int, op: ReduceOp, scale: Scale, process_set: ProcessSet, compression: object = None
    ) -> ReduceOptions:
        """Check the arguments of a reducescatter of `count` tensors."""
        if not count or op is Adasum or not isinstance(op, ReduceOp):
            raise InvalidInput(
                f"reducescatter takes tensors, and Average, Sum, Min, Max or Product; got {op!r}."
            )
        return cls(op, _floats(scale), resolve_compressor(compression), process_set)

    @classmethod
    def from_gradient_args(
        cls, op: ReduceOp, predivide: float, process_set: ProcessSet, compression: object = None
    ) -> ReduceOptions:
        """Check the arguments of an exchange of gradients. An average divides by `predivide` before the sum, and by
        size / predivide after it."""
        if op not in (Average, Sum, Adasum):
            raise InvalidInput(f"op must be Average, Sum or Adasum; got {op!r}.")
        if predivide <= 0 or (op is not Average and predivide != 1.0):
            raise InvalidInput(
                "gradient_predivide_factor must be above 0, and left out with op=Sum and op=Adasum."
            )
        return cls(op, _floats((1.0 / predivide, predivide)), resolve_compressor(compression), process_set)

    def choose_wire_format(self, all_float32: bool) -> str | None:
        """Return the engine's wire format; None: the caller calls `compress` and `decompress` around the exchange."""
        return self.compression.wire if all_float32 and self.op is not Adasum else None

    def reducescatter_gradient_factor(self, size: Callable[[], Any]) -> Any:
        """Return the factor of a reducescatter's gradient: as in the last releases of Horovod, that of the sum of all
        losses, times the size. size: returns the number of ranks; called only where the result depends on it."""
        if self.op in (Min, Max, Product):
            raise InvalidInput(f"reducescatter has no gradient for {self.op}: use Average or Sum.")
        factor = self.scale[0] * self.scale[1]
        return factor if self.op is Average else factor * size()


def _floats(scale: Scale) -> Scale:
    return float(scale[0]), float(scale[1])


@dataclass(frozen=True)
class ExchangeOptions:
    """How gradients are exchanged; the same on all ranks."""

    bucket_bytes: int = BUCKET_BYTES  # about so many in each bucket: see `build_buckets`
    # Numbers of parameters that travel together: see `build_buckets`.
    groups: tuple[tuple[int, ...], ...] = ()
    average: bool = False  # divide by the size of the group
    predivide: float = 1.0  # divide by this much before the sum, and by the rest after it
    wire: str | None = None  # the engine's format of float32; None: as it is
    # A compressor of the user's, called on the host for each gradient that has all its rows.
    compressor: type[Compressor] | None = None
    # Sparse gradients are "refused", exchanged as "dense" ones, or as "sparse" ones from the second step of a world on.
    sparse: str = "refused"
    # Virtual shares of a step, whose gradients are added in the order of `share_tree`; 0: gradients are summed by rank.
    shares: int = 0
    arithmetic: str = ""  # what their bits depend on besides, in words; the same on all ranks
    # Seconds until a warning names the ranks that a wait is for, and between two warnings.
    warn_after: float = math.inf
    wait_at_most: float | None = None  # seconds until a wait is an error; None: the group's timeout
    bulk_backend: str = "host"  # what sums gradients on GPUs: see `OperationConfig`
    hybrid_recovery: bool = True  # see `OperationConfig`

    def factors(self, size: int) -> tuple[float, float]:
        """Return the factors (before, after) the sum."""
        return 1.0 / self.predivide, self.predivide / (size if self.average else 1.0)

    @property
    def description(self) -> str:
        """What all ranks must have in common, in words."""
        parts = ["averaged" if self.average else "summed"]
        if self.predivide != 1.0:
            parts.append(f"divided by {self.predivide!r} before")
        if self.wire is not None:
            parts.append(f"sent as {self.wire}")
        if self.compressor is not None:
            parts.append(f"compressed by {self.compressor.__qualname__}")
        if self.shares:
            parts.append(f"of {self.shares} virtual shares, computed with {self.arithmetic}")
        return ", ".join([*parts, f"sparse gradients: {self.sparse}"])


DEFAULT_OPTIONS = ExchangeOptions()  # gradients are summed as they are


def options_from_env(**others: Any) -> ExchangeOptions:
    """Return options with the bucket size, the stall check and the bulk plane of this process's settings."""
    config = operations_from_env()
    names = ("bucket_bytes", "warn_after", "wait_at_most", "bulk_backend", "hybrid_recovery")
    return ExchangeOptions(**{name: getattr(config, name) for name in names}, **others)
