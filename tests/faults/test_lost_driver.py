"""R23 on a standalone cluster of four hosts: drivers are killed again and again, Python, JVM or both, and a run ends as
if nothing had happened. Each driver continues at the step at which the one before was killed; without commits that
hosts keep, at the newest checkpoint (P7)."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
import torch

import spark_elastic
from spark_elastic.data.store import Store
from spark_elastic.runs.checkpoint import CheckpointStore, OwnedRun
from spark_elastic.runs.kept_commits import KeptCommits
from spark_elastic.torch import progress
from spark_elastic.training.step_commits import LONGEST
from tests.component.torch import hand_written
from tests.component.torch.hand_written import assert_exact
from tests.patience import until
from tests.scenarios import Fault
from tests.sources import ROOT
from tests.spark import estimators
from tests.spark.cluster import StandaloneCluster, cluster_environment, start_session

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.native, pytest.mark.timeout(1800)]

HOSTS, WORKERS = 4, 3
RUN = "lost"
# What outlives a driver: nothing but what hosts keep, or nothing but checkpoints.
DURABLE: dict[str, dict[str, Any]] = {
    "kept": {"checkpoint_seconds": 3600.0},
    "checkpoints": {"checkpoint_steps": 4, "keep_commits": False},
}
BREAK = 5.0  # seconds; all workers take a step in less
PATIENCE = 180.0  # seconds, in which a driver comes to each of its phases, or ends
# Seconds from a new session to its first step; a run that begins has them, too, on the machine of this test.
FIRST_STEP_WITHIN = 15.0
PROGRAM = "import sys; from tests.faults import test_lost_driver as t; getattr(t, sys.argv[1])(*sys.argv[2:])"
# When drivers are killed, in turns: at a step, or once they have a session, check hosts, look at rows, start slots.
PHASES = ("steps", "steps", "session", "steps", "hosts", "steps", "rows", "slots")
VICTIMS = ("both", "jvm", "python")


def count_epochs(kills: int) -> int:
    """Of three steps and one of validation: more than the drivers take that are killed."""
    return 8 + 3 * kills


def count_steps(kills: int) -> int:
    """Of a loop, likewise."""
    return 60 + 10 * kills


# ---- drivers


class PacedNet(estimators.Net):
    """Its steps take their time on workers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if progress() is not None:
            time.sleep(0.04)
        return super().forward(x)


def _start(url: str, folder: str) -> Any:
    spark = start_session(url, executor_cores="1", cores_max=str(HOSTS))
    with Path(folder, "sessions").open("a") as file:
        file.write(f"{time.time()}\n")
    return spark


def run_fit(url: str, folder: str, kills: str, durable: str) -> None:
    """A driver's whole life; says what the trained model is."""
    for module in (estimators, sys.modules[PacedNet.__module__]):
        cloudpickle.register_pickle_by_value(module)
    spark, net, epochs = _start(url, folder), PacedNet(), count_epochs(int(kills))
    adam = torch.optim.Adam(net.parameters(), lr=0.01)
    sizes = {"epochs": epochs, "num_workers": WORKERS, "min_workers": 1, "batch_size": 4, "validation": 0.25}
    kept = {"determinism": "bitwise", "ledger": True, "run_id": RUN, **DURABLE[durable]}
    fit = estimators.estimator(Path(folder), model=net, optimizer=adam, **sizes, **kept)
    model = fit.fit(estimators.table(spark))
    assert len(model.history) == epochs
    Path(folder, "result").write_text(model.summary.digest)
    spark.stop()


def train_on_record(folder: str, steps: int) -> dict[str, Any]:
    """`hand_written.train`; what it prints is written down by each worker."""
    from spark_elastic.worker.context import get_context

    worker: Any = get_context()

    class Record:
        def write(self, text: str) -> None:
            if text.strip():
                line = [worker.world.fence.attempt, int(text.split()[1]), time.time()]
                with Path(folder, "steps").open("a") as file:
                    file.write(json.dumps(line) + "\n")

        def flush(self) -> None:
            """It is written."""

    with contextlib.redirect_stdout(Record()):  # type: ignore[type-var]
        return hand_written.train(steps, {})


def run_loop(url: str, folder: str, kills: str, durable: str) -> None:
    steps = count_steps(int(kills))
    for module in (hand_written, sys.modules[PacedNet.__module__]):
        cloudpickle.register_pickle_by_value(module)
    spark = _start(url, folder)
    sizes: dict[str, Any] = {"num_workers": WORKERS, "min_workers": 1, "gather_timeout": 60.0}
    place: dict[str, Any] = {"spark": spark, "run_id": RUN, "store": folder, **DURABLE[durable]}
    results = spark_elastic.run(train_on_record, (folder, steps), **sizes, **place)
    assert_exact(results, steps)
    Path(folder, "result").write_text("exact")
    spark.stop()


