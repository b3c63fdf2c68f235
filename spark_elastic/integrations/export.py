"""A fitted torch model in the forms that other programs load: torch.export, ONNX, safetensors; and `log_fit`, which
logs a fit to MLflow from the driver: parameters, data, environment, and the model with its signature.

The module itself is exported, in evaluation mode and on the CPU, with a number of rows that stays free. A
`transformation_fn` is not part of it: the module's inputs are then what that makes of the columns. Of MLflow its own
functions are called, whose autologging may be off; the numbers of the training are `MLflowLogger`'s, whose run this
continues. Runs in the caller's thread; other packages are imported where they are used.
"""

from __future__ import annotations

import importlib
import inspect
import json
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spark_elastic.checks import require_package
from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.elastic_estimator import ElasticEstimator
from spark_elastic.estimators.predictor import TorchPredictor
from spark_elastic.estimators.torch_model import ElasticTorchModel
from spark_elastic.estimators.transformer import ElasticModel, FitSummary
from spark_elastic.integrations.loggers import MLflowLogger

ROWS = 2  # of the example that is traced, or makes a signature; torch takes a dimension of 1 for a constant
LONGEST_VALUE = 500  # characters of a parameter that older servers of MLflow take
# Parameters that do not say what was trained, or may hold secrets.
UNLOGGED = ("config", "settings", "storage_options", "on_progress", "callbacks", "verbose")
PACKAGES = ("spark-elastic", "torch", "keras", "tensorflow", "tensorflow-cpu", "pyspark", "numpy", "pyarrow")


def export_program(model: ElasticTorchModel, inputs: Sequence[Any] | None = None) -> Any:
    """A `torch.export.ExportedProgram`, for `torch.export.save`.

    Args:
        inputs: arrays of at least two rows, one for each input of the module; needed with a `transformation_fn`.

    Raises:
        InvalidInput: inputs are needed, or of fewer rows.
    """
    tensors = make_inputs(model, inputs)
    rows = torch.export.Dim("rows", min=1)
    return torch.export.export(model.getModel(), tensors, dynamic_shapes=tuple({0: rows} for _ in tensors))


def export_onnx(model: ElasticTorchModel, path: str | Path, inputs: Sequence[Any] | None = None) -> None:
    """Write an ONNX file. Its inputs have the names of the feature columns, its outputs "output_0", "output_1" ...

    inputs: as for `export_program`.
    """
    require_package("onnxscript", "export_onnx", "onnx onnxscript")
    program = export_program(model, inputs)
    outputs = len(program.graph_signature.user_outputs)
    columns = _get_predictor(model).columns
    names = [column.name for column in columns], [f"output_{number}" for number in range(outputs)]
    options: dict[str, Any] = {"input_names": names[0], "output_names": names[1], "verbose": False}
    torch.onnx.export(program, f=str(path), dynamo=True, external_data=False, **options)


def export_safetensors(model: ElasticTorchModel, path: str | Path) -> None:
    """Write the weights by name, as `state_dict` names them, and the fit's run and data as metadata."""
    safetensors = require_package("safetensors.torch", "export_safetensors", "safetensors")
    summary = model.summary
    about = {"run_id": summary.run_id, "data": summary.data, "data_digest": summary.data_digest}
    safetensors.save_model(model.getModel(), str(path), metadata={"format": "pt", **about})


def make_inputs(model: ElasticTorchModel, inputs: Sequence[Any] | None = None) -> tuple[torch.Tensor, ...]:
    """Tensors that the module takes: those given, or zeros in the shapes of the feature columns."""
    predictor = _get_predictor(model)
    if inputs is None:
        if predictor.needs_sample:
            raise InvalidInput(
                "the model has a transformation_fn, so its columns do not say what the module takes: pass inputs, the "
                f"arrays that transformation_fn makes of {ROWS} rows of the feature columns."
            )
        inputs = [np.zeros((ROWS, *column.shape), column.dtype) for column in predictor.columns]
    if any(len(each) < ROWS for each in inputs):
        raise InvalidInput(f"inputs need {ROWS} rows or more: torch takes a single row for a constant.")
    return tuple(predictor.make_tensor(np.asarray(each)) for each in inputs)


def _get_predictor(model: ElasticTorchModel) -> TorchPredictor:
    if not isinstance(model, ElasticTorchModel):
        raise InvalidInput(f"only an ElasticTorchModel can be exported; got {type(model).__name__}.")
    predictor = model._predictor
    assert isinstance(predictor, TorchPredictor)
    return predictor


# ---- MLflow


