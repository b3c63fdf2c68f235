"""A fit whose rows another reader than Arrow reads, which all other fits have."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.component.column_kinds import READERS
from tests.scenarios import Fault
from tests.spark.cluster import StandaloneCluster
from tests.spark.fits import fit_through_a_loss

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.native, pytest.mark.faults]


@pytest.mark.parametrize("reader", READERS[1:])
def test_p1_p2_hold_with_every_reader_after_a_lost_executor(
    reader: str, spark: SparkSession, standalone: StandaloneCluster, fault: Fault, tmp_path: Path
) -> None:
    fit_through_a_loss(spark, standalone, fault, tmp_path, workers=3, reader=reader)