class Driver:
    """A driver's processes."""

    def __init__(
        self, cluster: StandaloneCluster, folder: Path, program: str, kills: int, durable: str = "kept"
    ) -> None:
        self._said = folder / "said"
        command = [sys.executable, "-c", PROGRAM, program, cluster.url, str(folder), str(kills), durable]
        variables = cluster_environment(cluster.scratch) | {"SPARK_ELASTIC_DRIVER_TIMEOUT": "10"}
        with self._said.open("ab") as said:
            self.process = subprocess.Popen(command, env=os.environ | variables, cwd=ROOT, stderr=said)

    def send(self, number: int, victim: str = "both") -> bool:
        """A signal to Python, to its JVM, or to both."""
        python = psutil.Process(self.process.pid)
        jvms = python.children(recursive=True)
        for each in {"both": [*jvms, python], "jvm": jvms, "python": [python]}[victim]:
            each.send_signal(number)
        return True

    def await_sight(self, look: Callable[[], bool]) -> None:
        """Wait until it is so; the driver must not end before."""
        # Looking costs a part of a processor, which the drivers need themselves.
        until(lambda: look() or self.process.poll() is not None or time.sleep(0.1), PATIENCE)
        assert self.process.poll() is None, self.read_output()

    def wait(self) -> int:
        return self.process.wait(PATIENCE)

    def read_output(self) -> str:
        return self._said.read_text(errors="replace")[-4000:]


# ---- what is seen of them


