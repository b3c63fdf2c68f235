"""Join and the sparse allreduce, under Horovod's names."""

from __future__ import annotations

import torch

from spark_elastic.errors import InvalidInput
from spark_elastic.ops.channels import channel_of
from spark_elastic.ops.process_sets import ProcessSet, global_process_set
from spark_elastic.ops.reduce_op import Average, ReduceOp, Sum
from spark_elastic.ops.rounds.request import named
from spark_elastic.torch.gathering import grouped_allgather_async
from spark_elastic.torch.gradients.rounds import rounds_of_process
from spark_elastic.torch.handles import Handle


def join(device: int = -1) -> int:
    """For a rank that is out of data: take part in the others' reductions with nothing to add, until all have joined.

    Averages divide by the world's size all the same. The steps of a `DistributedOptimizer` are taken part in, not
    applied: as with Horovod, the newest weights are those of the rank that joined last, which is what this returns.
    device: of no use here.

    Raises:
        InvalidInput: several such optimizers are in use, or gradients were not exchanged.
        CollectiveError: the world changed.
    """
    rounds = list(rounds_of_process())
    if len(rounds) > 1:
        raise InvalidInput(
            f"join() cannot tell which of {len(rounds)} optimizers the others step: close() all but one."
        )
    joined = channel_of().join(sum(one.steps() for one in rounds))
    for one in rounds:
        while one.run_without_data():
            pass  # until nobody has data
    return int(joined.wait()[0][0])


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
    handle = grouped_allgather_async(parts, named("sparse", name), process_set)

    def finish(_: object) -> torch.Tensor:
        places, values = handle()
        if op is Average:
            values = values / process_set.size()
        return torch.sparse_coo_tensor(places.t(), values, whole.shape, check_invariants=False).coalesce()

    return Handle(handle.operation, finish)
