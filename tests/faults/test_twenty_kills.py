"""Each kind of program of torch's users under twenty SIGKILLs, on plain processes that are replaced each time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from spark_elastic.clock import SystemClock
from spark_elastic.clusters.local.launcher import LocalLauncher
from spark_elastic.driver.ports import Post
from spark_elastic.protocol.slot_spec import SlotSpec
from spark_elastic.testing.fakes import ProcessLauncher
from tests.component.torch.hand_written import Run
from tests.devices import ACCELERATORS
from tests.faults import killed_programs
from tests.faults.killed_programs import KILLS, PROGRAMS, STEPS, train_by_fsdp
from tests.faults.killer import Killer, assert_exact, assert_resumed
from tests.sources import ROOT

pytestmark = [pytest.mark.faults, pytest.mark.native, pytest.mark.timeout(1200)]

cloudpickle.register_pickle_by_value(killed_programs)


class ForkingLauncher(ProcessLauncher):
    """Forks workers from a process that has imported torch, as jobs of users do."""

    device = "cpu"

    def start(self, spec: SlotSpec, post: Post) -> None:
        spec = replace(spec, driver_timeout=20.0, spare_after=0.0, device=self.device, slots_per_gpu=8)
        LocalLauncher.start(self, spec, post)


def make_run(program: Any, *given: Any, device: str = "cpu") -> Run:
    run = Run(program, *given, room=3, num_workers=3, max_workers=3)
    cluster = ForkingLauncher(run.call.program, SystemClock(), run.call.preload, room=3)
    cluster.device, run.cluster = device, cluster
    return run


@pytest.mark.parametrize("train", PROGRAMS)
def test_loops_and_integrations_are_exact_after_twenty_kills(
    train: Callable[[str], Any], tmp_path: Path
) -> None:
    check_exact(train, tmp_path)


@pytest.mark.parametrize("device", ACCELERATORS, indirect=True)
@pytest.mark.parametrize("train", [*PROGRAMS, train_by_fsdp])
def test_loops_and_integrations_that_share_a_device_are_exact_after_twenty_kills(
    train: Callable[[str], Any], device: str, tmp_path: Path
) -> None:
    check_exact(train, tmp_path, device)


def check_exact(train: Callable[[str], Any], tmp_path: Path, device: str = "cpu") -> None:
    run = make_run(train, (str(tmp_path),), device=device)
    with Killer(tmp_path, run.lines, holders=2, after_a_step=train is train_by_fsdp) as killer:
        results = run.results()
    assert_exact(results, killer)


def test_an_unchanged_script_resumes_from_its_own_checkpoint_after_each_of_twenty_kills(
    tmp_path: Path,
) -> None:
    script = ROOT / "tests" / "faults" / "killed_script.py"
    run = make_run(str(script), str(tmp_path), str(KILLS), str(STEPS))
    with Killer(tmp_path, run.lines, holders=1) as killer:
        run.results()
    assert_resumed(tmp_path, killer)
