"""Spark's own failures as sentences."""

from __future__ import annotations

import pytest

pytest.importorskip("pyspark")

from spark_elastic.errors import JobCancelled, PreflightError
from spark_elastic.spark.preflight import _explain

LOST = "Job aborted: Lost task 0.0 in stage 0.0 (TID 0) (10.0.0.7 executor 1): PythonException: Traceback\n"


def test_another_python_is_explained() -> None:
    explained = _explain(
        RuntimeError(
            f"{LOST}[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.10 than that in driver: 3.11, "
            "PySpark cannot run with different minor versions."
        )
    )
    assert isinstance(explained, PreflightError)
    assert "host 10.0.0.7 has python 3.10, and the driver has 3.11: set PYSPARK_PYTHON to the same" in str(
        explained
    )


def test_a_cancelled_probe_is_a_cancelled_job() -> None:
    assert isinstance(_explain(RuntimeError("Job 3 cancelled part of cancelled job group g")), JobCancelled)


def test_other_errors_of_spark_stay_as_they_are() -> None:
    error = RuntimeError("disk full")
    assert _explain(error) is error
