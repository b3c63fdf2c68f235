"""How much does the exchange of gradients add to a training step, against torch's DistributedDataParallel over Gloo?

    python benchmarks/training_step.py --json benchmarks/results/training_step.json
    python benchmarks/training_step.py --framework tensorflow --json benchmarks/results/training_step_tensorflow.json
    python benchmarks/training_step.py --virtual-shares 8 --rows 32 128 --json benchmarks/results/bitwise_step.json

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
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.parts.report import Row, finish, parser
from benchmarks.parts.tensorflow_step import ComparedSteps, addresses
from elastic_collectives import Endpoint, Group, connect
from spark_elastic.gradients.generators import seeded_rng
from spark_elastic.horovod.torch.gradient_sync import GradientSync, get_optimizers_in_use
from spark_elastic.torch import DistributedOptimizer
from spark_elastic.torch.elastic import ElasticDataLoader
from spark_elastic.worker.context import WorkerContext, set_context

KEY = b"a benchmark's key"
WARM_UP = 3  # rounds that open connections and touch memory


@dataclass(frozen=True)
class Net:
    """layers: linear ones of `width`, two tensors each. rows: of a rank's batch."""

    layers: int
    width: int
    rows: int
    virtual_shares: int = 0  # of a step in bitwise mode; a multiple of the ranks; 0: no such step

    @property
    def parameters(self) -> int:
        return self.layers * self.width * (self.width + 1)

    def build(self) -> torch.nn.Module:
        torch.manual_seed(1)
        layers = [
            layer
            for _ in range(self.layers)
            for layer in (torch.nn.Linear(self.width, self.width), torch.nn.ReLU())
        ]
        return torch.nn.Sequential(*layers)


def _run_rank(pipe: Connection, rank: int, size: int, folder: str, net: Net, rounds: int) -> None:
    torch.set_num_threads(1)

    def exchange(own: bytes) -> list[bytes]:
        pipe.send(own)
        blobs: list[bytes] = pipe.recv()
        return blobs

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    with (
        Endpoint(KEY) as end,
        connect(end, rank, size, (1, 1), exchange, local_ranks=range(size)) as group,
    ):
        set_context(WorkerContext(f"rank {rank}", group=group))
        data = torch.randn(net.rows, net.width, generator=torch.Generator().manual_seed(rank))
        steps, close = _make_contenders(net, data, group)
        pipe.send([_times(turn, steps, group.barrier) for turn in range(rounds + WARM_UP)][WARM_UP:])
        close()
        set_context(None)
    dist.destroy_process_group()


def _make_contenders(
    net: Net, data: torch.Tensor, group: Group
) -> tuple[list[Callable[[], object]], Callable[[], None]]:
    """(local, ours, DDP's, the exchange alone), and what ends them; with virtual shares also (ours in bitwise mode,
    the same passes alone)."""
    first = net.build()
    models: list[torch.nn.Module] = [
        first,
        copy.deepcopy(first),
        torch.nn.parallel.DistributedDataParallel(copy.deepcopy(first), gradient_as_bucket_view=True),
    ]
    optimizers: list[Any] = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in models]
    optimizers[1] = DistributedOptimizer(optimizers[1], models[1].named_parameters())

    def step(which: int) -> None:
        optimizers[which].zero_grad()
        models[which](data).square().mean().backward()
        optimizers[which].step()

    placed = group.buffer(4 * net.parameters).view(np.float32)
    alone: Callable[[], object] = lambda: group.allreduce(placed)  # noqa: E731
    contenders = [lambda: step(0), lambda: step(1), lambda: step(2), alone]
    if not net.virtual_shares:
        return contenders, optimizers[1].close
    shares = [part.clone() for part in data.chunk(net.virtual_shares // group.size)]
    bitwise, close = _bitwise_step(net, copy.deepcopy(first), shares, group)

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

    def close_both() -> None:
        optimizers[1].close()
        close()

    contenders[1] = alone_in_use(contenders[1], optimizers[1]._sync)
    return [*contenders, alone_in_use(*bitwise), take_passes], close_both


def _bitwise_step(
    net: Net, model: torch.nn.Module, shares: list[torch.Tensor], group: Group
) -> tuple[tuple[Callable[[], object], GradientSync], Callable[[], None]]:
    """A step in bitwise mode with its exchange, and what ends it."""
    rows = torch.utils.data.TensorDataset(torch.zeros(net.rows * group.size))
    loader = ElasticDataLoader(
        rows, net.rows * group.size, determinism="bitwise", virtual_shares=net.virtual_shares
    )
    torch.use_deterministic_algorithms(False)  # for the others
    optimizer: Any = DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3), model.named_parameters(), loader=loader
    )
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

    return (step, sync), optimizer.close


