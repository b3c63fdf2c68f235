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
from spark_elastic.config import ElasticConfig
from spark_elastic.data.store import Store
from spark_elastic.errors import PreflightError
from spark_elastic.launch import launch
from spark_elastic.protocol.types import Limits
from spark_elastic.spark.preflight import facts, preflight
from spark_elastic.testing.counting import CountingProgram
from tests.spark.cluster import StandaloneCluster
from tests.spark.test_spark_scenarios import Story, exact

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
    """Without `ship` a sentence; with it preflight, a function, and a job that loses an executor to a new one."""
    sc, store = bare.sparkContext, Store.open(str(tmp_path))
    with pytest.raises(PreflightError, match=f"host {facts()['host']} cannot load spark_elastic .*ship=True"):
        preflight(sc, cloudpickle.dumps(1), store, (), 60.0)

    found = spark_elastic.run(places, num_workers=2, ship=True, spark=bare)
    for place in np.ravel(found):
        assert not place.startswith(str(Path(spark_elastic.__file__).parents[1])), (
            "not the driver's own files"
        )

    assert preflight(sc, cloudpickle.dumps(1), store, (), 60.0)

    def kill() -> None:
        busy = [pid for pid in standalone.executor_pids() if standalone.training_children(pid)]
        standalone.kill_executor(busy[-1])

    program = CountingProgram(200, 0.05)
    story = Story((20, 3, kill), (120, 3, lambda: None))
    result = launch(bare, program, Limits(3, 1, 3), ElasticConfig(ship=True), "shipped", (), story)
    assert exact(result, program)
    assert story.told, "the executor that was new did not take part"
