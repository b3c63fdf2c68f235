"""Calls of torch.distributed, each of which a worker makes over `elastic` and over torch's own Gloo."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from functools import reduce as reduce_by
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp

from tests.conformance.suite import CHOSEN, run_tests

MOVED = ("bool", "uint8", "int16", "int64", "float16", "bfloat16", "float32", "complex64", "float8_e5m2")
VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
if VERSION < (2, 3):  # makes no empty tensor of it
    MOVED = MOVED[:-1]
REDUCED = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
REFERENCE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "SUM": lambda all_ranks: all_ranks.sum(0),
    "AVG": lambda all_ranks: all_ranks.sum(0).div(
        len(all_ranks), rounding_mode=None if all_ranks.is_floating_point() else "trunc"
    ),
    "PRODUCT": lambda all_ranks: all_ranks.prod(0),
    "MIN": lambda all_ranks: all_ranks.amin(0),
    "MAX": lambda all_ranks: all_ranks.amax(0),
    "BAND": lambda all_ranks: reduce_by(operator.and_, all_ranks),
    "BOR": lambda all_ranks: reduce_by(operator.or_, all_ranks),
    "BXOR": lambda all_ranks: reduce_by(operator.xor, all_ranks),
}


def values(rank: int, dtype: str, count: int = 8) -> torch.Tensor:
    """Small numbers of a rank, no two ranks alike."""
    return (torch.arange(count) * (rank + 1) % 7).to(getattr(torch, dtype))


def find_ops(call: str, dtype: str) -> list[str]:
    """The reductions to try: all that are defined for the dtype, in two of the collectives."""
    if call not in ("all_reduce", "reduce_scatter_tensor"):
        return ["SUM", "MAX"] if dtype in ("bfloat16", "int64", "float32") else []
    integral = not getattr(torch, dtype).is_floating_point
    ops = [op for op in OPS if integral or op not in ("BAND", "BOR", "BXOR")]
    return [op for op in ops if dtype != "bool" or op != "AVG"]


Group = Any
Tensors = list[torch.Tensor]


def _allocate_like(tensor: torch.Tensor, count: int) -> Tensors:
    return [torch.zeros_like(tensor) for _ in range(count)]


def broadcast(tensor: torch.Tensor, rank: int, size: int, group: Group) -> Tensors:
    dist.broadcast(tensor, 1, group=group)
    return [tensor]


def broadcast_strided(tensor: torch.Tensor, rank: int, size: int, group: Group) -> Tensors:
    columns = tensor.reshape(2, 4).t()
    work = dist.broadcast(columns if group is None else columns.contiguous(), 2, group=group, async_op=True)
    work.wait()
    return [columns if group is None else values(2, str(tensor.dtype)[6:]).reshape(2, 4).t()]


def all_gather(tensor: torch.Tensor, rank: int, size: int, group: Group) -> Tensors:
    parts = _allocate_like(tensor, size)
    dist.all_gather(parts, tensor, group=group)
    return parts


def all_gather_coalesced(tensor: torch.Tensor, rank: int, size: int, group: Group) -> Tensors:
    """Tensors of other sizes, an empty one among them; fewer than there are ranks."""
    sent = [tensor[:2], tensor[:0]]
    lists = [[torch.zeros_like(part) for part in sent] for _ in range(size)]
    dist.all_gather_coalesced(lists, sent, group=group, async_op=True).wait()
    return [part for of_rank in lists for part in of_rank]


def all_gather_into_tensor(tensor: torch.Tensor, rank: int, size: int, group: Group) -> Tensors:
    whole = torch.zeros(size * len(tensor), dtype=tensor.dtype)
    dist.all_gather_into_tensor(whole, tensor, group=group, async_op=True).wait()
    stacked = torch.zeros(size, len(tensor), dtype=tensor.dtype)
    if group is None:  # Gloo takes no stacked output
        dist.all_gather_into_tensor(stacked, tensor)
    return [whole, stacked if group is None else whole.view(size, -1)]


def gather(tensor: torch.Tensor, rank: int, size: int, group: Group) -> Tensors:
    parts = _allocate_like(tensor, size) if rank == 2 else None
    dist.gather(tensor, parts, 2, group=group)
    return parts or []


def scatter(tensor: torch.Tensor, rank: int, size: int, group: Group) -> Tensors:
    out = torch.zeros(2, dtype=tensor.dtype)
    dist.scatter(out, list(tensor.chunk(size)) if rank == 1 else None, 1, group=group)
    return [out]


def all_to_all_single(tensor: torch.Tensor, rank: int, size: int, group: Group) -> Tensors:
    out, rows = torch.zeros_like(tensor), torch.zeros(size * rank, 2, dtype=tensor.dtype)
    dist.all_to_all_single(out, tensor, group=group)
    ragged = tensor[0] if tensor.dtype is torch.bool else tensor.view(-1)[:1]
    own = ragged.reshape(1, 1).expand(sum(range(size)), 2).contiguous()  # rank r gets r rows of each rank
    dist.all_to_all_single(rows, own, [rank] * size, list(range(size)), group=group)
    return [out, rows]


def send_and_receive(tensor: torch.Tensor, rank: int, size: int, group: Group) -> Tensors:
    """Round the ring, a short and a long message in one call each."""
    came, long = torch.zeros_like(tensor), torch.zeros(4000, dtype=tensor.dtype)
    sent = dist.isend(tensor, (rank + 1) % size, group=group)
    dist.irecv(came, (rank - 1) % size, group=group).wait()
    sent.wait()
    sent = dist.isend(tensor.repeat(500), (rank + 1) % size, group=group, tag=5)
    dist.irecv(long, (rank - 1) % size, group=group, tag=5).wait()
    sent.wait()
    return [came, long]


def receive_from_any_source(tensor: torch.Tensor, rank: int, size: int, group: Group) -> Tensors:
    found = {}
    if rank > 0:
        dist.send(tensor, 0, group=group)
    else:
        for _ in range(size - 1):
            part = torch.zeros_like(tensor)
            found[dist.recv(part, None, group=group)] = part
    # A sender need not wait for its receiver: without this, the next call's message of one rank may come before this
    # call's of the other.
    dist.barrier(group=group)
    return [found[source] for source in sorted(found)]


MOVES = (
    *(broadcast, broadcast_strided, all_gather, all_gather_coalesced, all_gather_into_tensor, gather),
    *(scatter, all_to_all_single, send_and_receive, receive_from_any_source),
)


def all_reduce(tensor: torch.Tensor, op: Any, rank: int, size: int, group: Group) -> Tensors:
    dist.all_reduce(tensor, op, group=group)
    return [tensor]


def all_reduce_async(tensor: torch.Tensor, op: Any, rank: int, size: int, group: Group) -> Tensors:
    work = dist.all_reduce(tensor, op, group=group, async_op=True)
    assert work.get_future().wait()[0] is not None
    work.wait()
    return [tensor]


def all_reduce_coalesced(tensor: torch.Tensor, op: Any, rank: int, size: int, group: Group) -> Tensors:
    parts = [tensor[:2].clone(), tensor[2:].clone()]
    dist.all_reduce_coalesced(parts, op, group=group)
    return [torch.cat(parts)]


def reduce(tensor: torch.Tensor, op: Any, rank: int, size: int, group: Group) -> Tensors:
    dist.reduce(tensor, 1, op, group=group)
    return [tensor] if rank == 1 else []


def reduce_scatter(tensor: torch.Tensor, op: Any, rank: int, size: int, group: Group) -> Tensors:
    out = torch.zeros(2, dtype=tensor.dtype)
    dist.reduce_scatter(out, list(tensor.chunk(size)), op, group=group)
    return [out]


def reduce_scatter_tensor(tensor: torch.Tensor, op: Any, rank: int, size: int, group: Group) -> Tensors:
    out = torch.zeros(2, dtype=tensor.dtype)
    dist.reduce_scatter_tensor(out, tensor, op, group=group)
    return [out]


REDUCTIONS = all_reduce, all_reduce_async, all_reduce_coalesced, reduce, reduce_scatter, reduce_scatter_tensor


def add_gloo() -> Group:
    """A process group of torch's own Gloo, beside the default one."""
    dist.Backend.register_backend("torch_gloo", dist.ProcessGroupGloo, devices=["cpu"])
    return dist.new_group(backend="torch_gloo", timeout=timedelta(seconds=60))


