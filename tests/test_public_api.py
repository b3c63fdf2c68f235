"""What imports promise: these names, lazily, and no framework or engine on the way that is not asked for."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import spark_elastic
from tests.sources import PACKAGES, names

# Module -> the public names that it defines. Add a name here and in spark_elastic/__init__.py in one commit.
MODULES = {
    "errors": "CoordinatorLost ConnectionClosed DriverUnreachable ElasticError FailureBudgetExceeded InvalidInput "
    "JobCancelled JobFailed NotEnoughWorkers OutOfMemory PreflightError StaleGeneration StoreError TimeLimitReached "
    "Unauthorized WorkerFailed",
    "config": "ElasticConfig",
    "estimators.keras_estimator": "ElasticKerasEstimator",
    "estimators.keras_model": "ElasticKerasModel",
    "estimators.torch_estimator": "ElasticTorchEstimator",
    "estimators.torch_model": "ElasticTorchModel",
    "estimators.rows": "Rows",
    "data.packing": "Packing Ragged",
    "driver.discovery": "JobHandle",
    "clusters.run.torch_distributor": "TorchDistributor",
    "clusters.run.call": "run",
    "clusters.run.attached": "attach",
    "worker.session": "report task_resources",
}
PUBLIC = {name: module for module, names in MODULES.items() for name in names.split()}
# Public modules that only give names to what other modules define.
FACES = {
    "estimators": ("export", "mlflow_fit", "optuna_pruning"),
    "keras": ("callbacks", "compression", "elastic"),
    "tensorflow": ("compression", "elastic"),
    "torch": ("callbacks", "compression", "elastic", "fsdp", "huggingface", "lightning", "loggers"),
}
HEAVY = {"pyspark", "torch", "tensorflow", "keras", "petastorm", "pandas", "pyarrow", "numpy"}


def test_names_of_the_testing_kit_are_where_it_says() -> None:
    from spark_elastic import testing

    assert sorted(testing._EXPORTS) == testing.__dir__()
    for name, module in testing._EXPORTS.items():
        assert getattr(testing, name) is getattr(importlib.import_module(module), name)
    with pytest.raises(AttributeError, match="Nothing"):
        testing.Nothing  # noqa: B018


def test_all_lists_the_public_names_exactly() -> None:
    assert sorted(spark_elastic.__all__) == sorted(PUBLIC)
    assert set(dir(spark_elastic)) == {*PUBLIC, "__version__"}


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_name_is_the_one_of_its_module(name: str) -> None:
    module = importlib.import_module(f"spark_elastic.{PUBLIC[name]}")
    assert getattr(spark_elastic, name) is getattr(module, name)


@pytest.mark.timeout(60)  # Lightning and transformers are slow to import
@pytest.mark.parametrize("face", [f"{part}.{name}" for part, names in FACES.items() for name in names])
def test_a_public_module_only_names_what_another_defines(face: str) -> None:
    module = importlib.import_module(f"spark_elastic.{face}")
    assert module.__all__
    source = ast.parse(Path(str(module.__file__)).read_text())
    assert {type(node) for node in source.body} <= {ast.Expr, ast.ImportFrom, ast.Assign, ast.AugAssign}
    for name in module.__all__:
        assert getattr(getattr(module, name), "__module__", None) != module.__name__


def test_every_error_is_public() -> None:
    errors = importlib.import_module("spark_elastic.errors")
    defined = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert defined == {name for name, module in PUBLIC.items() if module == "errors"}


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        spark_elastic.nothing  # noqa: B018


def test_no_public_name_is_a_module() -> None:
    parts = {name.split(".")[1] for name in names() if name.startswith("spark_elastic.")}
    assert not parts & set(PUBLIC)


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
        ("spark_elastic", HEAVY),
        ("elastic_collectives", HEAVY - {"numpy"}),
        ("spark_elastic.torch", {"tensorflow", "keras"}),
        ("spark_elastic.tensorflow", {"torch"}),
        # Fitted models have modules in it.
        ("spark_elastic.keras", {"torch", "elastic_collectives", "spark_elastic.worker"}),
        ("spark_elastic.estimators.torch_model", {"elastic_collectives", "spark_elastic.torch"}),
        ("spark_elastic.estimators.predict_udf", {"elastic_collectives", "spark_elastic.torch"}),
    ],
)
def test_no_framework_brings_another_one_and_predictions_no_engine(imported: str, absent: set[str]) -> None:
    assert_runs(f"import sys, {imported}; assert not {absent!r} & sys.modules.keys()")


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
