"""Worlds of plain local processes: how long they take to go on after a kill, a newcomer, a drain. Part of `recovery`.

The program has no framework: a step of 30 ms and one small allreduce.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from benchmarks.parts.budget import within_budget
from benchmarks.parts.report import Row
from benchmarks.parts.trial import PATIENCE, Line, Trial, find_last, kill_one, note
from elastic_collectives import CollectiveError, Group
from spark_elastic.clock import SystemClock
from spark_elastic.config import ElasticConfig
from spark_elastic.protocol.events import DrainRequested
from spark_elastic.protocol.types import Limits, Phase, Position, World
from spark_elastic.testing.fakes import ProcessLauncher
from spark_elastic.worker.program import Completed, Outcome, Stopped, WorkerHandle

STEP = 0.030  # seconds


class StepUntilStopped:
    """Steps until the file `stop` appears."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._step: int | None = None

    def prepare(self) -> None:
        """Nothing takes long here."""

    def position(self) -> Position | None:
        return None if self._step is None else Position(0, Phase.TRAIN, self._step)

    def sync(self, world: World, group: Group) -> Position:
        staging = np.array([self._step or 0], dtype=np.int64)
        group.broadcast(staging, world.source or 0)
        self._step = int(staging[0])
        return Position(0, Phase.TRAIN, self._step)

    def run(self, world: World, group: Group, handle: WorkerHandle) -> Outcome:
        self._step = self._step or 0
        self._note("runs", world)
        while True:
            time.sleep(STEP)
            stop = float(Path(self._folder, "stop").exists())
            try:
                wish = group.allgather(np.array([handle.membership_version().encode(), stop])).reshape(-1, 2)
            except CollectiveError:
                self._note("broke", world)
                raise
            self._step += 1
            self._note("applied", world)
            handle.report_position(Position(0, Phase.TRAIN, self._step))
            if wish[:, 1].max():
                return Completed(json.dumps(self._step))
            if wish[:, 0].max() > world.version.encode():
                return Stopped("the membership changes")

    def close(self) -> None:
        """Nothing to free."""

    def _note(self, event: str, world: World) -> None:
        note(self._folder, event, world.fence.generation, world.size)


def drain_one(trial: Trial) -> float:
    newest = [event for event in read_journal(trial) if event["type"] == "WorldFormed"][-trial.size :]
    slot = newest[len(trial.done) % trial.size]["worker"].split("-")[0]
    moment = time.time()
    trial.post(DrainRequested(time.monotonic(), "measured", host=f"host-{slot}"))
    return moment


def read_journal(trial: Trial) -> list[Line]:
    """The driver's events."""
    texts = (trial.folder / "journal").read_text().splitlines()[1:]
    return [json.loads(text)["event"] for text in texts if text.endswith("}")]


def play(folder: Path, size: int, acts: list[Callable[[Trial], float]]) -> Trial:
    folder.mkdir()
    limits = Limits(
        size, 1, size, gather_timeout=PATIENCE, failure_budget=len(acts) + 10, cooldown_range=(0.01, 0.01)
    )
    launcher = ProcessLauncher(StepUntilStopped(str(folder)), SystemClock(), room=size)
    return Trial(folder, size, acts).play(launcher, limits, ElasticConfig(journal=str(folder / "journal")))


def scale_ups(trial: Trial) -> list[float]:
    """From the newcomer's first question to the slowest member's first step in the world that it came into."""
    offset = time.time() - time.monotonic()  # the journal is kept by the monotonic clock
    joins = [event for event in reversed(read_journal(trial)) if event["type"] == "RequestNextWorld"]
    newcomers = {event["worker"]: offset + event["now"] for event in joins if event["fence"] is None}
    found = []
    for moment, _ in trial.done:
        warm = min((now for now in newcomers.values() if now > moment), default=None)
        before = [line for line in trial.lines() if warm is not None and line["wall"] <= warm]
        if warm is None or not before:
            continue
        found.append(find_last(trial, warm, max(line["generation"] for line in before), "applied"))
    return found


def count_broken(trial: Trial, generations: set[int]) -> int:
    """How many ranks lost a step in these generations."""
    return sum(line["event"] == "broke" and line["generation"] in generations for line in trial.lines())


def local_rows(folder: Path, sizes: Iterable[int], kills: int) -> list[Row]:
    """Regroup by size; scale-up and drain with four workers."""
    rows = []
    for size in within_budget(sizes, "workers of one host:"):
        trial = play(folder / f"kill-{size}", size, [kill_one] * kills)
        times = [find_last(trial, *done, "runs") for done in trial.done]
        rows.append(Row(f"{size} local workers: kill to the next world, p50", statistics.median(times)))
        if size == 4:
            ups, warm = scale_ups(trial), "newcomer warm to the first step of the larger world"
            others = {line["generation"] for line in trial.lines()} - {world for _, world in trial.done}
            rows += [
                Row(f"{warm}, p50", statistics.median(ups)),
                Row(f"{warm}, p99", max(ups)),
                Row("steps lost by the others in scale-ups", count_broken(trial, others), unit="steps"),
            ]
    trial = play(folder / "drain", 4, [drain_one] * kills)
    times = [find_last(trial, *done, "applied") for done in trial.done]
    lost = count_broken(trial, {line["generation"] for line in trial.lines()})
    drained = Row("drain asked to the first step without it, p50", statistics.median(times))
    return [*rows, drained, Row("steps lost in drains", lost, unit="steps")]