def attempt(call: Callable[..., Tensors], *arguments: Any) -> Any:
    """What the call returns; the error's text if it raises."""
    try:
        return [part.float() if "float8" in str(part.dtype) else part for part in call(*arguments) or ()]
    except (RuntimeError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


def compare(suite: str = "") -> dict[str, Any]:
    """By call: what came over `elastic`, and what should come.

    suite: a folder for torch's own tests, which then run in the same ranks.
    """
    other_rank = lambda: dist.init_process_group("elastic", rank=5, world_size=9)  # noqa: E731
    found: dict[str, Any] = {"another rank": attempt(other_rank)}
    dist.init_process_group("cpu:gloo,cuda:nccl")
    found["named"] = ["gloo" if "gloo" in dist.get_backend() else dist.get_backend()]
    dist.destroy_process_group()
    dist.init_process_group("nccl")
    found["named"] += [dist.get_backend(), dist.group.WORLD.name()]
    dist.destroy_process_group()
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    gloo = add_gloo()
    for move in MOVES:
        for dtype in MOVED:
            ours = attempt(move, values(rank, dtype), rank, size, None)
            # Without float8, which Gloo does not know, the ranks must agree on what Gloo does: all or none raise.
            theirs = attempt(move, values(rank, "int8" if "float8" in dtype else dtype), rank, size, gloo)
            found[f"{move.__name__} {dtype}"] = ours, theirs
    for reduction in REDUCTIONS:
        for dtype in REDUCED:
            for op in find_ops(reduction.__name__, dtype):
                ours = attempt(reduction, values(rank, dtype), getattr(dist.ReduceOp, op), rank, size, None)
                expected = _reduce(reduction, dtype, op, rank, size)
                found[f"{reduction.__name__} {dtype} {op}"] = ours, expected
    found["ddp over elastic"], found["ddp over gloo"] = train_wrapped(None), train_wrapped(gloo)
    if VERSION >= (2, 7):
        found["first fsdp over elastic"] = train_first_fsdp()
        found["fsdp over elastic"] = train_wrapped(None, shard=True)
    try_other_calls(found, rank, size)
    if VERSION >= (2, 9):  # has kernels that others can call
        found["observed"] = observe(None, rank, size), observe(gloo, rank, size)
    find_own_ways(found, rank)
    make_mistakes(found, rank)
    dist.destroy_process_group()
    found["suite"] = dict(conform(suite, rank, size)) if suite else {}
    return found


def conform(folder: str, rank: int, size: int) -> Iterator[tuple[str, tuple[str, str]]]:
    for name, status, error in run_tests(CHOSEN, Path(folder), rank, size):
        yield name, (status, error)
        if status == "fail":
            return


def observe(group: Group, rank: int, size: int) -> list[Any]:
    """What a profiler and a dispatch mode see of each collective."""
    from torch.distributed.tensor.debug import CommDebugMode

    ones, many = torch.ones(8), torch.ones(size * 2, dtype=torch.complex64)
    calls: list[Callable[[], Any]] = [
        lambda: all_reduce(ones, dist.ReduceOp.SUM, rank, size, group),
        lambda: all_reduce_async(ones, dist.ReduceOp.SUM, rank, size, group),
        lambda: all_reduce_coalesced(ones, dist.ReduceOp.SUM, rank, size, group),
        lambda: dist.all_reduce(torch.eye(3).to_sparse(), group=group),
        lambda: all_gather_coalesced(ones, rank, size, group),
        lambda: dist.all_gather_into_tensor(torch.ones(size * 8), ones, group=group),
        lambda: dist.all_to_all_single(torch.empty_like(many), many, group=group),
        lambda: dist.barrier(group=group),
        *(partial(move, ones, rank, size, group) for move in (broadcast, all_gather, gather)),
        lambda: dist.scatter(ones, [ones] * size if rank == 1 else None, 1, group=group),
        lambda: reduce(ones, dist.ReduceOp.SUM, rank, size, group),
        lambda: send_and_receive(ones, rank, size, group),
        lambda: dist.send(ones, 1, group=group) if rank == 0 else rank == 1 and dist.recv(ones, group=group),
    ]
    with torch.profiler.profile(record_shapes=True) as profiler:
        for call in calls:
            call()
    events = [event for event in profiler.events() if re.match("c10d::|gloo:", event.name)]
    with CommDebugMode() as mode:
        for call in calls:
            call()
    seen = sorted((event.name, str(event.input_shapes), event.is_async) for event in events)
    return [seen, {str(name): number for name, number in mode.get_comm_counts().items()}]


def find_own_ways(found: dict[str, Any], rank: int) -> None:
    """What torch's own groups and stores tell of themselves."""
    world, second = dist.group.WORLD, timedelta(seconds=1)
    before = world._get_sequence_number_for_group()
    dist.all_reduce(torch.ones(1))
    found["counted"] = world._get_sequence_number_for_group() - before
    named = dist.new_group(backend="gloo", timeout=timedelta(seconds=50))
    late = dist.new_group(backend="gloo")
    found["named"] = named.name(), named._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    own = named.get_group_store()
    own.set(f"key {rank}", "of the group")
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    keys = store.num_keys()
    dist.barrier()
    store.set(f"another {rank}", "")
    dist.barrier()
    found["keys"] = own.get("key 0"), store.num_keys() - keys
    store.set_timeout(second)
    found["a missing key"] = attempt(lambda: store.get("never set"))
    store.set_timeout(timedelta(minutes=5))
    later = partial(named.monitored_barrier, second, wait_all_ranks=True)
    waits = [lambda: late.monitored_barrier(timedelta(0)), later]
    found["alone in a barrier"] = [attempt(wait) for wait in waits] if rank == 0 else []
    dist.barrier()


def build_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()


def batch(step: int) -> torch.Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def flatten(model: torch.nn.Module) -> list[float]:
    full = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
    return [number for parameter in full for number in parameter.detach().reshape(-1).tolist()]


def train_wrapped(group: Group, shard: bool = False) -> list[float]:
    """The weights after some steps under DDP or FSDP2; each rank has its own rows."""
    model: torch.nn.Module = build_model()
    if shard:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model[0])
        fully_shard(model)
    else:
        model = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    take_steps(model, 3, dist.get_rank(), dist.get_world_size())
    return flatten(model)


