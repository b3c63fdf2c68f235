"""Kills the workers of a job one after the other, on plain processes or on Spark, and says what must be true then."""

from __future__ import annotations

import io
import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from spark_elastic.clock import SystemClock
from tests.faults.killed_programs import EPOCHS, KILLS, STEPS
from tests.patience import until
from tests.spark.cluster import find_executor


class Killer:
    """`with Killer(...):` kills one worker in each of the first worlds, once enough of them hold the newest state. On
    Spark every eighth kill takes the worker's executor with it."""

    def __init__(self, folder: Path, lines: io.StringIO, holders: int, after_a_step: bool = False) -> None:
        """folder: where the programs write their steps, and look for the number of kills. lines: what the job prints.
        holders: workers that must hold the newest state, the victim among them. after_a_step: wait for a step since the
        last kill, so that the others have divided a state anew."""
        # Where the table of the programs is, too.
        self.folder, self._lines, self._holders = folder, lines, holders
        self._after_a_step = after_a_step
        self.executors: set[int] = set()  # that were killed
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._kill_at_events, name="killer")
        (folder / "kills").write_bytes(b"")

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self._thread.join()

    def count_kills(self) -> int:
        return (self.folder / "kills").stat().st_size

    def count_worlds(self) -> int:
        return self._lines.getvalue().count("world of ")

    def read_histories(self) -> dict[int, list[str]]:
        """Process id -> what each worker has noted, one line for each step."""
        files = self.folder.glob("worker-*")
        return {int(file.name.split("-")[1]): file.read_text().split("\n")[:-1] for file in files}

    def _kill_at_events(self) -> None:
        worlds, newest = 0, 0  # at the newest kill
        for number in range(KILLS):
            step = max(2 * number + 2, newest + 1 if self._after_a_step else 0)
            until(lambda: self._stopped.is_set() or self._is_due(step, worlds), 240)  # noqa: B023
            if self._stopped.is_set():
                return
            SystemClock().sleep(random.uniform(0, 0.1))
            worlds, newest = self.count_worlds(), max(self._read_newest().values())
            doomed = random.choice(self._find_holders(0))
            executor = _find_executor(doomed) if number % 8 == 7 else None
            self.executors.update([executor] if executor else [])
            os.kill(executor or doomed, signal.SIGKILL)
            with open(self.folder / "kills", "ab") as file:
                file.write(b"x")

    def _is_due(self, step: int, worlds: int) -> bool:
        return self.count_worlds() > worlds and len(self._find_holders(step)) >= self._holders

    def _read_newest(self) -> dict[int, int]:
        """Process id -> the newest step that each worker has noted."""
        return {pid: int(lines[-1].split()[-1]) for pid, lines in self.read_histories().items() if lines}

    def _find_holders(self, step: int) -> list[int]:
        """Live workers that hold the newest state, if that is of this step or a later one."""
        noted = self._read_newest()
        newest = max(noted.values(), default=0)
        return [pid for pid, at in noted.items() if newest >= step and at >= newest - 1 and is_alive(pid)]


def _find_executor(pid: int) -> int | None:
    """The executor that a worker lives in; None on plain processes."""
    try:
        return find_executor(psutil.Process(pid)).pid
    except StopIteration:
        return None


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_exact(results: list[dict[str, Any]], killer: Killer, train: Callable[[str], Any]) -> None:
    """All kills were made, and the weights and the ledger are those of `train`, which nothing disturbs."""
    assert killer.count_kills() == KILLS
    assert killer.count_worlds() > KILLS
    expected = torch.tensor(train(str(killer.folder))["weights"], dtype=torch.float64)
    assert len({str(result.get("base")) for result in results}) == 1, "a frozen base differs"
    apart, miscounted = 0.0, 0.0
    for result in results:
        got = torch.tensor(result["weights"], dtype=torch.float64)
        apart = max(apart, float((got - expected).abs().max() / expected.abs().max()))
        miscounted = max(miscounted, *(abs(count - EPOCHS) for count in result["ledger"]))
    counted = len(results[0]["ledger"])
    seen = f"{KILLS} kills, {len(killer.executors)} of executors; {killer.count_worlds()} worlds"
    print(f"{seen}; {counted} counts {miscounted:.0e} off; weights {apart:.0e} off")  # noqa: T201 - what `pytest -rP` shows
    assert apart < 1e-9
    assert miscounted < 1e-9
    for steps in killer.read_histories().values():
        assert sorted(steps, key=int) == steps, "more than the step in flight was lost"


def assert_resumed(folder: Path, killer: Killer) -> None:
    """All kills were made, worlds resumed from the checkpoint, and the weights are those of one process."""
    assert killer.count_kills() == KILLS
    lines = [line for lines in killer.read_histories().values() for line in lines]
    starts = sorted(int(line.split()[1]) for line in lines if " " in line)
    assert starts[-1] >= STEPS - 8, "the last worlds did not resume from the checkpoint"
    assert len(set(starts)) > KILLS // 2
    saved = torch.load(folder / "checkpoint.pt")
    assert saved["step"] == STEPS
    torch.manual_seed(7)
    model = torch.nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        batch = torch.randn(12, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        optimizer.zero_grad()
        model(batch).pow(2).mean().backward()
        optimizer.step()
    torch.testing.assert_close(saved["model"], dict(model.state_dict()), rtol=1e-9, atol=0)
