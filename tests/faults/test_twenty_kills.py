"""Each kind of program of torch's users under twenty SIGKILLs, on plain processes that are replaced each time."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
import torch

from spark_elastic.clock import SystemClock
from spark_elastic.driver.ports import Post
from spark_elastic.local.launcher import LocalLauncher
from spark_elastic.protocol.slot_spec import SlotSpec
from spark_elastic.testing.fakes import ProcessLauncher
from tests.component.torch.hand_written import Run
from tests.faults import killed_programs
from tests.faults.killed_programs import (
    EPOCHS,
    KILLS,
    STEPS,
    train_by_accelerate,
    train_by_lightning,
    train_by_trainer,
    train_loop,
    train_plain,
)
from tests.patience import until
from tests.sources import ROOT

pytestmark = [pytest.mark.faults, pytest.mark.native, pytest.mark.timeout(1200)]

cloudpickle.register_pickle_by_value(killed_programs)


class ForkingLauncher(ProcessLauncher):
    """Forks workers from a process that has imported torch, as jobs of users do."""

    def start(self, spec: SlotSpec, post: Post) -> None:
        LocalLauncher.start(self, replace(spec, driver_timeout=20.0, spare_after=0.0), post)


def make_run(program: Any, *given: Any) -> Run:
    run = Run(program, *given, room=3, num_workers=3, max_workers=3)
    run.cluster = ForkingLauncher(run.call.program, SystemClock(), run.call.preload, room=3)
    return run


class Killer:
    """Kills one worker after the other, at any moment, each time that two of them hold the newest state."""

    def __init__(self, folder: Path, run: Run, holders: int) -> None:
        """
        Args:
            holders: workers that must hold the newest state.
        """
        self._folder, self._run, self._holders = folder, run, holders
        self._lock = threading.Lock()
        self._worlds = 0  # at the newest kill
        (folder / "kills").write_bytes(b"")
        for number in range(KILLS):
            run.at(2 * number + 2, self._strike)

    def kills(self) -> int:
        return (self._folder / "kills").stat().st_size

    def histories(self) -> dict[int, list[str]]:
        """Process id -> what each worker has noted, one line for each step."""
        files = self._folder.glob("worker-*")
        return {int(file.name.split("-")[1]): file.read_text().split("\n")[:-1] for file in files}

    def _strike(self) -> None:
        with self._lock:
            until(lambda: len(self._run.sizes()) > self._worlds, 240)
            until(lambda: len(self._find_holders()) >= self._holders, 240)
            SystemClock().sleep(random.uniform(0, 0.1))
            self._worlds = len(self._run.sizes())
            os.kill(random.choice(self._find_holders()), signal.SIGKILL)
            with open(self._folder / "kills", "ab") as file:
                file.write(b"x")

    def _find_holders(self) -> list[int]:
        noted = {pid: int(lines[-1].split()[-1]) for pid, lines in self.histories().items() if lines}
        newest = max(noted.values(), default=0)
        return [pid for pid, step in noted.items() if step >= newest - 1 and _is_alive(pid)]


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("train", [train_loop, train_by_lightning, train_by_trainer, train_by_accelerate])
def test_loops_and_integrations_are_exact_after_twenty_kills(
    train: Callable[[str], Any], tmp_path: Path
) -> None:
    run = make_run(train, (str(tmp_path),))
    killer = Killer(tmp_path, run, holders=2)
    results = run.results()
    assert killer.kills() == KILLS
    assert len(run.sizes()) > KILLS
    expected = torch.tensor(train_plain()["weights"], dtype=torch.float64)
    for result in results:
        got = torch.tensor(result["weights"], dtype=torch.float64)
        assert float((got - expected).abs().max() / expected.abs().max()) < 1e-9
        assert max(abs(count - EPOCHS) for count in result["ledger"]) < 1e-9
    for steps in killer.histories().values():
        assert sorted(steps, key=int) == steps, "more than the step in flight was lost"


def test_an_unchanged_script_resumes_from_its_own_checkpoint_after_each_of_twenty_kills(
    tmp_path: Path,
) -> None:
    script = ROOT / "tests" / "faults" / "killed_script.py"
    run = make_run(str(script), str(tmp_path), str(KILLS), str(STEPS))
    killer = Killer(tmp_path, run, holders=1)
    run.results()
    assert killer.kills() == KILLS
    starts = sorted(
        int(line.split()[1]) for lines in killer.histories().values() for line in lines if " " in line
    )
    assert starts[-1] >= STEPS - 8, "the last worlds did not resume from the checkpoint"
    assert len(set(starts)) > KILLS // 2
    saved = torch.load(tmp_path / "checkpoint.pt")
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