def train_first_fsdp() -> list[float]:
    """The same under FullyShardedDataParallel, the first FSDP, which resizes the memory that it exchanges."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(build_model(), device_id=torch.device("cpu"))
    take_steps(model, 3, dist.get_rank(), dist.get_world_size())
    with FullyShardedDataParallel.summon_full_params(model):
        return flatten(model)


def take_steps(model: torch.nn.Module, steps: int, rank: int = 0, size: int = 1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step)[rank::size]).square().mean().backward()
        optimizer.step()


def try_other_calls(found: dict[str, Any], rank: int, size: int) -> None:
    import torch.distributed._functional_collectives as functional

    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.full((2,), rank + 1.0), (3,))
    dist.all_reduce(sparse)
    found["sparse"] = sparse.to_dense().tolist()
    number = torch.full((1,), 2.0 * rank)
    dist.all_reduce(number, dist._make_nccl_premul_sum(0.5))
    found["premultiplied"] = number.item()
    mixed = [torch.full((3,), rank + 0.5, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)]
    sums = functional.all_reduce_coalesced(mixed, "sum", dist.group.WORLD)
    found["of two dtypes"] = [part.float().tolist() for part in sums]
    future = dist.all_reduce(torch.full((1,), float(rank)), async_op=True).get_future()
    found["in a callback"] = future.then(reduce_again).wait().item()
    pair = dist.new_group([0, 2], backend="gloo")
    number = torch.full((1,), float(rank))
    if rank in (0, 2):
        dist.all_reduce(number, group=pair)
    found["pair"] = number.item() if rank in (0, 2) else None
    every = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    dist.monitored_barrier(every)
    found["backend names"] = dist.get_backend(), dist.get_backend(every), *found.pop("named")
    store = dist.distributed_c10d._get_default_store()
    first = store.compare_set("chosen", "", "by one rank")
    store.add("count", 1)
    dist.barrier()
    has_count = not hasattr(store, "check") or store.check(["count"])  # from torch 2.3 on
    found["store"] = has_count, store.add("count", 0), first
    dist.barrier()


def reduce_again(future: Any) -> torch.Tensor:
    """A callback that waits for a collective of its own, as torch's PowerSGD hook does."""
    (total,) = future.value()
    again: torch.Tensor = dist.all_reduce(total.clone(), async_op=True).get_future().wait()[0]
    return again


