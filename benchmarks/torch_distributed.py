"""What do torch.distributed's wrappers and collectives take over the backend `elastic`, against torch's own Gloo?

Processes of one machine, each with one thread for arithmetic; float32. Steps with SGD: the local step (no exchange),
DDP and FSDP2 over both backends, FSDP2 also over torch's backend `fake`, which exchanges nothing, and our
`DistributedOptimizer`, on nets of the same weights; "added" is a step's time less the local step's. Collectives: each
that Gloo has, by bytes of its larger operand on a rank; a round makes several calls of the small ones. All contenders
run in the same processes, in turns, in rotating order; a figure is the median over all rounds of the slowest rank's
time.

Commits of `FSDPState`: model and AdamW's state divided by FSDP2, each rank a host. The peer is a commit without copies
on other hosts, or the bytes of what a rank trains. Recovery: a DDP loop on processes of this machine, one of which is
killed in each world of all workers (`benchmarks/parts/loop_recovery.py`). `what` names one kind.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers torch's backend "fake"
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from benchmarks.parts.budget import within_budget
from benchmarks.parts.loop_recovery import measure_recovery
from benchmarks.parts.ranks import be_worker, find_medians, join_group, run_ranks, take_turns
from benchmarks.parts.report import Row
from benchmarks.training_step import Net
from spark_elastic.clock import SystemClock
from spark_elastic.handwritten.fsdp import DividedModelHandler, DividedOptimizerHandler
from spark_elastic.handwritten.sharded_commits import CommitKey, Place, ShardedCommits
from spark_elastic.integrations.torch_distributed import register
from spark_elastic.protocol.types import START
from spark_elastic.runs.snapshot import SnapshotBuilder
from spark_elastic.torch import DistributedOptimizer
from spark_elastic.worker.context import get_context
from spark_elastic.worker.stack_reader import StackReader
from spark_elastic.worker.stack_sampler import StackSampler

SIZES = {"4 KB": 4 << 10, "256 KB": 256 << 10, "4 MB": 4 << 20, "64 MB": 64 << 20}
BLOCK = 20  # modules that FSDP2 gathers together


def _run_rank(pipe: Connection, rank: int, size: int, folder: str, what: Callable[..., Any]) -> None:
    """Send what `what` measures between both backends."""
    torch.set_num_threads(1)
    register()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    reader = StackReader()
    sampler = StackSampler(reader.activity, reader.stacks, SystemClock())  # as in each training process
    sampler.start()
    with join_group(pipe, rank, size) as group, be_worker(group, wait_recorder=sampler):
        pipe.send(what(dist.new_group(backend="elastic"), dist.group.WORLD, group.barrier))
    sampler.close()
    reader.close()


# ---- steps


def _time_steps(
    net: Net, rounds: int, ours: Any, gloo: Any, barrier: Callable[[], None]
) -> list[list[float]]:
    """Of (local; DDP over both and over a group that exchanges nothing, FSDP2 over the three; our optimizer)."""
    data = torch.randn(net.rows, net.width, generator=torch.Generator().manual_seed(dist.get_rank()))
    first = net.build()
    ddp = partial(torch.nn.parallel.DistributedDataParallel, gradient_as_bucket_view=True)
    models = [
        first,
        ddp(copy.deepcopy(first), process_group=ours),
        ddp(copy.deepcopy(first), process_group=gloo),
        ddp(copy.deepcopy(first), process_group=ours),
        _shard(copy.deepcopy(first), ours),
        _shard(copy.deepcopy(first), gloo),
        _shard(copy.deepcopy(first), dist.new_group(backend="fake")),
        copy.deepcopy(first),
    ]
    models[3].register_comm_hook(None, lambda _, bucket: _complete(bucket.buffer()))
    optimizers: list[Any] = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in models]
    optimizers[-1] = DistributedOptimizer(optimizers[-1], models[-1].named_parameters())

    def step(which: int) -> None:
        optimizers[which].zero_grad()
        models[which](data).square().mean().backward()
        optimizers[which].step()

    times = take_turns([partial(step, which) for which in range(len(models))], barrier, rounds)
    optimizers[-1].close()
    return times


def _complete(tensor: torch.Tensor) -> Any:
    """A future that has the tensor as its result."""
    done: Any = torch.futures.Future()
    done.set_result(tensor)
    return done


def _shard(model: torch.nn.Module, group: Any) -> torch.nn.Module:
    mesh, layers = DeviceMesh.from_group(group, "cpu"), list(model.children())
    for begin in range(0, len(layers), BLOCK):
        fully_shard(layers[begin : begin + BLOCK], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def run_between_backends(size: int, what: Callable[..., Any]) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(size, _run_rank, folder, what)


def measure_steps(size: int, net: Net, rounds: int) -> list[Row]:
    """Rows in milliseconds."""
    times = run_between_backends(size, partial(_time_steps, net, rounds))
    local, ddp, gloo_ddp, ddp_alone, fsdp, gloo_fsdp, alone, own = find_medians(times)
    case, added = f"{net.name}, {size} ranks", gloo_ddp - local
    return [
        Row(f"{case}: local step", local, None, "ms"),
        Row(f"{case}: DDP, step", ddp, gloo_ddp, "ms"),
        Row(f"{case}: DDP, added", ddp - local, added, "ms"),
        Row(f"{case}: DDP, added without an exchange, beside Gloo's", ddp_alone - local, added, "ms"),
        Row(f"{case}: DistributedOptimizer, added, beside DDP", own - local, added, "ms"),
        Row(f"{case}: FSDP2, step", fsdp, gloo_fsdp, "ms"),
        Row(f"{case}: FSDP2, added", fsdp - local, gloo_fsdp - local, "ms"),
        Row(f"{case}: FSDP2, step without an exchange, beside Gloo's", alone, gloo_fsdp, "ms"),
        Row(f"{case}: FSDP2, its exchange, beside Gloo's", fsdp - alone, gloo_fsdp - alone, "ms"),
    ]


# ---- commits


def _time_commits(net: Net, rounds: int, ours: Any, _: Any, barrier: Callable[[], None]) -> Any:
    """(times of (step, commit, commit without copies), bytes of a commit's memory, bytes that a rank trains)."""
    worker = get_context()
    assert worker is not None
    group = worker.require_group()
    model = _shard(net.build(), ours)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    handlers = {"model": DividedModelHandler(model), "optimizer": DividedOptimizerHandler(optimizer)}
    data = torch.randn(net.rows, net.width, generator=torch.Generator().manual_seed(dist.get_rank()))
    commits, uncopied = ShardedCommits(), ShardedCommits()
    commits.agree_on_commit(group, Place("a machine", f"host {group.rank}"))

    def capture(builder: SnapshotBuilder) -> dict[str, Any]:
        return {name: handler.capture(builder) for name, handler in handlers.items()}

    def step() -> None:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    def commit_alone() -> None:
        commit = uncopied.copy_state(group.rank, CommitKey(0, group.fence, group.size), START, capture)
        group.barrier()
        uncopied.keep_only(commit)

    save = partial(commits.save, group, START, group.fence, capture)
    times = take_turns([step, save, commit_alone], barrier, rounds)
    kept = commits.get_newest_complete()
    assert kept is not None
    return times, commits.memory_bytes, kept.shards[group.rank].nbytes


def measure_commits(size: int, net: Net, rounds: int) -> list[Row]:
    """Rows in milliseconds and MB."""
    found = run_between_backends(size, partial(_time_commits, net, rounds))
    step, commit, alone = find_medians([times for times, _, _ in found])
    memory, trained = (max(column) / 1e6 for column in list(zip(*found, strict=True))[1:])
    case = f"{net.name}, {size} ranks: FSDP2 with AdamW"
    return [
        Row(f"{case}, step", step, None, "ms"),
        Row(f"{case}, commit, beside one without copies", commit, alone, "ms"),
        Row(f"{case}, memory of commits on a rank, beside what it trains", memory, trained, "MB"),
    ]


# ---- collectives


def _time_collectives(
    rounds: int, ours: Any, gloo: Any, barrier: Callable[[], None]
) -> dict[tuple[str, str], list[list[float]]]:
    """By collective and size: times of (ours, Gloo's)."""
    found = {}
    for label, count in SIZES.items():
        repeats = max(1, min(20, (4 << 20) // count))
        pairs = [_build_calls(count // 4, group) for group in (ours, gloo)]
        for name in pairs[0]:
            found[name, label] = take_turns([calls[name] for calls in pairs], barrier, rounds, 2, repeats)
    return found


def _build_calls(count: int, group: Any) -> dict[str, Callable[[], object]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    count -= count % size
    whole, part = torch.zeros(count), torch.zeros(count // size)
    parts = list(torch.zeros(count).chunk(size))
    root, last = rank == 0, rank == size - 1
    return {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_reduce, asynchronous": lambda: dist.all_reduce(whole, group=group, async_op=True).wait(),
        "reduce": lambda: dist.reduce(whole, 0, group=group),
        "broadcast": lambda: dist.broadcast(whole, 0, group=group),
        "all_gather": lambda: dist.all_gather(parts, part, group=group),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(whole, part, group=group),
        "gather": lambda: dist.gather(part, parts if root else None, 0, group=group),
        "scatter": lambda: dist.scatter(part, parts if root else None, 0, group=group),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.empty_like(whole), whole, group=group),
        "send and recv": lambda: (
            dist.send(whole, size - 1, group=group) if root else last and dist.recv(whole, 0, group=group)
        ),
        "barrier": lambda: dist.barrier(group),
    }


def measure_collectives(size: int, rounds: int) -> list[Row]:
    """Rows in milliseconds."""
    found = run_between_backends(size, partial(_time_collectives, rounds))
    medians = {case: find_medians([times[case] for times in found]) for case in found[0]}
    return [Row(f"{', '.join(case)}, {size} ranks", *pair, "ms") for case, pair in medians.items()]


def measure(
    what: tuple[str, ...] = ("steps", "collectives", "commits", "recovery"),
    ranks: tuple[int, ...] = (2, 4),
    layers: int = 80,
    width: int = 560,
    rounds: int = 15,
    kills: int = 20,
) -> list[Row]:
    net, rows = Net(layers, width, rows=32), []
    for size in within_budget(ranks, "ranks:"):
        if "steps" in what:
            rows += measure_steps(size, net, rounds)
        if "collectives" in what:
            rows += measure_collectives(size, rounds)
        if "commits" in what:
            rows += measure_commits(size, net, rounds)
    if "recovery" in what:
        with tempfile.TemporaryDirectory() as folder:
            rows += measure_recovery(Path(folder), 3, kills)
    return rows
