"""Collectives of torch.distributed that the bulk plane carries: tensors on GPUs, by NCCL, confirmed over the engine.

`BulkPlane` has the rules. A collective begins in the thread that calls it, on the stream that computed its operands,
and ends once every rank has told the others over the engine that its results are complete, so its `Work` waits on the
host. What NCCL does not know travels through the host, as everything does while the communicator is built.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from elastic_collectives import Group
from spark_elastic.gradients.bulk_plane import BulkPlane, BulkSums, get_or_start_bulk_plane
from spark_elastic.gradients.host_memory import TorchReduction
from spark_elastic.gradients.reduction import options_from_env

c10d: Any = dist.distributed_c10d
OPTIONS: dict[str, Any] = {
    "allreduce": c10d.AllreduceOptions,
    "broadcast": c10d.BroadcastOptions,
    "_allgather_base": c10d.AllgatherOptions,
    "_reduce_scatter_base": c10d.ReduceScatterOptions,
}
DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
DTYPES |= {torch.uint8, torch.int8, torch.int32, torch.int64}
REDUCTIONS = {"SUM", "AVG", "PRODUCT", "MIN", "MAX"}


class BulkCollectives:
    """The bulk plane of one process group. Used by the threads that call its collectives, one at a time."""

    def __init__(self, group: Group) -> None:
        self._group = group  # the process group's own, of the engine
        self._options = options_from_env()
        self._planes: dict[torch.device, BulkPlane | None] = {}

    def find_plane(self, name: str, tensors: Sequence[torch.Tensor], options: Any) -> BulkPlane | None:
        """The plane that could carry a collective, once the ranks agree on it; None: the engine carries it. name: as in
        `OPTIONS`. tensors: results and operands. options: as torch gives them, or a reduction."""
        device = tensors[0].device
        if device not in self._planes:
            self._planes[device] = get_or_start_bulk_plane(self._group, device, self._options)
        plane = self._planes[device]
        if plane is None or not all(
            tensor.device == plane.device
            and tensor.layout is torch.strided
            and tensor.is_contiguous()
            and tensor.dtype in DTYPES
            for tensor in tensors
        ):
            return None
        reduces = name in ("allreduce", "_reduce_scatter_base")
        return plane if not reduces or _get_reduction(options).name in REDUCTIONS else None

    def settle(self, plane: BulkPlane) -> None:
        """Let the ranks settle whether the plane carries collectives from now on. Collective over the engine."""
        if self._options.hybrid_recovery:
            plane.exchange_readiness()
        else:
            plane.wait_until_ready()

    def launch(self, plane: BulkPlane, name: str, tensors: Sequence[torch.Tensor], options: Any) -> BulkSums:
        """Begin a collective; the result's `finish` ends it. Arguments as for `find_plane`."""
        given = _make_options(name, options)
        shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        which = (name, _get_reduction(options).name, getattr(given, "rootRank", 0), shapes)
        sums = BulkSums(plane, zlib.crc32(repr(which).encode()) >> 1)
        listed = list(tensors)
        arguments = [listed] if name in ("allreduce", "broadcast") else listed
        sums.launch(lambda process_group: getattr(process_group, name)(*arguments, given))
        return sums

    def abort(self) -> None:
        """Give up what is in progress, after an error of the group: nothing writes to its tensors any more."""
        for plane in filter(None, self._planes.values()):
            plane.abort()
            plane.wait_aborted()


def _get_reduction(options: Any) -> TorchReduction:
    op = getattr(options, "reduceOp", options)
    return TorchReduction.of(op if isinstance(op, dist.ReduceOp) else None)


def _make_options(name: str, options: Any) -> Any:
    """The collective's options, with `asyncOp`: NCCL then returns a `Work` that can be asked for its end."""
    kind = OPTIONS[name]
    given = options if isinstance(options, kind) else kind()
    if given is not options and isinstance(options, int):
        given.rootRank = options
    elif given is not options and options is not None:
        # A reduction, or the options of a coalesced form.
        given.reduceOp = getattr(options, "reduceOp", options)
    if hasattr(given, "asyncOp"):
        given.asyncOp = True
    return given
