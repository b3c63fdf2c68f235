"""What a process says of itself, and which session it takes."""

from __future__ import annotations

import platform

import pytest

pytest.importorskip("pyspark")

import spark_elastic
from spark_elastic.clusters.spark.host_facts import collect_host_facts, get_session
from spark_elastic.errors import InvalidInput


def test_host_facts_are_those_of_this_process() -> None:
    found = collect_host_facts()
    assert found["python"] == platform.python_version()
    assert found["spark_elastic"] == spark_elastic.__version__
    assert found["host"]


def test_a_master_is_no_session() -> None:
    for given in ("local", ""):
        with pytest.raises(InvalidInput, match=f"spark must be a SparkSession; got '{given}'"):
            get_session(given)  # type: ignore[arg-type]
