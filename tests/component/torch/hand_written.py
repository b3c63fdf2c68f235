"""Hand-written training functions, and how a test runs them on plain processes while things happen to those."""

from __future__ import annotations

import io
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import cloudpickle
import psutil
import pytest
import torch

from spark_elastic.clock import SystemClock
from spark_elastic.clusters.run.call import RunCall, decode_results, prepare
from spark_elastic.config import ElasticConfig
from spark_elastic.driver.job import DriverOptions, supervise
from spark_elastic.driver.ports import Post
from spark_elastic.protocol.events import DrainRequested
from tests import simulated_nccl
from tests.component.injected_faults import list_workers
from tests.component.torch.job import DeviceLauncher
from tests.journals import keep_journal

cloudpickle.register_pickle_by_value(sys.modules[__name__])
STEPS = 20
PACE = 0.05  # seconds a step takes at least
NEVER = 3600.0  # seconds, longer than any test


def train(steps: int, holds: dict[int, int | str]) -> dict[str, Any]:
    """A linear net in float64. Each step's batch follows from the step alone and is the same on all ranks, so that the
    final weights are those of one process, whatever the world did. holds: what `hold` awaits before those steps."""
    import torch

    import spark_elastic.torch as hvd

    hvd.init()
    torch.manual_seed(hvd.rank() + 7)  # what rank 0 begins with counts, for newcomers too
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = torch.nn.Linear(4, 1).double().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    trained: list[int] = []

    @hvd.elastic.run
    def loop(state: Any) -> None:
        while state.step < steps:
            hold(state, holds.get(state.step))
            time.sleep(PACE)
            drawn = torch.Generator().manual_seed(state.step)
            batch = torch.randn(6, 4, generator=drawn, dtype=torch.float64)
            optimizer.zero_grad()
            model(batch.to(device)).pow(2).mean().backward()
            optimizer.step()
            trained.append(state.step)
            state.step += 1
            print(f"step {state.step}", flush=True)  # noqa: T201 - what the test waits for
            state.commit()

    state: Any = hvd.elastic.TorchState(model, optimizer, step=0, initial=model.weight.detach().clone())
    loop(state)
    return {
        "rank": hvd.rank(),
        "weights": torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist(),
        "momentum": [optimizer.state[p]["momentum_buffer"].flatten().tolist() for p in model.parameters()],
        "trained": trained,
        "initial": state.initial.tolist(),
        "device": device,
    }


def hold(state: Any, awaited: int | str | None) -> None:
    """Stand still until the job is in its awaited world, the first one being 1, or until that file is there: so a blow
    comes in mid-training however late the test strikes. A file says nothing of the world: steps must follow that
    notice what was struck."""
    from spark_elastic.worker.context import get_context

    worker: Any = get_context()
    while isinstance(awaited, str) and not os.path.exists(awaited):
        time.sleep(PACE)
    while isinstance(awaited, int) and worker.world.fence.generation < awaited:
        time.sleep(PACE)
        state.check_host_updates()  # leaves this world for the next one


def await_size(state: Any, size: int) -> None:
    """Stand still until the world has that many workers."""
    from spark_elastic.worker.context import get_context

    worker: Any = get_context()
    while worker.group is None or worker.group.size < size:
        time.sleep(PACE)
        state.check_host_updates()


