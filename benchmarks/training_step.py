"""How much does the exchange of gradients add to a training step, against torch's DistributedDataParallel over Gloo?

With TensorFlow the peer is MultiWorkerMirroredStrategy in a custom loop.

Processes of one machine, each with one thread for arithmetic; float32, SGD. The local step (no exchange), ours and the
peer's run in the same processes on nets of the same weights, in turns, step by step, in rotating order; a figure is the
median over all rounds of the slowest rank's time. "added" is a step's time less the local step's. Beside it: what one
allreduce of all gradients takes in shared memory while nothing else is done. With virtual shares also a step of the
same rows in bitwise mode, beside our own step without it, and beside its passes in a plain loop that accumulates
gradients and exchanges nothing.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.parts.budget import within_budget
from benchmarks.parts.ranks import be_worker, find_medians, join_group, run_ranks, take_turns
from benchmarks.parts.report import Row
from benchmarks.parts.tensorflow_step import ComparedSteps, addresses
from elastic_collectives import Group
from spark_elastic.gradients.generators import seeded_rng
from spark_elastic.horovod.torch.gradient_sync import GradientSync, get_optimizers_in_use
from spark_elastic.torch import DistributedOptimizer
from spark_elastic.torch.elastic import ElasticDataLoader


@dataclass(frozen=True)
class Net:
    """layers: linear ones of `width`, two tensors each. rows: of a rank's batch."""

    layers: int
    width: int
    rows: int
    virtual_shares: int = 0  # of a step in bitwise mode; a multiple of the ranks; 0: no such step

    @property
    def name(self) -> str:
        return f"{self.parameters / 1e6:.0f} M parameters in {2 * self.layers} tensors"

    @property
    def parameters(self) -> int:
        return self.layers * self.width * (self.width + 1)

    def build(self) -> torch.nn.Module:
        return build_mlp(self.layers, self.width)


def build_mlp(layers: int, width: int) -> torch.nn.Module:
    """The same weights on every call."""
    torch.manual_seed(1)
    pairs = ((torch.nn.Linear(width, width), torch.nn.ReLU()) for _ in range(layers))
    return torch.nn.Sequential(*(layer for pair in pairs for layer in pair))


def run_rank(pipe: Connection, rank: int, size: int, folder: str, net: Net, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    with join_group(pipe, rank, size) as group, be_worker(group), ExitStack() as ending:
        data = torch.randn(net.rows, net.width, generator=torch.Generator().manual_seed(rank))
        steps = make_contenders(net, data, group, ending)
        pipe.send(take_turns(steps, group.barrier, rounds))
    dist.destroy_process_group()


def run_tensorflow_rank(
    pipe: Connection, rank: int, size: int, workers: list[str], net: Net, rounds: int
) -> None:
    contenders = ComparedSteps(rank, workers)
    with join_group(pipe, rank, size) as group, be_worker(group):
        data = np.random.default_rng(rank).normal(size=(net.rows, net.width)).astype(np.float32)
        steps = contenders.steps(net.layers, net.width, data, group)
        pipe.send(take_turns(steps, group.barrier, rounds))


def make_contenders(
    net: Net, data: torch.Tensor, group: Group, ending: ExitStack
) -> list[Callable[[], object]]:
    """Local, ours, DDP's, the exchange alone; with virtual shares also ours in bitwise mode, the same passes alone."""
    first = net.build()
    models: list[torch.nn.Module] = [
        first,
        copy.deepcopy(first),
        torch.nn.parallel.DistributedDataParallel(copy.deepcopy(first), gradient_as_bucket_view=True),
    ]
    optimizers: list[Any] = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in models]
    optimizers[1] = DistributedOptimizer(optimizers[1], models[1].named_parameters())
    ending.callback(optimizers[1].close)

    def step(which: int) -> None:
        optimizers[which].zero_grad()
        models[which](data).square().mean().backward()
        optimizers[which].step()

    placed = group.buffer(4 * net.parameters).view(np.float32)
    contenders: list[Callable[[], object]] = [partial(step, which) for which in range(3)]
    contenders.append(partial(group.allreduce, placed))
    if not net.virtual_shares:
        return contenders
    shares = [part.clone() for part in data.chunk(net.virtual_shares // group.size)]
    bitwise = make_bitwise_step(net, copy.deepcopy(first), shares, group, ending)

    def take_passes() -> None:
        optimizers[0].zero_grad()
        for share in shares:
            models[0](share).square().mean().backward()
        optimizers[0].step()

    in_use = get_optimizers_in_use()

    def alone_in_use(step: Callable[[], object], sync: GradientSync) -> Callable[[], object]:
        """A second optimizer in use would keep buckets until the end of backward."""

        def take() -> None:
            in_use.clear()
            in_use.add(sync)
            step()

        return take

    contenders[1] = alone_in_use(contenders[1], optimizers[1]._sync)
    return [*contenders, alone_in_use(*bitwise), take_passes]


def make_bitwise_step(
    net: Net, model: torch.nn.Module, shares: list[torch.Tensor], group: Group, ending: ExitStack
) -> tuple[Callable[[], object], GradientSync]:
    """A step in bitwise mode, with its exchange."""
    rows = torch.utils.data.TensorDataset(torch.zeros(net.rows * group.size))
    mode: dict[str, Any] = {"determinism": "bitwise", "virtual_shares": net.virtual_shares}
    loader = ElasticDataLoader(rows, len(rows), **mode)
    torch.use_deterministic_algorithms(False)  # for the others
    sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer: Any = DistributedOptimizer(sgd, model.named_parameters(), loader=loader)
    ending.callback(optimizer.close)
    sync = optimizer._sync

    def step() -> None:
        torch.use_deterministic_algorithms(True)
        optimizer.zero_grad()
        for number, share in enumerate(shares):
            sync.begin_share()
            with seeded_rng(1, number):
                (model(share).square().mean() * (len(share) / len(rows))).backward()
            sync.end_share()
        optimizer.step()
        torch.use_deterministic_algorithms(False)

    return step, sync


def measure(
    framework: str = "torch",
    ranks: int = 2,
    layers: int = 80,
    width: int = 559,
    rows: tuple[int, ...] = (32,),
    virtual_shares: int = 0,
    rounds: int = 21,
) -> list[Row]:
    """Rows in milliseconds."""
    found = []
    for batch in within_budget(rows, "rows of a rank:"):
        net = Net(layers, width, batch, virtual_shares)
        with tempfile.TemporaryDirectory() as folder:
            if framework == "torch":
                times = run_ranks(ranks, run_rank, folder, net, rounds)
            else:
                times = run_ranks(ranks, run_tensorflow_rank, addresses(ranks), net, rounds)
        found += make_rows(net, ranks, find_medians(times))
    return found


def make_rows(net: Net, ranks: int, medians: list[float]) -> list[Row]:
    local, ours, theirs, alone, *with_shares = medians
    case = f"{net.name}, {ranks} ranks" + (f", {net.rows} rows each" if net.virtual_shares else "")
    rows = [
        Row(f"{case}: local step", local, None, "ms"),
        Row(f"{case}: step", ours, theirs, "ms"),
        Row(f"{case}: added", ours - local, theirs - local, "ms"),
        Row(f"{case}: one allreduce of all", alone, None, "ms"),
    ]
    if with_shares:
        bitwise, passes = with_shares
        name = f"{case}: in {net.virtual_shares} virtual shares"
        rows += [
            Row(f"{name}, beside the step", bitwise, ours, "ms"),
            Row(f"{name}, beside its passes alone", bitwise, passes, "ms"),
        ]
    return rows
