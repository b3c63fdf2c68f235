"""Worlds of plain local processes: how long they take to go on after a kill, a newcomer, a drain. Part of `recovery`.

The program has no framework: a step of 30 ms and one small allreduce. Every process writes what it does and when, by
the machine's monotonic clock, which the driver's journal is kept by, too.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.parts.budget import Budget
from benchmarks.parts.report import Row
from elastic_collectives import CollectiveError, Group
from spark_elastic.clock import SystemClock
from spark_elastic.config import ElasticConfig
from spark_elastic.driver.job import DriverOptions, supervise
from spark_elastic.driver.ports import Post
from spark_elastic.protocol.events import DrainRequested
from spark_elastic.protocol.types import Limits, Phase, Position, World
from spark_elastic.testing.fakes import ProcessLauncher
from spark_elastic.worker.program import Completed, Outcome, Stopped, WorkerHandle

STEP = 0.030  # seconds
PATIENCE = 60.0  # seconds that the processes get to come up
Line = dict[str, Any]


class StepUntilStopped:
    """Steps until the file `stop` appears."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
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
        self._write("runs", world)
        while True:
            time.sleep(STEP)
            stop = float((self._folder / "stop").exists())
            try:
                wish = group.allgather(np.array([handle.membership_version().encode(), stop])).reshape(-1, 2)
            except CollectiveError:
                self._write("broke", world)
                raise
            self._step += 1
            self._write("applied", world)
            handle.report_position(Position(0, Phase.TRAIN, self._step))
            if wish[:, 1].max():
                return Completed(json.dumps(self._step))
            if wish[:, 0].max() > world.version.encode():
                return Stopped("the membership changes")

    def close(self) -> None:
        """Nothing to free."""

    def _write(self, event: str, world: World) -> None:
        line = {"at": time.monotonic(), "event": event, "generation": world.fence.generation}
        line |= {"step": self._step, "size": world.size, "pid": os.getpid()}
        with open(self._folder / f"{os.getpid()}.lines", "a", encoding="ascii") as file:
            file.write(json.dumps(line) + "\n")


