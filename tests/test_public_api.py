"""What `import spark_elastic` promises: these names, lazily, and no framework on the way."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import spark_elastic
from tests.sources import PYTHONPATH, names

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
HEAVY = ("pyspark", "torch", "tensorflow", "keras", "petastorm", "pandas", "pyarrow", "numpy")


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
    assert {type(node) for node in source.body} <= {ast.Expr, ast.ImportFrom, ast.Assign}
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


@pytest.mark.parametrize("package", ["spark_elastic", "elastic_collectives"])
def test_import_brings_no_framework(package: str) -> None:
    heavy = HEAVY if package == "spark_elastic" else tuple(name for name in HEAVY if name != "numpy")
    program = f"import sys, {package}; print([n for n in {heavy!r} if n in sys.modules])"
    environment = os.environ | {"PYTHONPATH": PYTHONPATH}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30, env=environment)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
