"""Spark Connect's own client (`pip install pyspark-client`) has neither py4j nor a SparkContext: played in a process of
its own, which may import neither."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("pyspark")
pytestmark = pytest.mark.timeout(180)

CLASSIC = "spark_elastic.clusters.spark.classic"  # to which a session with a SparkContext alone leads
PROGRAM = f"""
import importlib, pkgutil, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "py4j" or name.split(".")[:2] == ["pyspark", "core"]:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
import pyspark.util
assert pyspark.util.is_remote_only()
for package in map("spark_elastic.".__add__, ("clusters.spark", "clusters.run", "estimators")):
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__, package + "."):
        if module.name != {CLASSIC!r} and "keras" not in module.name:  # which is slow to import
            importlib.import_module(module.name)
"""


def test_a_connect_client_without_a_jvm_imports_everything_but_the_classic_parts() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