def count(
    steps: int, commit_every: int, check: bool = False, holds: dict[int, int | str] | None = None
) -> dict[str, Any]:
    """Without a framework: each step adds 1 to a vector, summed over the ranks and divided by their number."""
    import numpy as np

    from spark_elastic.handwritten.elastic_loop import elastic
    from spark_elastic.handwritten.object_state import ObjectState
    from spark_elastic.worker.context import get_context

    trained: list[int] = []

    def loop(state: Any) -> None:
        worker: Any = get_context()
        while state.step < steps:
            hold(state, (holds or {}).get(state.step))
            time.sleep(PACE)
            change = np.ones(1000)
            worker.group.allreduce(change)
            state.numbers = state.numbers + change / worker.group.size
            trained.append(state.step)
            state.step += 1
            print(f"step {state.step}", flush=True)  # noqa: T201 - what the test waits for
            if state.step % commit_every == 0:
                state.commit()
            elif check:
                state.check_host_updates()

    state: Any = ObjectState(numbers=np.zeros(1000), step=0)
    elastic(loop)(state)
    assert float(state.numbers.min()) == float(state.numbers.max())
    return {"number": float(state.numbers[0]), "trained": trained}


def exchange_around(go: str) -> list[Any]:
    """What the ranks gather before their loop and after it: their ranks. The loop begins once the first world, of two,
    is to change, and the function goes on after the loop once there is a file `go`."""
    import numpy as np

    import spark_elastic.torch as hvd
    from spark_elastic.worker.context import get_context

    hvd.init()
    seen = [hvd.allgather_object(hvd.rank()), hvd.broadcast_object(hvd.size())]
    hvd.barrier()
    worker: Any = get_context()
    while worker.world.size == 2 and worker.handle.membership_version() <= worker.world.version:
        time.sleep(PACE)

    @hvd.elastic.run
    def loop(state: Any) -> None:
        while state.step < 12:
            hold(state, {5: 2, 8: 4}.get(state.step))
            time.sleep(PACE)
            assert hvd.allreduce(torch.tensor(np.ones(1)), op=hvd.Sum) == hvd.size()
            state.step += 1
            print(f"step {state.step}", flush=True)  # noqa: T201 - what the test waits for
            state.commit()

    loop(hvd.elastic.TorchState(step=0))
    print("step 20", flush=True)  # noqa: T201 - likewise
    hold(None, go)
    return [*seen, hvd.allgather_object(hvd.rank())]


class Run:
    """One call of `run` on plain processes. `at` does something once a worker says that it took a step. spares: slots
    start warm spares, at once. modules: that workers import in advance."""

    def __init__(
        self,
        fn: Any,
        *given: Any,
        room: int,
        spares: bool = False,
        device: str = "cpu",
        modules: tuple[str, ...] = (),
        **arguments: Any,
    ) -> None:
        if callable(fn):  # workers know no tests
            cloudpickle.register_pickle_by_value(sys.modules[getattr(fn, "func", fn).__module__])
        self._waiting: list[tuple[int, Callable[[], object]]] = []
        self._threads: list[threading.Thread] = []
        self.lines = io.StringIO()
        config = ElasticConfig(gather_timeout=60.0, lease=3.0)
        arguments = {"min_workers": 1, "stdout": self, **arguments}
        self.call: RunCall = prepare(fn, given, arguments, config)
        preload, spare_after = (*self.call.preload, *modules), 0.0 if spares else NEVER
        options = {"preload": preload, "room": room, "spare_after": spare_after}
        self.cluster = DeviceLauncher(device, self.call.program, **options)

    def at(self, step: int, act: Callable[[], object]) -> None:
        self._waiting.append((step, act))

    def results(self) -> list[Any]:
        call, driver = self.call, DriverOptions(run=self.call.take_run())
        limits, config = call.make_limits(2), call.options.config
        try:
            with call.open_output() as told, keep_journal(config) as (kept, _):
                return decode_results(supervise(self.cluster, self, driver, limits, kept, call.name, told))
        finally:
            for thread in self._threads:
                thread.join()

    def workers(self) -> list[psutil.Process]:
        return list_workers(self.cluster)

    def drain(self, job: int) -> None:
        self._post(DrainRequested(SystemClock().now(), "the host is wanted elsewhere", host=f"host-{job}"))

    def sizes(self) -> list[int]:
        """Of all worlds."""
        told = self.lines.getvalue().splitlines()
        return [int(line.split()[2].rstrip(":")) for line in told if line.startswith("world of ")]

    # ---- discovery

    def start(self, post: Post) -> None:
        self._post = post

    def close(self) -> None:
        """Nothing."""

    # ---- the stream that the job's lines go to

    def write(self, text: str) -> None:
        self.lines.write(text)
        step = text.rpartition("] step ")[2].strip()
        if step.isdigit():
            due = [act for at, act in self._waiting if int(step) >= at]
            self._waiting = [(at, act) for at, act in self._waiting if int(step) < at]
            for act in due:
                self._threads.append(threading.Thread(target=act))
                self._threads[-1].start()

    def flush(self) -> None:
        """Nothing."""


