"""Each kind of program of torch's users under twenty SIGKILLs: on plain processes, on a device and on Spark."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import spark_elastic
from spark_elastic.clock import SystemClock
from spark_elastic.clusters.local.launcher import LocalLauncher
from spark_elastic.config import ElasticConfig
from spark_elastic.driver.ports import Post
from spark_elastic.protocol.types import SlotSpec
from spark_elastic.testing.fakes import ProcessLauncher
from tests.component.torch.hand_written import Run
from tests.devices import ACCELERATORS, use_device
from tests.faults import killed_programs, killed_trainers
from tests.faults.killed_programs import (
    FSDP_PROGRAMS,
    KILLS,
    PROGRAMS,
    STEPS,
    train_plain,
    train_plain_tokens,
    train_tokens,
    write_rows,
)
from tests.faults.killed_trainers import train_by_dpo, train_by_sft, train_embeddings
from tests.faults.killer import Killer, assert_exact, assert_resumed
from tests.journals import keep_journal
from tests.leaks import SessionOwned
from tests.sources import ROOT

pytestmark = [pytest.mark.faults, pytest.mark.native, pytest.mark.timeout(1200)]

for module in (killed_programs, killed_trainers):
    cloudpickle.register_pickle_by_value(module)

ON_SPARK: dict[str, Any] = {
    "num_workers": 3,
    "min_workers": 1,
    "gather_timeout": 60.0,
    "failure_budget": KILLS + 1,
    "cooldown_range": (0.1, 0.5),
    "spare_after": 0.0,
}
SPARK = pytest.param("spark", marks=pytest.mark.spark)


class ForkingLauncher(ProcessLauncher):
    """Forks workers from a process that has imported torch, as jobs of users do."""

    device = "cpu"

    def start(self, spec: SlotSpec, post: Post) -> None:
        spec = replace(spec, driver_timeout=20.0, spare_after=0.0, device=self.device, slots_per_gpu=8)
        LocalLauncher.start(self, spec, post)


Rig = Callable[..., tuple[io.StringIO, Callable[[], Any]]]


@pytest.fixture
def rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """Prepares a call of a program on three workers: the lines that the job prints, and what calls it.

    Its parameter: "spark", or the device of plain processes.
    """

    def prepare(program: Any, *given: Any) -> tuple[io.StringIO, Callable[[], Any]]:
        if spark is not None:
            lines = io.StringIO()

            def run() -> Any:
                with keep_journal(ElasticConfig()) as (config, _):
                    to = {"spark": spark, "stdout": lines, "journal": config.journal}
                    return spark_elastic.run(program, *given, **to, **ON_SPARK)

            return lines, run
        run = Run(program, *given, room=3, num_workers=3, max_workers=3)
        cluster = ForkingLauncher(run.call.program, SystemClock(), run.call.preload, room=3)
        cluster.device, run.cluster = request.param, cluster
        return run.lines, run.results

    spark = request.getfixturevalue("spark") if request.param == "spark" else None
    if spark is None:
        use_device(request.param, monkeypatch)
    return prepare


@pytest.mark.parametrize("rig", ["cpu", *ACCELERATORS, SPARK], indirect=True)
@pytest.mark.parametrize("train", [*PROGRAMS, *FSDP_PROGRAMS])
def test_loops_and_integrations_are_exact_after_twenty_kills(
    rig: Rig, train: Callable[[str], Any], session_owned: SessionOwned, tmp_path: Path
) -> None:
    with session_owned.adopt():  # deltalake's own event loop
        write_rows(tmp_path)
    lines, call = rig(train, (str(tmp_path),))
    with Killer(tmp_path, lines, holders=2, after_a_step=train in FSDP_PROGRAMS) as killer:
        results = call()
    assert_exact(results, killer, train_plain_tokens if train is train_tokens else train_plain)


@pytest.mark.filterwarnings("ignore")  # the libraries' own, of the undisturbed training
@pytest.mark.parametrize("rig", ["cpu", SPARK], indirect=True)
@pytest.mark.parametrize(
    ("train", "library"),
    [(train_by_sft, "trl"), (train_by_dpo, "trl"), (train_embeddings, "sentence_transformers")],
)
def test_fine_tuning_is_exact_after_twenty_kills(
    rig: Rig, train: Callable[[str], Any], library: str, session_owned: SessionOwned, tmp_path: Path
) -> None:
    """In an environment of `works_with.py` that has the library."""
    pytest.importorskip(library)
    with session_owned.adopt():
        write_rows(tmp_path)
    lines, call = rig(train, (str(tmp_path),))
    with Killer(tmp_path, lines, holders=2) as killer:
        results = call()
    with session_owned.adopt():  # the libraries' threads
        assert_exact(results, killer, train)


@pytest.mark.parametrize("rig", ["cpu", SPARK], indirect=True)
def test_an_unchanged_script_resumes_from_its_checkpoint_after_twenty_kills(rig: Rig, tmp_path: Path) -> None:
    script = ROOT / "tests" / "faults" / "killed_script.py"
    lines, call = rig(str(script), str(tmp_path), str(KILLS), str(STEPS))
    with Killer(tmp_path, lines, holders=1) as killer:
        call()
    assert_resumed(tmp_path, killer)