def log_fit(
    estimator: ElasticEstimator,
    model: ElasticModel,
    *,
    logger: MLflowLogger | None = None,
    registered_model_name: str | None = None,
    signature: Any = None,
    name: str = "model",
) -> Any:
    """Log what was fitted, to the run of `logger`, or else to the active run of MLflow or a new one.

    Args:
        estimator: the one whose `fit` returned the model.
        logger: the callback of that fit.
        registered_model_name: the model becomes a new version under this name in the registry.
        signature: of MLflow; needed with a `transformation_fn`, else made from the feature columns.
        name: of the model in the run.

    Returns:
        MLflow's `ModelInfo`.

    Raises:
        InvalidInput: MLflow is missing, the logger has no run, or a signature is needed.
    """
    mlflow = require_package("mlflow", "log_fit", "mlflow-skinny")
    if signature is None:
        signature = make_signature(model)
    with _open_run(mlflow, logger):
        mlflow.log_params(describe_params(estimator))
        versions = {"python": platform.python_version(), **_find_versions(PACKAGES)}
        mlflow.set_tags({f"version.{package}": found for package, found in versions.items()})
        mlflow.log_input(_make_dataset(model.summary), context="training")
        mlflow.log_dict(json.loads(model.summary.report.to_json()), "fit_report.json")
        is_torch = isinstance(model._predictor, TorchPredictor)
        flavor = importlib.import_module("mlflow.pytorch" if is_torch else "mlflow.keras")
        fitted, how = model.getModel(), _choose_arguments(flavor, name)
        how |= {"signature": signature, "registered_model_name": registered_model_name}
        return flavor.log_model(fitted, pip_requirements=list_requirements(fitted, is_torch), **how)


def describe_params(estimator: ElasticEstimator) -> dict[str, str]:
    """The estimator's parameters that have a value; objects by the names of their classes."""
    values = {param.name: value for param, value in estimator.extractParamMap().items()}
    shown = [name for name, value in values.items() if value is not None and name not in UNLOGGED]
    return {name: _describe(values[name])[:LONGEST_VALUE] for name in shown}


def _find_versions(packages: Iterable[str]) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def list_requirements(model: Any, is_torch: bool) -> list[str]:
    """What loads the model: the framework, and the packages that its layers' classes and their bases are from. MLflow
    would find it out by loading the model in a new process.

    model: of the framework.
    """
    names = {"torch", "numpy"} if is_torch else {"keras", "tensorflow", "tensorflow-cpu", "numpy"}
    layers = model.modules() if is_torch else model._flatten_layers()
    modules = {known.__module__.partition(".")[0] for layer in layers for known in type(layer).__mro__}
    packages = packages_distributions()
    names.update(name.replace("_", "-") for module in modules for name in packages.get(module, ()))
    # Local versions, such as 2.6.0+cpu, are not on PyPI.
    return [f"{name}=={found.partition('+')[0]}" for name, found in _find_versions(sorted(names)).items()]


def make_signature(model: ElasticModel) -> Any:
    """The signature of the framework's model: the feature columns as it takes them, and what it returns for zeros.

    Raises:
        InvalidInput: the columns go through a `transformation_fn`.
    """
    predictor = model._predictor
    if predictor.needs_sample:
        raise InvalidInput(
            "the model has a transformation_fn, so its columns do not say what it takes: pass "
            "signature=mlflow.models.infer_signature(inputs, outputs) of what transformation_fn returns."
        )
    columns = [np.zeros((ROWS, *column.shape), column.dtype) for column in predictor.columns]
    given, returned = predictor.call_model(columns)
    return importlib.import_module("mlflow.models").infer_signature(given, returned)


def _choose_arguments(flavor: Any, name: str) -> dict[str, Any]:
    """Those that depend on MLflow's release."""
    takes = inspect.signature(flavor.log_model).parameters
    named = {"name" if "name" in takes else "artifact_path": name}  # before MLflow 3
    # The module itself is kept: newer MLflow would trace it, with the number of rows of an example.
    return {**named, "serialization_format": "pickle"} if "serialization_format" in takes else named


def _describe(value: Any) -> str:
    if isinstance(value, str | int | float | bool):
        return str(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_describe, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {_describe(each)}' for key, each in value.items())}}}"
    if inspect.isroutine(value) or isinstance(value, type):
        return str(value.__qualname__)
    settings = getattr(value, "defaults", None)  # of torch's optimizers
    return f"{type(value).__name__}{'' if settings is None else settings}"


def _make_dataset(summary: FitSummary) -> Any:
    mlflow_data = importlib.import_module("mlflow.data.meta_dataset")
    sources = importlib.import_module("mlflow.data.code_dataset_source")
    source = sources.CodeDatasetSource({"data": summary.data})
    return mlflow_data.MetaDataset(source, name=summary.data or "data", digest=summary.data_digest or None)


@contextmanager
def _open_run(mlflow: Any, logger: MLflowLogger | None) -> Iterator[None]:
    if logger is None:
        with nullcontext() if mlflow.active_run() is not None else mlflow.start_run():
            yield
        return
    run_id = logger.find_run()
    if run_id is None:
        raise InvalidInput(
            "the MLflowLogger has no run yet: pass the one that was among the callbacks of this fit."
        )
    fluent: Any = importlib.import_module("mlflow.tracking.fluent")
    # MLflow opens no run of another experiment than the user has set, and tells it nowhere else.
    before = mlflow.get_tracking_uri(), getattr(fluent, "_active_experiment_id", None)
    mlflow.set_tracking_uri(logger.tracking_uri)
    try:
        fluent._active_experiment_id = mlflow.get_run(run_id).info.experiment_id
        with mlflow.start_run(run_id=run_id, nested=True):
            yield
    finally:
        mlflow.set_tracking_uri(before[0])
        fluent._active_experiment_id = before[1]