class Sight:
    """What a run's drivers and workers have written down so far."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}  # bytes by file
        # By attempt: when each step was taken first.
        self.taken: dict[int, dict[Any, float]] = defaultdict(dict)
        # Steps that an attempt took again, after a break, and when it had taken them first.
        self.repeated: dict[Any, float] = {}

    def read_steps(self) -> int:
        """How many steps were taken, those that were repeated counted again."""
        for path in [*(self._folder / "runs" / RUN / "ledger").glob("*.jsonl"), self._folder / "steps"]:
            if not path.exists() or path.stat().st_size == self._read.get(path, 0):
                continue
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                whole = file.read().rpartition(b"\n")[0]
            self._read[path] = self._read.get(path, 0) + len(whole) + bool(whole)
            for line in map(json.loads, whole.splitlines()):
                if isinstance(line, list):
                    self._note(*line)
                elif line["event"] == "applied":
                    self._note(line["attempt"], (line["epoch"], line["step"]), line["wall"])
        return sum(map(len, self.taken.values()))

    def _note(self, attempt: int, step: Any, wall: float) -> None:
        if abs(self.taken[attempt].setdefault(step, wall) - wall) > BREAK:
            self.repeated[step] = self.taken[attempt][step]

    def sessions(self) -> list[float]:
        path = self._folder / "sessions"
        return [float(text) for text in path.read_text().split()] if path.exists() else []

    def count(self, phase: str) -> int:
        """Grows once a driver comes to that phase."""
        run = self._folder / "runs" / RUN
        match phase:
            case "steps":
                return self.read_steps()
            case "session":
                return len(self.sessions())
            case "hosts":
                return len(list((self._folder / "probes").glob("*/driver")))
            case "rows":
                return len(list((run / "attempts").glob("*")))
        return len(list((run / "status").glob("*")))

    def list_repeated(self) -> list[list[float]]:
        """Of each two attempts: when the earlier one took the steps that the later one took again, in order. Without
        the last, which may have ended before it was kept."""
        self.read_steps()
        pairs = itertools.combinations([self.taken[attempt] for attempt in sorted(self.taken)], 2)
        repeated = [sorted(before[step] for step in before.keys() & after.keys()) for before, after in pairs]
        return [walls[:-1] for walls in repeated if walls[:-1]]

    def first_steps(self) -> list[float]:
        """Seconds from the session to the first step, of each attempt that came to it."""
        firsts = [min(self.taken[attempt].values()) for attempt in sorted(self.taken)]
        return [first - max(each for each in self.sessions() if each < first) for first in firsts]


@contextlib.contextmanager
def start_cluster(tmp_path: Path, cores: int) -> Iterator[StandaloneCluster]:
    with StandaloneCluster(tmp_path / "cluster") as cluster:
        cluster.start_workers(HOSTS, cores)
        yield cluster


def train_undisturbed(
    start: Callable[..., Driver], cluster: StandaloneCluster, folder: Path, kills: int
) -> str:
    """The digest of the model."""
    folder.mkdir()
    alone = start(cluster, folder, "run_fit", kills)
    assert alone.wait() == 0, alone.read_output()
    assert Sight(folder).read_steps() == 3 * count_epochs(kills)
    return (folder / "result").read_text()


def check_nothing_is_kept(key: bytes) -> None:
    until(lambda: not KeptCommits(key).list_keepers())
    assert not [name for name in os.listdir("/dev/shm") if "elastic" in name]


def load_key(folder: Path) -> bytes:
    return OwnedRun(Store.open(str(folder)), RUN, 0, ()).load_commit_key()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Driver]]:
    """Starts drivers, and ends those that are left."""
    started: list[Driver] = []

    def start_driver(*arguments: Any) -> Driver:
        started.append(Driver(*arguments))
        return started[-1]

    yield start_driver
    for driver in started:
        if driver.process.poll() is None:
            driver.send(signal.SIGKILL)
        driver.wait()


@pytest.mark.scenario("G18")
@pytest.mark.parametrize("kills", [pytest.param(2, id="two"), pytest.param(20, id="twenty")])
@pytest.mark.parametrize("program", ["run_fit", "run_loop"])
def test_r23_no_step_is_lost_with_its_driver(
    tmp_path: Path, fault: Fault, start: Callable[..., Driver], program: str, kills: int
) -> None:
    draw, folder, key = random.Random(7), tmp_path / "disturbed", b""
    folder.mkdir()
    sight = Sight(folder)
    with start_cluster(tmp_path, cores=1) as cluster:
        for number in range(kills):
            phase, victim = PHASES[number % len(PHASES)], VICTIMS[number % len(VICTIMS)]
            wanted = sight.count(phase) + (draw.randint(1, 4) if phase == "steps" else 1)
            driver = start(cluster, folder, program, kills)
            driver.await_sight(lambda: sight.count(phase) >= wanted)  # noqa: B023
            key = load_key(folder) if phase == "steps" else key
            assert fault(driver.send, signal.SIGKILL, victim)
            assert driver.wait() != 0
        last = start(cluster, folder, program, kills)
        assert last.wait() == 0, last.read_output()
        check_nothing_is_kept(key)
        if program == "run_fit":
            undisturbed = train_undisturbed(start, cluster, tmp_path / "undisturbed", kills)
            assert (folder / "result").read_text() == undisturbed, "other bits"
    assert program == "run_fit" or not sight.list_repeated(), "a loop's commits are all kept"
    assert all(walls[-1] - walls[0] < LONGEST for walls in sight.list_repeated())
    steps = 3 * count_epochs(kills) if program == "run_fit" else count_steps(kills)
    assert len(set().union(*sight.taken.values())) == steps
    first, *later = sight.first_steps()
    assert len(later) >= kills // 2
    assert sorted(later)[len(later) // 2] < max(FIRST_STEP_WITHIN, 1.5 * first), (first, later)


@pytest.mark.scenario("G18")
@pytest.mark.parametrize("program", ["run_fit", "run_loop"])
def test_p7_a_run_resumes_at_its_newest_checkpoint_after_its_spark_driver_was_killed(
    tmp_path: Path, fault: Fault, start: Callable[..., Driver], program: str
) -> None:
    folder = tmp_path / "disturbed"
    folder.mkdir()
    sight, checkpoints = Sight(folder), CheckpointStore(Store.open(str(folder)), RUN)
    with start_cluster(tmp_path, cores=1) as cluster:
        first = start(cluster, folder, program, 1, "checkpoints")
        first.await_sight(lambda: len(checkpoints.read_published()) > 1)
        assert fault(first.send, signal.SIGKILL)
        assert first.wait() != 0
        newest = checkpoints.read_published()[0].position
        second = start(cluster, folder, program, 1, "checkpoints")
        assert second.wait() == 0, second.read_output()
        if program == "run_fit":
            undisturbed = train_undisturbed(start, cluster, tmp_path / "undisturbed", 1)
            assert (folder / "result").read_text() == undisturbed, "other bits"
    sight.read_steps()
    resumed = (newest.epoch, newest.step) if program == "run_fit" else newest.step + 1
    assert min(sight.taken[2]) == resumed


def test_r23_a_driver_that_was_cut_off_goes_on_and_changes_nothing_once_another_one_holds_its_run(
    tmp_path: Path, start: Callable[..., Driver]
) -> None:
    """Stopped for so long that its workers end themselves; later again, until another driver has taken a step."""
    folder, kills = tmp_path / "disturbed", 8
    folder.mkdir()
    sight = Sight(folder)
    with start_cluster(tmp_path, cores=2) as cluster:

        def list_workers() -> list[psutil.Process]:
            return [each for jvm in cluster.executor_pids() for each in cluster.training_children(jvm)]

        first = start(cluster, folder, "run_fit", kills)
        first.await_sight(lambda: sight.read_steps() > 2)
        first.send(signal.SIGSTOP)
        until(lambda: not list_workers(), PATIENCE)
        before, key = sight.read_steps(), load_key(folder)
        first.send(signal.SIGCONT)
        first.await_sight(lambda: sight.read_steps() > before + 2)
        walls = sorted(sight.repeated.values())[:-1]
        assert not walls or walls[-1] - walls[0] < LONGEST
        first.send(signal.SIGSTOP)
        second = start(cluster, folder, "run_fit", kills)
        second.await_sight(lambda: sight.read_steps() > before and 2 in sight.taken)
        first.send(signal.SIGCONT)
        assert first.wait() == 1
        assert "was taken over by another driver (attempt 2" in first.read_output()
        assert second.wait() == 0, second.read_output()
        check_nothing_is_kept(key)
        undisturbed = train_undisturbed(start, cluster, tmp_path / "undisturbed", kills)
        assert (folder / "result").read_text() == undisturbed, "other bits"
    sight.read_steps()
    epoch, step = min(sight.taken[2])
    assert 3 * epoch + step + len(sight.taken[2]) == 3 * count_epochs(kills)
