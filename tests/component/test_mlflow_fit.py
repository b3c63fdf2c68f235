"""A fit in MLflow: one run has the curves, parameters, data, environment and a model whose signature holds."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tqdm

pytest.importorskip("pyspark")

import keras
import lightning
import mlflow
import mlflow.pytorch
from mlflow.tracking import fluent

from spark_elastic.data.manifest import Column
from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.keras_model import ElasticKerasModel, KerasPredictor
from spark_elastic.estimators.predictor import ModuleWithTransformation, TorchPredictor
from spark_elastic.estimators.saving import pack
from spark_elastic.estimators.torch_estimator import ElasticTorchEstimator
from spark_elastic.estimators.torch_model import ElasticTorchModel
from spark_elastic.estimators.transformer import FitSummary
from spark_elastic.integrations import loggers
from spark_elastic.integrations.export import list_requirements, log_fit, make_signature
from spark_elastic.integrations.loggers import MLflowLogger
from spark_elastic.training.keras.archive import Archive
from spark_elastic.training.torch.callbacks import Training

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::FutureWarning:mlflow.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:mlflow.*"),
    pytest.mark.filterwarnings("ignore::UserWarning:mlflow.*"),
    pytest.mark.filterwarnings("ignore:_ImportHookChainedLoader:ImportWarning"),  # MLflow's hook of imports
    pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning"),  # the same hook
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # Keras 3 with numpy 2
]

COLUMNS = (Column("x", "float64", (4,)),)
SUMMARY = FitSummary(run_id="r", data="version 3 of the Delta table t", data_digest="abcd", data_rows=9)


@pytest.fixture
def tracking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A store in a folder, for runs and registry."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setattr(loggers, "END_WAIT", 60.0)
    # The first bar of MLflow starts a thread that never ends.
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)
    before, uri = mlflow.get_tracking_uri(), (tmp_path / "mlflow").as_uri()
    mlflow.set_tracking_uri(uri)
    # MLflow's hook of imports, which warns at each later import of a package that it knows, goes with the test.
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    mlflow.autolog(disable=True)
    yield uri
    mlflow.set_tracking_uri(before)


def _play_training(logger: MLflowLogger) -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    training = Training(torch.nn.Linear(1, 1), torch.optim.SGD([weight], lr=0.5), 0, 1)
    logger.on_fit_begin(training)
    logger.on_epoch_end(training, {"epoch": 0, "loss": 0.25})
    logger.on_fit_end(training, [])


def test_curves_parameters_data_environment_and_model_are_in_one_run(tracking: str) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 2))
    logger = MLflowLogger(tracking, "digits")
    estimator = ElasticTorchEstimator(
        model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.5), epochs=3, callbacks=[logger]
    )
    model = ElasticTorchModel(TorchPredictor(pack(net), COLUMNS), SUMMARY)
    with pytest.raises(InvalidInput, match="the MLflowLogger has no run yet"):
        log_fit(estimator, model, logger=logger)
    _play_training(logger)
    info = log_fit(estimator, model, logger=logger, registered_model_name="digits")
    run = mlflow.get_run(logger.find_run())
    assert run.info.status == "FINISHED"
    assert run.data.metrics["epoch_loss"] == 0.25
    assert run.data.params["epochs"] == "3"
    assert run.data.params["optimizer"].startswith("SGD{'lr': 0.5")
    assert "callbacks" not in run.data.params
    assert run.data.tags["version.torch"] == torch.__version__
    (data,) = run.inputs.dataset_inputs
    assert (data.dataset.name, data.dataset.digest) == (SUMMARY.data, "abcd")
    assert json.loads(mlflow.artifacts.load_text(f"{run.info.artifact_uri}/fit_report.json"))
    assert info.signature.inputs.inputs[0].shape == (-1, 4)
    loaded = mlflow.pyfunc.load_model("models:/digits/1")
    x = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    np.testing.assert_allclose(loaded.predict(x), net(torch.from_numpy(x)).detach().numpy(), rtol=1e-5)
    with pytest.raises(mlflow.exceptions.MlflowException):
        loaded.predict(np.zeros((3, 5), np.float32))


def test_a_model_is_logged_with_mlflow_2_too(tracking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def log_model(
        pytorch_model: Any,
        artifact_path: str,
        registered_model_name: str | None = None,
        signature: Any = None,
        pip_requirements: Any = None,
        **kwargs: Any,
    ) -> str:
        assert not kwargs, "which MLflow 2 hands on to torch.save"
        return artifact_path

    monkeypatch.setattr(mlflow.pytorch, "log_model", log_model)
    model = ElasticTorchModel(TorchPredictor(pack(torch.nn.Linear(4, 2)), COLUMNS), SUMMARY)
    with mlflow.start_run():
        assert log_fit(_make_estimator(), model, name="digits") == "digits"


def test_packages_of_the_layers_and_of_their_bases_are_required() -> None:
    class OwnModule(lightning.LightningModule):  # type: ignore[misc,unused-ignore]
        pass

    class OwnLayer(keras.layers.Dense):  # type: ignore[misc,unused-ignore]
        pass

    def name(requirements: list[str]) -> list[str]:
        return [each.partition("==")[0] for each in requirements]

    assert name(list_requirements(torch.nn.Linear(1, 1), True)) == ["numpy", "torch"]
    assert "lightning" in name(list_requirements(torch.nn.Sequential(OwnModule()), True))
    of_keras = list_requirements(keras.Sequential([OwnLayer(1)]), False)
    assert [each.replace("-cpu", "") for each in name(of_keras)] == ["keras", "numpy", "tensorflow"]


def _make_estimator() -> Any:
    return ElasticTorchEstimator(epochs=2)  # its parameters alone count


@pytest.mark.parametrize("kind", ["names", "keys", "one key"])
def test_a_keras_model_is_given_its_inputs_by_name_and_in_their_shapes(tracking: str, kind: str) -> None:
    image, code = keras.Input((2, 2), name="image"), keras.Input((1,), dtype="int32", name="code")
    flat = keras.layers.Flatten()(image)
    joined = keras.layers.Concatenate()([flat, keras.layers.Flatten()(keras.layers.Embedding(9, 3)(code))])
    taken: Any = {"names": [image, code], "keys": {"image": image, "code": code}, "one key": {"image": image}}
    net = keras.Model(taken[kind], keras.layers.Dense(2)(flat if kind == "one key" else joined))
    net.compile(optimizer="sgd", loss="mse")
    columns = (Column("code", "int64"), Column("image", "float64", (4,)))
    names = ["image"] if kind == "one key" else ["code", "image"]
    chosen = tuple(column for column in columns if column.name in names)
    model = ElasticKerasModel(KerasPredictor(Archive.of(net, None), chosen), SUMMARY)
    with mlflow.start_run():
        info = log_fit(_make_estimator(), model)
    shapes = {spec.name: (spec.type.name, spec.shape) for spec in info.signature.inputs.inputs}
    expected = {"image": ("float32", (-1, 2, 2)), "code": ("int32", (-1, 1))}
    assert shapes == {name: expected[name] for name in names}
    rng = np.random.default_rng(0)
    given = {
        "image": rng.normal(size=(3, 2, 2)).astype(np.float32),
        "code": rng.integers(0, 9, (3, 1), np.int32),
    }
    given = {name: given[name] for name in names}
    loaded = mlflow.pyfunc.load_model(info.model_uri)
    np.testing.assert_allclose(loaded.predict(given), np.asarray(net(given)), rtol=1e-5)


def test_the_loggers_run_may_be_of_another_experiment(tracking: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "0")  # which set_experiment changes
    monkeypatch.setattr(fluent, "_active_experiment_id", None)
    net, logger = torch.nn.Linear(4, 2), MLflowLogger(tracking, "digits")
    _play_training(logger)
    mine = mlflow.set_experiment("mine").experiment_id
    log_fit(_make_estimator(), ElasticTorchModel(TorchPredictor(pack(net), COLUMNS), SUMMARY), logger=logger)
    logged = mlflow.get_run(logger.find_run())
    assert logged.data.params["epochs"] == "2"
    (found,) = mlflow.search_logged_models([logged.info.experiment_id], output_format="list")
    assert found.source_run_id == logged.info.run_id
    with mlflow.start_run() as run:
        assert run.info.experiment_id == mine


def test_a_transformation_needs_a_signature_from_the_user() -> None:
    module = torch.nn.Linear(3, 1)
    packed = pack(ModuleWithTransformation(module, dict), module)
    model = ElasticTorchModel(TorchPredictor(packed, (Column("x", "object"),)), SUMMARY)
    with pytest.raises(InvalidInput, match=r"transformation_fn, .* pass signature=mlflow.models.infer"):
        make_signature(model)
