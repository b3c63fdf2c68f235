"""No framework brings another one, and predictions no engine."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from tests.sources import PACKAGES


def assert_runs(program: str) -> None:
    paths = os.pathsep.join(map(str, PACKAGES.values()))
    environment = os.environ | {"PYTHONPATH": paths, "TF_CPP_MIN_LOG_LEVEL": "3"}
    how: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 100, "env": environment}
    done = subprocess.run([sys.executable, "-c", program], check=False, **how)
    assert done.returncode == 0, done.stderr


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("imported", "absent"),
    [
        ("torch", {"tensorflow", "keras"}),
        ("tensorflow", {"torch"}),
        # Fitted models have modules in it.
        ("keras", {"torch", "elastic_collectives", "spark_elastic.worker"}),
        ("estimators.torch_model", {"elastic_collectives", "spark_elastic.torch"}),
        ("estimators.predict_udf", {"elastic_collectives", "spark_elastic.torch"}),
    ],
)
def test_each_framework_half_imports_only_its_framework_and_predictions_no_engine(
    imported: str, absent: set[str]
) -> None:
    assert_runs(f"import sys, spark_elastic.{imported}; sys.exit(bool({absent!r} & set(sys.modules)))")


WITHOUT_THE_ENGINE = """
import pickle, sys, types
sys.modules["elastic_collectives"] = None  # as where it cannot be loaded
import spark_elastic.keras as hvd

class Named:
    def __reduce__(self):
        return "named"

Named.__module__ = None  # as functions of scipy: pickle asks every module for such a name
named, elsewhere = Named(), types.ModuleType("elsewhere")
elsewhere.named = named
sys.modules["elsewhere"] = elsewhere
assert pickle.loads(pickle.dumps(named)) is named
assert not hasattr(hvd, "__wrapped__") and not hasattr(hvd, "size") and "DistributedOptimizer" in dir(hvd)
"""


@pytest.mark.timeout(120)
def test_the_keras_half_imports_without_the_engine() -> None:
    assert_runs(WITHOUT_THE_ENGINE)


def test_the_keras_half_lists_its_names() -> None:
    import spark_elastic.keras as hvd

    assert {"size", "init", "allreduce", "DistributedOptimizer", "callbacks"} <= set(dir(hvd))
