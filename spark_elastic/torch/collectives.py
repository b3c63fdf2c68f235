"""Barrier, join and the sparse allreduce, under Horovod's names."""

from __future__ import annotations

import torch

from spark_elastic.errors import InvalidInput
from spark_elastic.ops import request as kinds
from spark_elastic.ops.channels import channel_of
from spark_elastic.ops.process_sets import ProcessSet, global_process_set
from spark_elastic.ops.request import Request
from spark_elastic.torch.gathering import grouped_allgather_async
from spark_elastic.torch.handles import Handle
from spark_elastic.torch.reduce_op import Average, ReduceOp, Sum


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return once all ranks of the set have called it."""
    channel_of(process_set).submit(Request(kinds.BARRIER), awaited=True).wait()


def join(device: int = -1) -> int:
    """For a rank that is out of data: take part in the others' reductions with nothing to add, until all have joined.

    Averages divide by the world's size all the same. device: Horovod's; of no use here. Returns the rank that joined
    last.
    """
    return int(channel_of().join().wait()[0][0])


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """The sum or average of sparse tensors of equal shape. Calling the handle returns the sparse result."""
    if op not in (Average, Sum) or not tensor.is_sparse:
        raise InvalidInput(f"sparse_allreduce_async takes sparse tensors, and Average or Sum; got {op!r}.")
    whole = tensor.coalesce()
    parts = [whole.indices().t().contiguous(), whole.values()]
    handle = grouped_allgather_async(parts, None if name is None else f"sparse.{name}", process_set)

    def finish(_: object) -> torch.Tensor:
        places, values = handle()
        if op is Average:
            values = values / process_set.size()
        return torch.sparse_coo_tensor(places.t(), values, whole.shape, check_invariants=False).coalesce()

    return Handle(handle.operation, finish)
