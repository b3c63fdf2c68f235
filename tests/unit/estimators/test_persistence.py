"""A module taken apart and put together again is the same module, and its weights load without running code."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spark_elastic.errors import InvalidInput, StoreError
from spark_elastic.estimators import saving
from spark_elastic.estimators.saving import check_class, pack
from spark_elastic.estimators.torch_model import ElasticTorchModel
from spark_elastic.estimators.transformer import FitSummary, ModelReader


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


class Reader(ModelReader):
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
    session = SimpleNamespace(
        read=SimpleNamespace(parquet=lambda path: SimpleNamespace(collect=lambda: rows))
    )
    monkeypatch.setattr(Reader, "sparkSession", session)
    monkeypatch.setattr(saving, "find_metadata_session", lambda session: None)
    read = SimpleNamespace(loadMetadata=lambda path, scope: METADATA)
    monkeypatch.setattr(saving, "DefaultParamsReader", read)
    with pytest.raises(
        StoreError, match=f"^there cannot be loaded as ElasticTorchModel, .*{says}: give the whole"
    ):
        Reader(ElasticTorchModel).load("there")


def test_what_another_class_saved_is_named_with_the_class_that_loads_it() -> None:
    for found in (
        "spark_elastic.estimators.keras_model.ElasticKerasModel",
        "pyspark.ml.pipeline.PipelineModel",
    ):
        name = found.rpartition(".")[2]
        with pytest.raises(InvalidInput, match=f"^{name} saved what is at there, .* call {name}.load"):
            check_class(found, "there", ElasticTorchModel)
    for known in ("spark_elastic.estimators.torch_estimator.ElasticTorchModel", "users.module.OwnModel"):
        check_class(known, "there", ElasticTorchModel)
