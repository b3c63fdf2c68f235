"""How long until a user's function runs, and after a loss until a worker is warm in its place?

Two workers in a Spark session of this machine that is warm: a Spark job with as many Python tasks ran before. Counted
is from `spark_elastic.run` to the first line of the function on the slower worker, of the session's first job and of a
second one, for a function that imports nothing and one that begins with `import torch`. The peer, in the same session:
pyspark's TorchDistributor, which runs torchrun in a barrier task, to the first line of the same function on rank 0.
Beside them an empty Spark job of as many Python tasks, the bound. Each round has a new session; medians.

Then workers of an elastic loop in torch are killed by SIGKILL: the first while its slot has no spare, to the moment
when the process in its place has loaded the program and waits for its world; the others while it has one, which takes
over, to the moment when the next spare has done so.
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pyspark.ml.torch.distributor import TorchDistributor
from pyspark.sql import SparkSession

import spark_elastic
from benchmarks.parts.budget import within_budget
from benchmarks.parts.ranks import run_ranks
from benchmarks.parts.report import Row
from benchmarks.parts.spark import open_session
from benchmarks.parts.trial import PATIENCE

WORKERS = 2
SETTLE = 3.0  # seconds between a loss and the next: the world forms, and the next spare is warm
NO_SPARE = "without a spare"
SPARE = "with a spare"


def make_function(imports_torch: bool) -> Callable[[], float]:
    """The moment of its first line. Nested, so that it is pickled by value and a worker imports no benchmark."""

    def run_plain() -> float:
        import time

        return time.time()

    def run_with_torch() -> float:
        import torch

        assert torch.__version__
        import time

        return time.time()

    return run_with_torch if imports_torch else run_plain


def run_tasks(spark: SparkSession) -> float:
    """Seconds to the first line of the later of the tasks."""
    begun = time.time()
    tasks = spark.sparkContext.parallelize(range(WORKERS), WORKERS)
    return max(tasks.map(lambda number: __import__("time").time()).collect()) - begun


def run_jobs(pipe: Connection, rank: int, size: int, imports_torch: bool) -> None:
    """Send the seconds of one session by name."""
    pipe.send(None)
    pipe.recv()
    function = make_function(imports_torch)

    def run_ours() -> float:
        begun = time.time()
        return max(spark_elastic.run(function, num_workers=WORKERS, verbose=0)) - begun

    with open_session(WORKERS) as spark:
        run_tasks(spark)
        bound, first, second = run_tasks(spark), run_ours(), run_ours()
        begun = time.time()
        peer = TorchDistributor(WORKERS, local_mode=False, use_gpu=False).run(function) - begun
        pipe.send({"first": first, "second": second, "peer": peer, "bound": bound})


def start_rows(rounds: int) -> list[Row]:
    rows: list[Row] = []
    bounds: list[float] = []
    for imports_torch, what in (
        (False, "a function without imports"),
        (True, "a function that imports torch"),
    ):
        sessions: list[Mapping[str, float]] = [
            run_ranks(1, run_jobs, imports_torch)[0] for _ in range(rounds)
        ]
        medians = {name: statistics.median(each[name] for each in sessions) for name in sessions[0]}
        bounds.append(medians["bound"])
        for job in ("first", "second"):
            rows.append(Row(f"{what}, {job} job: to its first line", medians[job], medians["peer"], "s"))
    return [*rows, Row("an empty Spark job of 2 Python tasks", statistics.median(bounds), None, "s")]


# ---- a loss


def make_loop(folder: str) -> tuple[Callable[[Any], None], Any]:
    """An elastic loop, and an argument that notes when a process has loaded it. Pickled by value, as above."""

    class Noted:
        def __reduce__(self) -> Any:
            return note, ("loaded",)

    def note(event: str) -> None:
        import os
        import time

        with open(f"{folder}/{event}-{os.getpid()}", "a", encoding="ascii") as file:
            file.write(f"{time.time()}\n")

    def train(noted: Any) -> None:
        import os
        import time

        import torch

        import spark_elastic.torch as hvd

        @hvd.elastic.run
        def loop(state: Any) -> None:
            stop = 0.0
            while not stop:
                time.sleep(0.03)
                state.step += 1
                here = torch.tensor(float(os.path.exists(f"{folder}/stop")))
                stop = float(hvd.allreduce(here, op=hvd.Max))
                note("steps")
                state.commit()

        loop(hvd.elastic.TorchState(torch.nn.Linear(10, 1), step=0))

    return train, Noted()


def read_notes(folder: str, event: str) -> dict[int, float]:
    """By process, when it first noted an event."""
    texts = {path: path.read_text().split() for path in Path(folder).glob(f"{event}-*")}
    return {int(path.name.partition("-")[2]): float(words[0]) for path, words in texts.items() if words}


def await_value(find: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE
    while not (value := find()):
        if time.monotonic() > deadline:
            raise TimeoutError("the workers do not come up")
        time.sleep(0.05)
    return value


def kill_workers(folder: str, kills: int, seconds: dict[str, list[float]]) -> None:
    """Kill the same slot's worker again and again. seconds: gets those from each loss to the process in its place."""
    try:
        members = await_value(lambda: len(found := read_notes(folder, "steps")) == WORKERS and found)
        victim = max(members)
        for number in range(kills + 1):
            time.sleep(SETTLE)
            before, moment = read_notes(folder, "loaded"), time.time()
            os.kill(victim, signal.SIGKILL)
            loaded = await_value(
                lambda: [at for pid, at in read_notes(folder, "loaded").items() if pid not in before]  # noqa: B023
            )
            seconds.setdefault(SPARE if number else NO_SPARE, []).append(min(loaded) - moment)
            known = members
            members = await_value(lambda: len(found := read_notes(folder, "steps")) > len(known) and found)  # noqa: B023
            (victim,) = members.keys() - known.keys()
    finally:
        Path(folder, "stop").touch()


def replace_workers(pipe: Connection, rank: int, size: int, kills: int) -> None:
    pipe.send(None)
    pipe.recv()
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder, open_session(WORKERS):
        train, noted = make_loop(folder)
        killer = threading.Thread(target=partial(kill_workers, folder, kills, seconds), daemon=True)
        killer.start()
        settings = {"min_workers": 1, "spare_after": PATIENCE, "failure_budget": kills + 10, "verbose": 0}
        spark_elastic.run(train, (noted,), num_workers=WORKERS, **settings)
        killer.join()
    pipe.send(seconds)


def measure(rounds: int = 3, kills: int = 5) -> list[Row]:
    rows = start_rows(rounds)
    turns = within_budget(range(rounds), "kills, round")
    found: list[dict[str, list[float]]] = [run_ranks(1, replace_workers, kills)[0] for _ in turns]
    for name in (NO_SPARE, SPARE):
        losses = [value for seconds in found for value in seconds[name]]
        rows.append(
            Row(
                f"a worker {name} is killed: to a warm one in its place", statistics.median(losses), None, "s"
            )
        )
    return rows
