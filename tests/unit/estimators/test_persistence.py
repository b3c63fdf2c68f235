"""A module taken apart and put together again is the same module, and its weights load without running code."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from spark_elastic.errors import InvalidInput, StoreError
from spark_elastic.estimators import saving
from spark_elastic.estimators.saving import check_class, pack
from spark_elastic.estimators.torch_estimator import ElasticTorchEstimator, load_trained_module
from spark_elastic.estimators.torch_model import ElasticTorchModel
from spark_elastic.estimators.torch_objects import check_torch_objects
from spark_elastic.estimators.transformer import FitSummary
from spark_elastic.training.torch.state import TorchTrainingState
from spark_elastic.training.torch.trainer import TorchTrainer
from tests.unit.estimators.requests import values


class HardToSaveNet(torch.nn.Module):
    """What makes saving hard: tied weights, a hidden buffer, a view as attribute, a lambda, a class of a test."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 3)
        self.second = torch.nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        self.norm = torch.nn.BatchNorm1d(3)
        self.register_buffer("hidden", torch.full((3,), 2.0), persistent=False)
        self.offset = torch.arange(1000.0)[:3]
        self.scale = lambda x: x * self.hidden + self.offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale(self.norm(self.second(self.first(x))))


def test_a_module_comes_back_whole_and_stays_as_it_is() -> None:
    model = HardToSaveNet().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    back = pack(model).unpack()
    x = torch.randn(5, 3)
    assert torch.equal(back(x), model(x))
    assert list(back.state_dict()) == list(model.state_dict())
    assert [p.requires_grad for p in back.parameters()] == [p.requires_grad for p in model.parameters()]
    assert back.second.weight is back.first.weight
    with torch.no_grad():
        back.first.weight.zero_()
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


def test_weights_are_apart_and_readable_by_name_without_running_code() -> None:
    model = HardToSaveNet()
    packed = pack(model)
    weights = torch.load(io.BytesIO(packed.weights), weights_only=True)
    assert torch.equal(weights["first.weight"], model.first.weight)
    assert torch.equal(weights["hidden"], model.hidden)
    assert len(packed.weights) < 1000 * 4 + 8_000, "a view took its storage along"
    assert len(pack(torch.nn.Linear(1000, 1000)).architecture) < 10_000


class NetWithMean(torch.nn.Module):
    """Keeps beside its weights what is no tensor."""

    def __init__(self, mean: Any) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.mean = mean

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x - torch.from_numpy(self.mean))

    def get_extra_state(self) -> Any:
        return {"mean": self.mean}

    def set_extra_state(self, state: Any) -> None:
        self.mean = state["mean"]


def test_a_model_is_returned_as_training_left_it() -> None:
    """With attributes that are no tensors, and with buffers that a forward pass has registered or grown."""
    left = NetWithMean(np.array([1.0, 2.0], np.float32))
    learner: Any = object.__new__(TorchTrainer)
    learner.state = TorchTrainingState(left, torch.optim.SGD(left.parameters(), lr=0.1))
    left.layer.register_buffer("positions", torch.arange(3.0))
    left.register_buffer("cache", torch.ones(2, 2), persistent=False)
    left.layer.requires_grad_(False)
    left.temperature = 0.5  # type: ignore[assignment]
    objects = check_torch_objects(values(model=NetWithMean(np.zeros(2, np.float32))))
    found, x = load_trained_module(objects.model, learner.export_weights()), torch.rand(3, 2)
    assert torch.equal(found(x), left(x))
    theirs = {name: buffer.tolist() for name, buffer in left.named_buffers()}
    assert {name: buffer.tolist() for name, buffer in found.named_buffers()} == theirs
    assert found.state_dict().keys() == left.state_dict().keys()
    assert (found.temperature, found.layer.weight.requires_grad, found.training) == (0.5, False, False)


def test_a_state_dict_that_no_weights_file_can_hold_is_refused_before_any_spark_job() -> None:
    with pytest.raises(InvalidInput, match="cannot hold the Linear of the model, at '_extra_state', at 'me"):
        check_torch_objects(values(model=NetWithMean(torch.nn.Linear(1, 1))))


class Reader(saving.Reader):
    """Without a session."""

    sparkSession = None  # type: ignore[assignment]


METADATA = {
    "format": saving.FORMAT,
    "shapes": None,
    "class": "spark_elastic.estimators.torch_model.ElasticTorchModel",
    "uid": "one",
    "columns": [],
    "summary": FitSummary().to_json(),
    "paramMap": {},
    "defaultParamMap": {},
}


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([], "missing 2 required positional arguments: 'architecture' and 'weights'"),
        ([("architecture", 0)], "missing 1 required positional argument: 'weights'"),
        ([("architecture", 0), ("weights", 0), ("weights", 2)], "piece 1 of 'weights' is missing"),
    ],
)
def test_an_incomplete_copy_is_named_with_what_it_lacks(parts: Any, says: str, monkeypatch: Any) -> None:
    rows = [SimpleNamespace(part=part, number=number, content=b"") for part, number in parts]
    table = SimpleNamespace(collect=lambda: rows)
    session = SimpleNamespace(read=SimpleNamespace(parquet=lambda path: table))
    monkeypatch.setattr(Reader, "sparkSession", session)
    monkeypatch.setattr(saving, "find_metadata_session", lambda session: None)
    read = SimpleNamespace(loadMetadata=lambda path, scope: METADATA)
    monkeypatch.setattr(saving, "DefaultParamsReader", read)
    with pytest.raises(StoreError, match=f"^there cannot be loaded as ElasticTorchModel, .*{says}: give"):
        Reader(ElasticTorchModel).load("there")


@pytest.mark.parametrize("kind", [ElasticTorchEstimator, ElasticTorchModel])
def test_what_is_saved_has_a_reader(kind: Any) -> None:
    """And not that of Spark ML's mixin, which is a base, too, and has none."""
    assert isinstance(kind.read(), saving.Reader)


def test_what_another_class_saved_is_named_with_the_class_that_loads_it() -> None:
    keras_model = "spark_elastic.estimators.keras_model.ElasticKerasModel"
    for found in keras_model, "pyspark.ml.pipeline.PipelineModel":
        name = found.rpartition(".")[2]
        with pytest.raises(InvalidInput, match=f"^{name} saved what is at there, .* call {name}.load"):
            check_class(found, "there", ElasticTorchModel)
    for known in ("spark_elastic.estimators.torch_estimator.ElasticTorchModel", "users.module.OwnModel"):
        check_class(known, "there", ElasticTorchModel)
