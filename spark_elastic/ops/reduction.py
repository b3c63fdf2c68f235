"""How tensors are reduced: what Horovod's arguments say, checked, for all frameworks. Values only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spark_elastic.errors import InvalidInput
from spark_elastic.ops.compression import Compressor, NoneCompressor, checked_compression
from spark_elastic.ops.process_sets import ProcessSet, global_process_set
from spark_elastic.ops.reduce_op import Adasum, Average, Max, Min, Product, ReduceOp, Sum, chosen


@dataclass(frozen=True)
class How:
    """The arguments that say how to reduce. scale: factors before and after."""

    op: ReduceOp
    scale: tuple[float, float] = (1.0, 1.0)
    compression: type[Compressor] = NoneCompressor
    process_set: ProcessSet = global_process_set

    @classmethod
    def asked(
        cls,
        average: bool | None,
        op: ReduceOp | None,
        scale: tuple[float, float],
        process_set: ProcessSet,
        compression: object = None,
    ) -> How:
        """The arguments of an allreduce, checked.

        Raises:
            InvalidInput: an argument is wrong.
        """
        return cls(chosen(average, op), _floats(scale), checked_compression(compression), process_set)

    @classmethod
    def asked_to_scatter(
        cls,
        count: int,
        op: ReduceOp,
        scale: tuple[float, float],
        process_set: ProcessSet,
        compression: object = None,
    ) -> How:
        """The arguments of a reducescatter of `count` tensors, checked.

        Raises:
            InvalidInput: an argument is wrong, or there is no tensor.
        """
        if not count or op is Adasum or not isinstance(op, ReduceOp):
            raise InvalidInput(
                f"reducescatter takes tensors, and Average, Sum, Min, Max or Product; got {op!r}."
            )
        return cls(op, _floats(scale), checked_compression(compression), process_set)

    @classmethod
    def asked_of_gradients(
        cls, op: ReduceOp, predivide: float, process_set: ProcessSet, compression: object = None
    ) -> How:
        """The arguments of an exchange of gradients, checked. An average divides by `predivide` before the sum, and by
        size / predivide after it.

        Raises:
            InvalidInput: an argument is wrong.
        """
        if op not in (Average, Sum, Adasum):
            raise InvalidInput(f"op must be Average, Sum or Adasum; got {op!r}.")
        if predivide <= 0 or (op is not Average and predivide != 1.0):
            raise InvalidInput(
                "gradient_predivide_factor must be above 0, and left out with op=Sum and op=Adasum."
            )
        return cls(op, _floats((1.0 / predivide, predivide)), checked_compression(compression), process_set)

    def wire(self, all_float32: bool) -> str | None:
        """The engine's format for these tensors; None: the compressor's two methods surround the exchange."""
        return self.compression.wire if all_float32 and self.op is not Adasum else None

    def scatter_factor(self, size: Callable[[], Any]) -> Any:
        """Of a reducescatter's gradient: as in the last releases of Horovod, that of the sum of all losses, times the
        size, which is asked for where it counts.

        Raises:
            InvalidInput: this reduction has no gradient.
        """
        if self.op in (Min, Max, Product):
            raise InvalidInput(f"reducescatter has no gradient for {self.op}: use Average or Sum.")
        factor = self.scale[0] * self.scale[1]
        return factor if self.op is Average else factor * size()


def _floats(scale: tuple[float, float]) -> tuple[float, float]:
    return float(scale[0]), float(scale[1])