def train_plain(initial: list[list[float]], bias: float, steps: int = STEPS) -> torch.Tensor:
    """The same training in one process."""
    model = torch.nn.Linear(4, 1).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor(initial))
        model.bias.fill_(bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        batch = torch.randn(6, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        optimizer.zero_grad()
        model(batch).pow(2).mean().backward()
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def first_bias() -> float:
    torch.manual_seed(7)
    return float(torch.nn.Linear(4, 1).double().bias.detach())


def assert_exact(results: list[dict[str, Any]], steps: int = STEPS) -> None:
    """P2 and P4: all replicas hold the weights that an undisturbed process has."""
    assert results
    for result in results:
        assert result["weights"] == results[0]["weights"]
        assert result["momentum"] == results[0]["momentum"]
    expected = train_plain(results[0]["initial"], first_bias(), steps)
    got = torch.tensor(results[0]["weights"], dtype=torch.float64)
    assert float((got - expected).abs().max() / expected.abs().max()) < 1e-9


def assert_continued(run: Run, results: list[Any], alone: dict[str, Any], ledger: float, *names: str) -> None:
    """P1 and P2 of a Trainer of another library: a worker was lost and another one took its place. alone: what one
    process has. ledger: how much each row counts at the end. names: of what all have alike besides."""
    assert len(run.sizes()) >= 3, "no worker was lost, or none took its place"
    expected = torch.tensor(alone["weights"], dtype=torch.float64)
    for result in results:
        assert result["weights"] == results[0]["weights"]
        got = torch.tensor(result["weights"], dtype=torch.float64)
        assert float((got - expected).abs().max() / expected.abs().max()) < 1e-9
        assert max(abs(counted - ledger) for counted in result["ledger"]) < 1e-9
        assert {name: result[name] for name in names} == {name: alone[name] for name in names}
    trained = max((result["trained"] for result in results), key=len)
    assert trained[-1] == alone["trained"][-1]
    assert len(trained) - len(set(trained)) <= 1, "more than the step in flight was taken again"


# What carries the tensors of torch.distributed: the engine, or the simulated NCCL wherever NCCL would.
CARRIERS = ["engine", simulated_nccl.NAME]


def run_over(carrier: str, train: Any, size: int) -> tuple[list[Any], list[int]]:
    """Call a function on that many workers. Returns the results, by rank, and the sizes of all worlds."""
    with pytest.MonkeyPatch.context() as patch:
        modules: tuple[str, ...] = ()
        if carrier != "engine":
            patch.setenv("SPARK_ELASTIC_BULK_BACKEND", carrier)
            patch.setenv("SPARK_ELASTIC_HYBRID_RECOVERY", "0")
            modules = (simulated_nccl.__name__,)
        job = Run(train, room=size, num_workers=size, modules=modules)
        results = job.results()
    assert (f"gradients travel by {carrier}" in job.lines.getvalue()) == (carrier != "engine")
    return results, job.sizes()


class Lost(Exception):
    """Stands for the error of a broken world."""


def run_in_two_worlds(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """In place of `elastic.run`, in this process: the first world breaks by `Lost`, the second one ends the loop."""

    def call(state: Any) -> Any:
        with pytest.raises(Lost):
            function(state)
        state.restore()
        return function(state)

    return call
