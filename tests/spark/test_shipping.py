"""Executors whose Python has not got this package: `ship=True` or an archive brings it, else a sentence says so."""

from __future__ import annotations

import shutil
import sys
import tarfile
import venv
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from pyspark.sql import SparkSession

import spark_elastic
from spark_elastic.clusters.spark.classic import PACKAGES, preflight
from spark_elastic.clusters.spark.host_facts import collect_host_facts
from spark_elastic.clusters.spark.probe import Probe
from spark_elastic.data.store import Store
from spark_elastic.errors import PreflightError
from tests.spark.cluster import StandaloneCluster
from tests.spark.conftest import SparkWith
from tests.spark.estimators import ROWS, Net, compute_mse, estimator, is_close, table, train_plain

pytestmark = [pytest.mark.spark, pytest.mark.native, pytest.mark.slow]


@pytest.fixture
def bare(
    spark_with: SparkWith,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Iterator[SparkSession]:
    """A session of its own whose executors have what we depend on, and not us; what one session ships stays there.

    Their Python is the one behind this virtual environment, which does not read its .pth files.
    """
    monkeypatch.setenv("PYSPARK_PYTHON", str(Path(sys.executable).resolve()))
    packages = str(Path(np.__file__).parents[1])
    module = sys.modules[__name__]  # executors have no tests folder either
    cloudpickle.register_pickle_by_value(module)
    yield spark_with({"spark.executorEnv.PYTHONPATH": packages, "spark.app.name": request.node.name})
    cloudpickle.unregister_pickle_by_value(module)


def places() -> tuple[str, str]:
    import os

    import elastic_collectives
    import spark_elastic as here

    os.chdir("/")
    import spark_elastic.handwritten.torch_state  # found though the directory has changed

    assert spark_elastic.torch.elastic
    return str(here.__file__), str(elastic_collectives.__file__)


def test_a_run_ships_the_package_that_only_the_driver_has(
    bare: SparkSession, standalone: StandaloneCluster, tmp_path: Path
) -> None:
    """Without `ship` a sentence; with it preflight, and a function, also on an executor that is new."""
    sc, store = bare.sparkContext, Store.open(str(tmp_path))
    says = f"host {collect_host_facts()['host']} cannot load spark_elastic .*ship=True"
    with pytest.raises(PreflightError, match=says):
        preflight(sc, Probe(payload=cloudpickle.dumps(1), store=store), 60.0)
    shipped = spark_elastic.run(places, num_workers=2, ship=True, spark=bare)
    for found in shipped, _run_after_loss(bare, standalone):
        for place in np.ravel(found):
            assert not place.startswith(str(Path(spark_elastic.__file__).parents[1])), "the driver's files"
    assert preflight(sc, Probe(payload=cloudpickle.dumps(1), store=store), 60.0)


def _run_after_loss(bare: SparkSession, standalone: StandaloneCluster) -> list[tuple[str, str]]:
    """All three executors are needed, one of them new."""
    standalone.kill_executor(standalone.executor_pids()[-1])
    return spark_elastic.run(places, num_workers=3, min_workers=3, ship=True, spark=bare)


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_a_fit_and_its_predictions_where_only_the_driver_has_the_package(
    bare: SparkSession, spark_cluster: StandaloneCluster, tmp_path: Path
) -> None:
    with pytest.raises(PreflightError, match="ship=True"):
        fit_and_transform(bare, tmp_path)
    fit_and_transform(bare, tmp_path, ship=True)


def fit_and_transform(spark: SparkSession, store: Path, **settings: Any) -> None:
    """The fit's workers and the executors that predict find what they need."""
    for module in (__name__, Net.__module__):  # executors have no tests folder
        cloudpickle.register_pickle_by_value(sys.modules[module])
    df = table(spark)
    fitted = estimator(store, epochs=2, num_workers=2, batch_size=ROWS // 2, **settings).fit(df)
    assert is_close(fitted, train_plain(df, 2, compute_mse))
    rows = fitted.transform(df).select("x", "prediction").collect()
    with torch.no_grad():
        expected = fitted.model(torch.tensor([row.x for row in rows], dtype=torch.float64))
    assert np.allclose([row.prediction for row in rows], expected)


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_a_packed_environment_in_spark_archives(
    spark_with: SparkWith, spark_cluster: StandaloneCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A virtual environment with the package, unpacked beside each executor, whose interpreter is a relative path."""
    monkeypatch.setenv("PYSPARK_PYTHON", "./environment/bin/python")
    spark = spark_with(
        {
            "spark.archives": f"{_pack_environment(tmp_path)}#environment",
            "spark.executorEnv.PYTHONPATH": "environment",  # instead of this repository
        }
    )
    fit_and_transform(spark, tmp_path / "store")
    for place in np.ravel(spark_elastic.run(places, num_workers=2, spark=spark)):
        assert "/environment/lib/" in place


def _pack_environment(folder: Path) -> Path:
    """As venv-pack packs one; what we depend on is not copied: a line names where it lies."""
    environment = folder / "environment"
    venv.create(environment, symlinks=True, with_pip=False)
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(str(Path(np.__file__).parents[1]))
    for package in PACKAGES:
        spec = find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        shutil.copytree(Path(spec.origin).parent, packages / package)
    with tarfile.open(folder / "environment.tar.gz", "w:gz") as archive:
        archive.add(environment, ".")
    return folder / "environment.tar.gz"
