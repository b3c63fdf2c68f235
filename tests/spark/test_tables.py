"""Fits on tables of Delta Lake, which others write to at the same time."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from pyspark import SparkFiles
from pyspark.sql import SparkSession

from spark_elastic import Rows
from spark_elastic.errors import InvalidInput
from tests.leaks import SessionOwned
from tests.scenarios import Fault
from tests.spark.cluster import StandaloneCluster
from tests.spark.estimators import ROWS, estimator, table
from tests.spark.fits import fit_through_a_loss

pytestmark = [pytest.mark.usefixtures("nets_pickled_by_value"), pytest.mark.spark, pytest.mark.native]


@pytest.mark.faults  # component/data/test_lake_tables.py has versions that others change; test_settings.py a loss
def test_p1_p2_a_fit_on_a_version_loses_an_executor_while_others_delete_append_and_compact(
    spark: SparkSession,
    standalone: StandaloneCluster,
    fault: Fault,
    session_owned: SessionOwned,
    tmp_path: Path,
) -> None:
    """Two processes of each worker pass its rows through a transformation_fn, which reads a file of Spark's."""
    spark.sparkContext.addFile(__file__)
    df, folder = table(spark), str(tmp_path / "table")
    processes = tmp_path / "processes"
    processes.mkdir()

    def note_process(columns: dict[str, Any]) -> dict[str, Any]:
        if os.path.exists(SparkFiles.get(os.path.basename(__file__))):
            (processes / str(os.getpid())).touch()
        return columns

    rows = df.collect()
    parts = [
        pa.table({name: [row[name] for row in part] for name in ("x", "y")})
        for part in (rows[: ROWS // 3], rows[ROWS // 3 :])
    ]
    with session_owned.adopt():  # deltalake keeps an event loop
        for part in parts:
            write_deltalake(folder, part, mode="append")
    writer = threading.Thread(target=change_table, args=(folder, parts[0]), name="writer")

    def change_once(numbers: Mapping[str, Any]) -> None:
        if numbers["step"] and writer.ident is None:
            writer.start()

    _, model = fit_through_a_loss(
        spark,
        standalone,
        fault,
        tmp_path,
        workers=3,
        fit=lambda est: est.fit_on_table(folder, version=1),
        meanwhile=change_once,
        transformation_fn=note_process,
        transformation_workers=2,
    )
    writer.join()
    assert DeltaTable(folder).version() > 3
    assert model.summary.data == f"version 1 of the Delta table file://{folder}"
    assert not list((tmp_path / "store").rglob("*.parquet"))
    # Of the worker that is killed, one of the two may not have had its turn.
    assert len({each.name for each in processes.iterdir()} - {str(os.getpid())}) >= 2 * 2 + 1


def change_table(folder: str, rows: pa.Table) -> None:
    DeltaTable(folder).delete("y > 0")
    write_deltalake(folder, rows, mode="append")
    DeltaTable(folder).optimize.compact()


def test_a_table_is_found_in_the_catalog_and_validated_with_another_one(
    spark: SparkSession, session_owned: SessionOwned, tmp_path: Path
) -> None:
    draw = np.random.default_rng(5)
    with session_owned.adopt():
        for name, count in (("trained", 30), ("seen", 9)):
            x = draw.normal(size=(count, 2))
            write_deltalake(str(tmp_path / name), pa.table({"x": list(x), "y": x[:, 0]}))
        assert Rows.from_table(tmp_path / "seen").count == 9
    # The connector of Delta would say `USING delta`; only the place of the table matters here.
    spark.sql(f"CREATE TABLE elastic_trained USING parquet LOCATION '{tmp_path}/trained'")
    try:
        est = estimator(tmp_path / "store", epochs=2)
        model = est.fit_on_table("elastic_trained", validation_table=tmp_path / "seen")
    finally:
        spark.sql("DROP TABLE elastic_trained")
    assert [(epoch["rows"], epoch["val_rows"]) for epoch in model.history] == [(30, 9)] * 2
    with pytest.raises(InvalidInput, match=r"The Delta table .* cannot be read of version 99: "):
        est.fit_on_table(tmp_path / "trained", version=99)
    with pytest.raises(InvalidInput, match="got None: name the table"):
        est.fit_on_table(None)
    with pytest.raises(InvalidInput, match="fit_on_table reads files as they are: give validation_table"):
        est.copy({est.validation: 0.2}).fit_on_table(tmp_path / "trained")
