"""Each kind of program of torch's users under twenty SIGKILLs, on Spark's executors."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest

import spark_elastic
from tests.faults import killed_programs
from tests.faults.killed_programs import KILLS, PROGRAMS, STEPS, train_by_fsdp
from tests.faults.killer import Killer, assert_exact, assert_resumed
from tests.sources import ROOT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.faults, pytest.mark.spark, pytest.mark.native, pytest.mark.timeout(1200)]

cloudpickle.register_pickle_by_value(killed_programs)

WORKERS: dict[str, Any] = {
    "num_workers": 3,
    "min_workers": 1,
    "gather_timeout": 60.0,
    "failure_budget": KILLS + 1,
    "cooldown_range": (0.1, 0.5),
    "spare_after": 0.0,
}


@pytest.mark.parametrize("train", [*PROGRAMS, train_by_fsdp])
def test_loops_and_integrations_are_exact_after_twenty_kills_on_spark(
    spark: SparkSession, train: Callable[[str], Any], tmp_path: Path
) -> None:
    lines = io.StringIO()
    with Killer(tmp_path, lines, holders=2, after_a_step=train is train_by_fsdp) as killer:
        results = spark_elastic.run(train, (str(tmp_path),), spark=spark, stdout=lines, **WORKERS)
    assert_exact(results, killer)


def test_an_unchanged_script_resumes_from_its_own_checkpoint_after_each_of_twenty_kills_on_spark(
    spark: SparkSession, tmp_path: Path
) -> None:
    script, lines = ROOT / "tests" / "faults" / "killed_script.py", io.StringIO()
    given = (str(tmp_path), str(KILLS), str(STEPS))
    with Killer(tmp_path, lines, holders=1) as killer:
        spark_elastic.run(str(script), *given, spark=spark, stdout=lines, **WORKERS)
    assert_resumed(tmp_path, killer)
