"""P1 to P4 on a real standalone cluster under kill after kill; the long form is `nox -s faults`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.specification import STATES

RARE = {"a checkpoint was published", "survivors differed by a step"}

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.native, pytest.mark.slow]


def play(program: str, *options: object) -> str:
    """What it prints last."""
    command = [sys.executable, Path(__file__).with_name(program), *options]
    run = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    return run.stdout.splitlines()[-1]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", ["mlp", "mixed"])
def test_p1_to_p4_hold_under_twenty_kills(case: str, tmp_path: Path) -> None:
    options = ["--kills", 20, "--seed", 1, "--each", 3, "--epochs", 150, "--folder", tmp_path]
    verdict: dict[str, Any] = json.loads(play("soak.py", "--case", case, *options))
    met = verdict["phases"]
    assert all(met.get(phase, 0) >= 3 for phase in ("F", "X", "A", "rendezvous")), met
    assert set(verdict["states"]) >= set(STATES) - RARE
    assert verdict["rank 0"] >= 5
    assert verdict["while joining"] >= 2


@pytest.mark.timeout(900)
def test_an_hour_of_faults_loses_no_row_and_leaks_nothing(tmp_path: Path) -> None:
    """Two minutes of it."""
    record = tmp_path / "soak.json"
    play("soak_hour.py", "--minutes", 2, "--every", 10, "--json", record)
    assert sum(json.loads(record.read_text())["kinds"].values()) >= 4
