"""An estimator that a release of format 1 saved (`estimator_format_1.json`: its metadata and parts) loads as it was."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("pyspark")

from spark_elastic.errors import InvalidInput
from spark_elastic.estimators import saving
from spark_elastic.estimators.elastic_estimator import EstimatorReader
from spark_elastic.estimators.torch_estimator import ElasticTorchEstimator
from spark_elastic.estimators.torch_objects import check_torch_objects
from spark_elastic.estimators.validation import build_request


class Reader(EstimatorReader):
    """Without a session."""

    sparkSession = None  # type: ignore[assignment]


def test_an_estimator_of_format_1_loads(monkeypatch: Any) -> None:
    kept = json.loads((Path(__file__).parent / "estimator_format_1.json").read_text())
    parts = {name: base64.b64decode("".join(lines)) for name, lines in kept["parts"].items()}
    read = SimpleNamespace(loadMetadata=lambda path, scope: kept["metadata"])
    monkeypatch.setattr(saving, "DefaultParamsReader", read)
    monkeypatch.setattr(saving, "find_metadata_session", lambda session: None)
    monkeypatch.setattr(saving, "read", lambda session, path: parts)
    back: Any = Reader(ElasticTorchEstimator).load("there")
    assert back.uid == "ElasticTorchEstimator_cfe04cac5874"
    assert (back.getFeatureCols(), back.getPredictionCol(), back.getBatchSize()) == (["x"], "guess", 16)
    wanted = build_request(back._values, check_torch_objects)
    config = wanted.config
    assert (config.data.epochs, config.world.num_workers, config.world.max_workers, config.data.seed) == (
        3,
        2,
        4,
        7,
    )
    assert (config.data.input_shapes, wanted.elastic.lease) == (((2,),), 9.0)
    model, optimizer = wanted.objects.model, wanted.objects.optimizer
    assert model(torch.tensor([[1.0, 1.0]])).item() == 1.5
    assert optimizer.param_groups[0]["params"] == list(model.parameters()), "it is bound to another model"
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]) == (0.25, 0.9)
    assert isinstance(wanted.objects.losses[0], torch.nn.MSELoss)
    assert list(wanted.objects.metrics) == ["l1loss"]
    with pytest.raises(InvalidInput, match="num_workers"):
        build_request({**back._values, "num_workers": None}, check_torch_objects)
