"""What training leaves of a model, and the model that is made of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("pyspark")

from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.torch_estimator import load_trained_module
from spark_elastic.estimators.torch_objects import check_torch_objects
from spark_elastic.training.torch.state import TorchTrainingState
from spark_elastic.training.torch.trainer import TorchTrainer
from tests.unit.estimators.requests import values


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
    assert {n: b.tolist() for n, b in found.named_buffers()} == {
        n: b.tolist() for n, b in left.named_buffers()
    }
    assert found.state_dict().keys() == left.state_dict().keys()
    assert (found.temperature, found.layer.weight.requires_grad, found.training) == (0.5, False, False)


def test_a_state_dict_that_no_weights_file_can_hold_is_refused_before_any_spark_job() -> None:
    with pytest.raises(
        InvalidInput, match="cannot hold the Linear of the model, at '_extra_state', at 'mean'"
    ):
        check_torch_objects(values(model=NetWithMean(torch.nn.Linear(1, 1))))
