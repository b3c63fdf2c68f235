"""`FSDPState`: elastic training of models that `fully_shard` (FSDP2) divides over the workers. Training thread only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from spark_elastic.errors import InvalidInput
from spark_elastic.handwritten import sharded_state
from spark_elastic.handwritten.sharded_commits import ShardBuilder
from spark_elastic.handwritten.sharded_state import Build, DividedHandler
from spark_elastic.handwritten.shards import DividedTensor
from spark_elastic.handwritten.torch_state import get_handler_registry
from spark_elastic.runs.handlers import Registry
from spark_elastic.runs.snapshot import Bytes, SnapshotBuilder
from spark_elastic.training.torch.module_state import ModelStateHandler, OptimizerStateHandler, view_bytes

_TOO_OLD = (
    f"FSDPState needs torch 2.7 or newer, whose fully_shard runs on CPUs; this is torch {torch.__version__}."
)
if torch.__version__.startswith("2.6."):
    raise InvalidInput(_TOO_OLD)
try:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor, Shard
except ImportError as error:
    raise InvalidInput(_TOO_OLD) from error


class FSDPState(sharded_state.ShardedState):
    """A model that FSDP2 divides, its optimizer, and plain values by name.

    `build(state)` is called at the beginning of each world, once the plain values and the position of an
    `ElasticDataLoader` are there. What it returns are attributes of the state then, and continue from the newest
    commit. A `DistributedDataParallel` may be among them. Reset callbacks run after it, on every worker.

    `commit` copies the worker's shard, sends a copy to another host, and returns once all workers have done so.
    """

    def __init__(self, build: Build, **values: Any) -> None:
        """
        Args:
            build: forms the process group, makes model and optimizer, the same on all workers, and returns them by
                name: {"model": model, "optimizer": optimizer}; also what depends on them, such as a scheduler.
            values: what does not depend on the world. They must pickle, or have a state dict.

        Raises:
            InvalidInput: an argument is wrong.
        """
        super().__init__(build, **values)

    @property
    def registry(self) -> Registry:  # type: ignore[override] # looked up for each value
        return (
            (torch.nn.Module, DividedModelHandler),
            (torch.optim.Optimizer, DividedOptimizerHandler),
            *get_handler_registry(),
        )


class _PieceRef(NamedTuple):
    """A divided tensor in a commit: each rank has its rows."""

    number: int  # among the divided tensors of the commit
    dtype: torch.dtype  # of whole and piece
    shape: tuple[int, ...]  # of the whole tensor


def _add_piece(builder: SnapshotBuilder, tensor: DTensor, what: str) -> _PieceRef:
    """Add this rank's rows to the commit.

    Raises:
        InvalidInput: the tensor is not divided by rows over all ranks.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    if placements != (Shard(0),) or mesh.mesh.tolist() != list(range(dist.get_world_size())):
        raise InvalidInput(
            f"FSDPState commits tensors that are divided by rows over all workers, and {what} has the placements "
            f"{placements} on a mesh of shape {tuple(mesh.shape)}: call fully_shard without mesh and "
            "shard_placement_fn."
        )
    assert isinstance(builder, ShardBuilder)
    shape = tuple(tensor.shape)
    memory, _ = view_bytes(_local(tensor))
    row_bytes = math.prod(shape[1:]) * tensor.dtype.itemsize
    return _PieceRef(builder.add_piece(DividedTensor(shape[0], row_bytes), memory), tensor.dtype, shape)


def reshard(model: torch.nn.Module) -> None:
    """Take the parameters apart, which are still whole after a forward pass alone."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _local(tensor: DTensor) -> torch.Tensor:
    """This rank's rows, in the tensor's own memory."""
    with torch.no_grad():
        return tensor.to_local()


def _read_piece(ref: _PieceRef, pieces: Sequence[Bytes]) -> torch.Tensor:
    """This rank's rows, as a view of the commit's memory."""
    memory, rest = pieces[ref.number], ref.shape[1:]
    if not memory.nbytes:
        return torch.empty((0, *rest), dtype=ref.dtype)
    return torch.from_numpy(memory).view(ref.dtype).view(-1, *rest)


class DividedModelHandler(ModelStateHandler, DividedHandler):
    """A model of which `fully_shard` has divided parameters; other modules as well."""

    def capture(self, builder: SnapshotBuilder) -> Any:
        reshard(self.value)
        divided = {
            name: _add_piece(builder, parameter, f"parameter {name!r}")
            for name, parameter in self._list_divided()
        }
        frozen = [name for name, parameter in self._list_divided() if not parameter.requires_grad]
        return {"divided": divided, "divided frozen": frozen, **super().capture(builder)}

    def load(self, values: Any, memory: Bytes) -> None:
        divided = dict(self._list_divided())
        saved: dict[str, _PieceRef] = values["divided"]
        shapes = {name: (tuple(p.shape), p.dtype) for name, p in divided.items()}
        if shapes != {name: (ref.shape, ref.dtype) for name, ref in saved.items()}:
            odd = sorted(shapes.keys() ^ saved.keys()) or list(shapes)
            raise InvalidInput(
                f"build(state) made another model than in the world before (see {odd[0]!r}): build the same one in "
                "each world."
            )
        with torch.no_grad():
            for name, ref in saved.items():
                _local(divided[name]).copy_(_read_piece(ref, self.pieces))
                divided[name].requires_grad_(name not in values["divided frozen"])
        super().load(values, memory)

    def _list_divided(self) -> Iterator[tuple[str, DTensor]]:
        return ((n, p) for n, p in self.value.named_parameters() if isinstance(p, DTensor))

    def parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return ((n, p) for n, p in self.value.named_parameters() if not isinstance(p, DTensor))


class DividedOptimizerHandler(OptimizerStateHandler, DividedHandler):
    """An optimizer of divided parameters, whose state is divided as they are; other optimizers as well."""

    has_own_format = False

    def load(self, values: Any, memory: Bytes) -> None:
        super().load(values, memory)
        for group in self.value.param_groups:
            for parameter in group["params"]:
                state = self.value.state.get(parameter)
                if state is not None:
                    self.value.state[parameter] = self._divide(state, parameter)

    def _divide(self, value: Any, parameter: torch.Tensor) -> Any:
        """Replace each reference by a tensor that is divided as its parameter is."""
        if isinstance(value, _PieceRef):
            if not isinstance(parameter, DTensor):
                raise InvalidInput("build(state) divides other parameters than before: build the same model.")
            strides = tuple(accumulate((1, *value.shape[:0:-1]), lambda product, length: product * length))[
                ::-1
            ]
            return DTensor.from_local(
                _read_piece(value, self.pieces).clone().to(parameter.to_local().device),
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=torch.Size(value.shape),
                stride=strides,
            )
        if isinstance(value, dict):
            return {key: self._divide(item, parameter) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self._divide(item, parameter) for item in value)
        return value

    def _add_tensors(self, value: Any, builder: SnapshotBuilder, *, deferred: bool) -> Any:
        if isinstance(value, DTensor):
            return _add_piece(builder, value, "the optimizer's state")
        return super()._add_tensors(value, builder, deferred=deferred)
