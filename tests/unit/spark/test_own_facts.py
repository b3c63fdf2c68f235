"""What a process says of itself."""

from __future__ import annotations

import platform

import pytest

pytest.importorskip("pyspark")

import spark_elastic
from spark_elastic.spark.session import collect_host_facts


def test_host_facts_are_those_of_this_process() -> None:
    found = collect_host_facts()
    assert found["python"] == platform.python_version()
    assert found["spark_elastic"] == spark_elastic.__version__
    assert found["host"]
