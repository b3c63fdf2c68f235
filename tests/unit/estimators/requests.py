"""What a fit is asked for: parameters as they come, and a request that has been checked."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch

from spark_elastic.estimators.torch_estimator import ElasticTorchEstimator
from spark_elastic.estimators.validation import FitRequest
from spark_elastic.training.fit_config import FitConfig


def net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))


def values(**changes: Any) -> dict[str, Any]:
    """A fit's parameters: those without a word of the user's, of a small model, and these."""
    good: dict[str, Any] = {
        "model": net(),
        "loss": torch.nn.MSELoss(),
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 8,
        "num_workers": 2,
        "seed": 0,
        "terminate_on_nan": False,
    }
    wanted = ElasticTorchEstimator()._values | good | changes
    if "optimizer" not in changes:
        model = wanted["model"] if isinstance(wanted["model"], torch.nn.Module) else net()
        wanted["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
    return wanted


def request(**values: Any) -> FitRequest[Any]:
    """A checked request. values: fields of the request or of its FitConfig."""
    fields = {field.name for field in dataclasses.fields(FitConfig)}
    given = {"feature_cols": ("x",), "label_cols": ("y",), "batch_size": 4, "num_workers": 2, "seed": 1}
    config = {name: value for name, value in (given | values).items() if name in fields}
    others = {name: value for name, value in values.items() if name not in fields}
    blank = {"objects": SimpleNamespace(transformation=None, identity=dict)}
    return FitRequest(config=FitConfig(**config), **(blank | others))
