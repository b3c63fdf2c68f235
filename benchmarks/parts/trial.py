"""A trial of a job on this machine: workers are killed or drained one after the other, and when did the others go on?

The workers write what they do and when as lines of JSON, in the form of the product's own ledger: `event`, `pid`,
`wall` (seconds), `generation` of the world, and of a step that was applied `world`, its size.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from spark_elastic.config import ElasticConfig
from spark_elastic.driver.job import DriverOptions, supervise
from spark_elastic.driver.ports import Launcher, Post
from spark_elastic.protocol.types import Limits

PATIENCE = 120.0  # seconds that a world of all workers gets to come up
Line = dict[str, Any]


def note(folder: str, event: str, generation: int, world: int, **more: object) -> None:
    """Write a line of this process."""
    line = {"event": event, "pid": os.getpid(), "wall": time.time(), "generation": generation, "world": world}
    with open(Path(folder, f"{os.getpid()}.jsonl"), "a", encoding="ascii") as file:
        file.write(json.dumps(line | more) + "\n")


class Trial:
    """Plays its acts one after the other, each in a world of all workers, then ends the job by the file `stop`.

    To the driver it is the job's discovery. It runs beside the driver and shares the interpreter with it, so it reads
    each line of the workers once.
    """

    def __init__(self, folder: Path, size: int, acts: Sequence[Callable[[Trial], float]]) -> None:
        """folder: of the workers' lines. acts: each returns when it was done, in seconds of the wall clock."""
        self.folder, self.size, self._acts = folder, size, acts
        self.post: Post = lambda event: None
        self.done: list[tuple[float, int]] = []  # when an act was done, and in which generation
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._lines: list[Line] = []  # of all processes, as far as they were read
        self._read: dict[Path, int] = {}  # bytes of each file that are among these
        self._applied: dict[tuple[int, int], int] = {}  # (generation, process id) -> steps

    def play(self, launcher: Launcher, limits: Limits, config: ElasticConfig) -> Trial:
        """Under a driver in this process, to the job's end."""
        supervise(launcher, self, DriverOptions(), limits, config, "trial")
        return self.finish()

    def start(self, post: Post = lambda event: None) -> None:
        self.post = post
        self._thread.start()

    def close(self) -> None:
        """Nothing."""

    def finish(self) -> Trial:
        """Wait for the last act, and raise what ended the trial before it."""
        self._thread.join()
        if self._failed is not None:
            raise self._failed
        return self

    def choose_victim(self) -> int:
        """Process id of a member of the newest generation, another one at each act."""
        newest, _ = self._newest()
        members = sorted(pid for generation, pid in self._applied if generation == newest)
        return members[len(self.done) % len(members)]

    def lines(self) -> list[Line]:
        """All complete lines of all processes."""
        for path in self.folder.glob("*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                whole, newline, _ = file.read().rpartition(b"\n")
            self._read[path] = self._read.get(path, 0) + len(whole) + len(newline)
            for line in map(json.loads, whole.splitlines()):
                self._lines.append(line)
                key = line["generation"], line["pid"]
                self._applied[key] = self._applied.get(key, 0) + (line["event"] == "applied")
        return self._lines

    def _run(self) -> None:
        try:
            for act in self._acts:
                generation = self._await_full()
                self.done.append((act(self), generation))
                self._await(lambda beyond=generation: self._newest()[0] > beyond)  # type: ignore[misc]
            self._await_full()
        except BaseException as error:
            self._failed = error
        finally:
            (self.folder / "stop").touch()

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


def kill_one(trial: Trial) -> float:
    victim, moment = trial.choose_victim(), time.time()
    os.kill(victim, signal.SIGKILL)
    return moment


def find_firsts(trial: Trial, moment: float, generation: int) -> dict[int, dict[str, float]]:
    """By process of the world that followed one: when it first did each event in it, seconds from `moment`. What broke
    is that of the world before."""
    later = [line for line in trial.lines() if line["wall"] > moment]
    applied = (line["generation"] for line in later if line["event"] == "applied")
    following = min(applied_in for applied_in in applied if applied_in > generation)
    firsts: dict[int, dict[str, float]] = {}
    for line in later:
        if line["generation"] == (generation if line["event"] == "broke" else following):
            firsts.setdefault(line["pid"], {}).setdefault(line["event"], line["wall"] - moment)
    return firsts


def find_last(trial: Trial, moment: float, generation: int, event: str) -> float:
    """Seconds from `moment` until the last member of the next world first did `event` in it."""
    return max(firsts[event] for firsts in find_firsts(trial, moment, generation).values() if event in firsts)
