"""Executors whose Python has not got this package: `ship=True` sends it, and without it a sentence says so."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import cloudpickle
import numpy as np
import pytest

import spark_elastic
from spark_elastic.data.store import Store
from spark_elastic.errors import PreflightError
from spark_elastic.spark.preflight import facts, preflight
from tests.spark.cluster import StandaloneCluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.native, pytest.mark.slow]


@pytest.fixture
def bare(
    spark_with: Callable[[Mapping[str, str]], SparkSession], monkeypatch: pytest.MonkeyPatch
) -> Iterator[SparkSession]:
    """A session whose executors have what we depend on, and not us.

    Their Python is the one behind this virtual environment, which does not read its .pth files.
    """
    monkeypatch.setenv("PYSPARK_PYTHON", str(Path(sys.executable).resolve()))
    packages = str(Path(np.__file__).parents[1])
    module = sys.modules[__name__]  # executors have no tests folder either
    cloudpickle.register_pickle_by_value(module)
    yield spark_with({"spark.executorEnv.PYTHONPATH": packages, "spark.task.cpus": "1"})
    cloudpickle.unregister_pickle_by_value(module)


def places() -> tuple[str, str]:
    import os

    import elastic_collectives
    import spark_elastic as here

    os.chdir("/")
    import spark_elastic.torch.elastic  # found though the directory has changed

    assert spark_elastic.torch.elastic
    return str(here.__file__), str(elastic_collectives.__file__)


def test_only_the_driver_has_the_package(
    bare: SparkSession, standalone: StandaloneCluster, tmp_path: Path
) -> None:
    """Without `ship` a sentence; with it preflight, and a function, also on an executor that is new."""
    sc, store = bare.sparkContext, Store.open(str(tmp_path))
    with pytest.raises(PreflightError, match=f"host {facts()['host']} cannot load spark_elastic .*ship=True"):
        preflight(sc, cloudpickle.dumps(1), store, (), 60.0)

    for found in (
        spark_elastic.run(places, num_workers=2, ship=True, spark=bare),
        _after_a_loss(bare, standalone),
    ):
        for place in np.ravel(found):
            assert not place.startswith(str(Path(spark_elastic.__file__).parents[1])), (
                "the driver's own files"
            )
    assert preflight(sc, cloudpickle.dumps(1), store, (), 60.0)


def _after_a_loss(bare: SparkSession, standalone: StandaloneCluster) -> list[tuple[str, str]]:
    """All three executors are needed, one of them new."""
    standalone.kill_executor(standalone.executor_pids()[-1])
    return spark_elastic.run(places, num_workers=3, min_workers=3, ship=True, spark=bare)
