"""P1 to P4 on a real standalone cluster under kill after kill; the long form is `nox -s faults`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.specification import STATES

SOAK = Path(__file__).with_name("soak.py")
CASES = ("mlp", "mixed")

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.native, pytest.mark.slow]


def soak(case: str, kills: int, epochs: int, seed: int, folder: Path, each: int = 0) -> dict[str, object]:
    command = [sys.executable, str(SOAK), "--case", case, "--kills", str(kills), "--seed", str(seed)]
    run = subprocess.run(
        [*command, "--each", str(each), "--epochs", str(epochs), "--folder", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    verdict: dict[str, object] = json.loads(run.stdout.splitlines()[-1]) if run.stdout else {}
    assert run.returncode == 0, f"seed {seed}: {verdict}\n{run.stderr[-3000:]}"
    return verdict


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", CASES)
def test_p1_to_p4_hold_under_twenty_kills(case: str, tmp_path: Path) -> None:
    verdict = soak(case, 20, 150, 1, tmp_path, each=3)
    met = verdict["phases"]
    assert isinstance(met, dict)
    assert all(met.get(phase, 0) >= 3 for phase in ("F", "X", "A", "rendezvous")), met
    assert set(verdict["states"]) >= set(STATES) - {
        "a checkpoint was published",
        "survivors differed by a step",
    }  # type: ignore[call-overload]
    assert verdict["rank 0"] >= 5  # type: ignore[operator]
    assert verdict["while joining"] >= 2  # type: ignore[operator]