def _times(turn: int, steps: list[Callable[[], object]], barrier: Callable[[], None]) -> list[float]:
    """Seconds of one step of each contender."""
    taken = [0.0] * len(steps)
    for which in (*range(turn % len(steps), len(steps)), *range(turn % len(steps))):
        barrier()
        begin = time.perf_counter()
        steps[which]()
        taken[which] = time.perf_counter() - begin
    return taken


def _one_rank_of_tensorflow(pipe: Connection, rank: int, workers: list[str], net: Net, rounds: int) -> None:
    def exchange(own: bytes) -> list[bytes]:
        pipe.send(own)
        blobs: list[bytes] = pipe.recv()
        return blobs

    contenders, size = ComparedSteps(rank, workers), len(workers)
    with (
        Endpoint(KEY) as end,
        connect(end, rank, size, (1, 1), exchange, local_ranks=range(size)) as group,
    ):
        set_context(WorkerContext(f"rank {rank}", group=group))
        data = np.random.default_rng(rank).normal(size=(net.rows, net.width)).astype(np.float32)
        steps = contenders.steps(net.layers, net.width, data, group)
        pipe.send([_times(turn, steps, group.barrier) for turn in range(rounds + WARM_UP)][WARM_UP:])
        set_context(None)


def measure(size: int, net: Net, rounds: int, framework: str = "torch") -> list[Row]:
    """Rows in milliseconds."""
    spawn = get_context("spawn")
    pipes, processes = [], []
    workers = addresses(size)
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(size):
            ours, theirs = spawn.Pipe()
            of_torch = framework == "torch"
            process = spawn.Process(
                target=_run_rank if of_torch else _one_rank_of_tensorflow,
                args=(theirs, rank, *([size, folder] if of_torch else [workers]), net, rounds),
                daemon=True,
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        blobs = [pipe.recv() for pipe in pipes]
        for pipe in pipes:
            pipe.send(blobs)
        times = [pipe.recv() for pipe in pipes]
        for process in processes:
            process.join()
    slowest = [[max(one) for one in zip(*turns, strict=True)] for turns in zip(*times, strict=True)]
    medians = [1000 * statistics.median(column) for column in zip(*slowest, strict=True)]
    local, ours, theirs, alone, *with_shares = medians
    case = f"{net.parameters / 1e6:.0f} M parameters in {2 * net.layers} tensors, {size} ranks"
    case += f", {net.rows} rows each" if net.virtual_shares else ""
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


def main() -> int:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--framework", choices=["torch", "tensorflow"], default="torch")
    arguments.add_argument("--ranks", type=int, default=2)
    arguments.add_argument("--layers", type=int, default=80)
    arguments.add_argument("--width", type=int, default=559)
    arguments.add_argument("--rows", type=int, nargs="+", default=[32])
    arguments.add_argument("--virtual-shares", type=int, default=0)
    arguments.add_argument("--rounds", type=int, default=21)
    chosen = arguments.parse_args()
    name = "training_step" if chosen.framework == "torch" else f"training_step_{chosen.framework}"
    found = []
    for rows in chosen.rows:
        net = Net(chosen.layers, chosen.width, rows, chosen.virtual_shares)
        found += measure(chosen.ranks, net, chosen.rounds, chosen.framework)
    finish("bitwise_step" if chosen.virtual_shares else name, found, chosen.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