def make_mistakes(found: dict[str, Any], rank: int) -> None:
    groups = [dist.new_group() for _ in range(3)]
    found["another size"] = attempt(lambda: dist.all_reduce(torch.ones(rank + 1), group=groups[0]))
    op = dist.ReduceOp.MAX if rank == 0 else dist.ReduceOp.SUM
    found["another reduction"] = attempt(lambda: dist.all_reduce(torch.ones(4), op, group=groups[1]))
    ended = groups[2]
    for group in groups:
        dist.destroy_process_group(group)
    if VERSION < (2, 7):  # does not tell a group that Python made
        ended.shutdown()
    found["an ended group"] = attempt(lambda: ended.allreduce([torch.ones(1)]))
    ones = torch.ones(1)
    found["bool average"] = attempt(lambda: dist.all_reduce(ones.bool(), dist.ReduceOp.AVG))
    pairs = torch.ones(2, dtype=torch.complex64)
    found["complex product"] = attempt(lambda: dist.reduce(pairs, 0, dist.ReduceOp.PRODUCT))
    found["too few tensors"] = attempt(lambda: dist.all_gather([torch.ones(1)], ones))
    found["a shorter tensor"] = attempt(lambda: dist.all_gather([torch.ones(6)] * 4, ones))
    found["a tensor elsewhere"] = attempt(lambda: dist.all_reduce(torch.ones(1, device="meta")))