class RegroupTrial(threading.Thread):
    """Plays its acts one after the other, each in a world of all workers, then ends the job.

    It runs beside the driver and shares the interpreter with it, so it reads each line of the workers once.
    """

    def __init__(self, folder: Path, size: int, acts: list[Callable[[RegroupTrial], float]]) -> None:
        super().__init__(daemon=True)
        self.folder, self.size, self._acts = folder, size, acts
        self.post: Post = lambda event: None
        self.done: list[tuple[float, int]] = []  # when an act was done, and in which generation
        self.failed: BaseException | None = None
        self._lines: list[Line] = []  # of all processes, as far as they were read
        self._read: dict[Path, int] = {}  # bytes of each file that are among these
        self._applied: dict[tuple[int, int], int] = {}  # (generation, process id) -> steps

    def run(self) -> None:
        try:
            for act in self._acts:
                generation = self._await_full()
                self.done.append((act(self), generation))
                self._await(lambda beyond=generation: self._newest()[0] > beyond)  # type: ignore[misc]
            self._await_full()
        except BaseException as error:
            self.failed = error
        finally:
            (self.folder / "stop").touch()

    def members(self) -> list[int]:
        """Process ids of the newest generation."""
        newest, _ = self._newest()
        return sorted(pid for generation, pid in self._applied if generation == newest)

    def lines(self) -> list[Line]:
        """All complete lines of all processes."""
        for path in self.folder.glob("*.lines"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                whole, newline, _ = file.read().rpartition(b"\n")
            self._read[path] = self._read.get(path, 0) + len(whole) + len(newline)
            for line in map(json.loads, whole.splitlines()):
                self._lines.append(line)
                key = line["generation"], line["pid"]
                self._applied[key] = self._applied.get(key, 0) + (line["event"] == "applied")
        return self._lines

    def start_discovery(self, post: Post) -> None:
        self.post = post

    def _newest(self) -> tuple[int, int]:
        """Generation and how many of its members took three steps in it."""
        self.lines()
        steps = self._applied
        newest = max((generation for generation, _ in steps), default=0)
        return newest, sum(count >= 3 for (generation, _), count in steps.items() if generation == newest)

    def _await_full(self) -> int:
        self._await(lambda: self._newest()[1] == self.size)
        return self._newest()[0]

    def _await(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not holds():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no world of {self.size} within {PATIENCE:g} s: {self._newest()}")
            time.sleep(0.2)


class TrialDiscovery:
    """What stands in for discovery: the trial's way to the driver."""

    def __init__(self, trial: RegroupTrial) -> None:
        self._trial = trial

    def start(self, post: Post) -> None:
        self._trial.start_discovery(post)
        self._trial.start()

    def close(self) -> None:
        """Nothing."""


def kill_one(trial: RegroupTrial) -> float:
    victim = trial.members()[len(trial.done) % trial.size]
    moment = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    return moment


def drain_one(trial: RegroupTrial) -> float:
    newest = [line for line in journal(trial.folder) if line["event"]["type"] == "WorldFormed"][-trial.size :]
    slot = newest[len(trial.done) % trial.size]["event"]["worker"].split("-")[0]
    moment = time.monotonic()
    trial.post(DrainRequested(moment, "measured", host=f"host-{slot}"))
    return moment


def journal(folder: Path) -> list[Line]:
    texts = (folder / "journal").read_text().splitlines()[1:]
    return [json.loads(text) for text in texts if text.endswith("}")]


def play(folder: Path, size: int, acts: list[Callable[[RegroupTrial], float]]) -> RegroupTrial:
    folder.mkdir()
    trial = RegroupTrial(folder, size, acts)
    limits = Limits(
        size, 1, size, gather_timeout=PATIENCE, failure_budget=len(acts) + 10, cooldown_range=(0.01, 0.01)
    )
    config = ElasticConfig(journal=str(folder / "journal"))
    launcher = ProcessLauncher(StepUntilStopped(str(folder)), SystemClock(), room=size)
    supervise(launcher, TrialDiscovery(trial), DriverOptions(), limits, config, "regroup")
    trial.join()
    if trial.failed is not None:
        raise trial.failed
    return trial


def find_event_after(
    trial: RegroupTrial, moment: float, generation: int, event: str
) -> tuple[float, list[Line]]:
    """When the last member of the next world first did `event` in it, seconds from `moment`; and all its lines."""
    later = [line for line in trial.lines() if line["generation"] > generation and line["at"] > moment]
    following = min(line["generation"] for line in later)
    mine = [line for line in later if line["generation"] == following]
    firsts: dict[int, float] = {}
    for line in mine:
        if line["event"] == event:
            firsts[line["pid"]] = min(line["at"], firsts.get(line["pid"], line["at"]))
    return max(firsts.values()) - moment, mine


def scale_ups(trial: RegroupTrial) -> list[float]:
    """From the newcomer's first question to the slowest member's first step in the world that it came into."""
    joins = [
        line["event"]
        for line in journal(trial.folder)
        if line["event"]["type"] == "RequestNextWorld" and line["at"] > 0
    ]
    newcomers = {e["worker"]: e["now"] for e in reversed(joins) if e["fence"] is None}
    found = []
    for moment, _ in trial.done:
        warm = min((now for now in newcomers.values() if now > moment), default=None)
        before = [line for line in trial.lines() if warm is not None and line["at"] <= warm]
        if warm is None or not before:
            continue
        found.append(find_event_after(trial, warm, max(line["generation"] for line in before), "applied")[0])
    return found


def count_broken(trial: RegroupTrial, generations: set[int]) -> int:
    """How many ranks lost a step in these generations."""
    return sum(line["event"] == "broke" and line["generation"] in generations for line in trial.lines())


def local_rows(folder: Path, sizes: tuple[int, ...], kills: int, budget: Budget) -> list[Row]:
    """Regroup by size; scale-up and drain with four workers."""
    rows = []
    for size in budget.take(sizes, "sizes of local worlds"):
        trial = play(folder / f"kill-{size}", size, [kill_one] * kills)
        times = [find_event_after(trial, *done, "runs")[0] for done in trial.done]
        rows.append(Row(f"{size} local workers: kill to the next world, p50", statistics.median(times)))
        if size == 4:
            ups = scale_ups(trial)
            hit = {generation for _, generation in trial.done}
            every = {line["generation"] for line in trial.lines()}
            rows.append(
                Row("newcomer warm to the first step of the larger world, p50", statistics.median(ups))
            )
            rows.append(Row("newcomer warm to the first step of the larger world, p99", max(ups)))
            rows.append(
                Row("steps lost by the others in scale-ups", count_broken(trial, every - hit), unit="steps")
            )
    trial = play(folder / "drain", 4, [drain_one] * kills)
    times = [find_event_after(trial, *done, "applied")[0] for done in trial.done]
    rows.append(Row("drain asked to the first step without it, p50", statistics.median(times)))
    lost = count_broken(trial, {line["generation"] for line in trial.lines()})
    rows.append(Row("steps lost in drains", lost, unit="steps"))
    return rows