STEPS, KILLED_AT = 12, 5


def train_ddp(device: str = "cpu", measure: str = "") -> dict[str, Any]:
    """DDP under `elastic.run`; rank 1 of the first world kills itself in the middle of a backward pass.

    measure: whose exchange each step's loss takes before, so that the world breaks there: "torch" or "horovod".
    """
    import os
    import signal

    import spark_elastic.torch as hvd

    hvd.init()
    model = build_model().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    trained: list[int] = []
    errors: list[str] = []

    @hvd.elastic.run
    def loop(state: Any) -> None:
        # As programs for GPUs say it.
        named = {} if device == "cpu" else {"backend": "nccl", "device_id": torch.device(device, 0)}
        dist.init_process_group(**named)
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        while state.step < STEPS:
            optimizer.zero_grad()
            # All rows on each rank: the weights do not depend on the size of the world.
            loss = ddp(batch(state.step).to(device)).square().mean()
            if state.step == KILLED_AT and hvd.size() == 3 and hvd.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                if measure == "torch":
                    dist.all_reduce(loss.detach())
                elif measure:
                    hvd.allreduce(loss.detach())
                loss.backward()
            except hvd.HorovodInternalError as error:
                errors.append(str(error))
                raise
            optimizer.step()
            trained.append(state.step)
            state.step += 1
            state.commit()

    loop(hvd.elastic.TorchState(model, optimizer, step=0))
    return {"weights": flatten(model), "trained": trained, "error": errors[0] if errors else None}


def train_alone() -> list[float]:
    model = build_model()
    take_steps(model, STEPS)
    return flatten(model)


def _reduce(reduction: Callable[..., Tensors], dtype: str, op: str, rank: int, size: int) -> Tensors:
    everything = torch.stack([values(other, dtype) for other in range(size)])
    if everything.dtype in (torch.float16, torch.bfloat16):
        result = REFERENCE[op](everything.float()).to(everything.dtype)
    elif dtype == "bool":
        result = {"SUM": everything.any(0), "PRODUCT": everything.all(0)}.get(op)
        result = REFERENCE[op](everything) if result is None else result
    else:
        result = REFERENCE[op](everything).to(everything.dtype)
    if reduction is reduce:
        return [result] if rank == 1 else []
    return [result.chunk(size)[rank] if "scatter" in reduction.__name__ else result]
