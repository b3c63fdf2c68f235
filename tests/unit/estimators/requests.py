"""What a fit is asked for: parameters as they come, and a request that has been checked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from spark_elastic.estimators.torch_estimator import ElasticTorchEstimator
from spark_elastic.estimators.validation import FitRequest
from tests.fit_configs import make_config


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
    names = {name for part in vars(make_config()).values() for name in vars(part)}
    given = {"batch_size": 4, "num_workers": 2, "seed": 1} | values
    config = make_config(**{name: value for name, value in given.items() if name in names})
    others = {name: value for name, value in values.items() if name not in names}
    blank = {"objects": SimpleNamespace(transformation=None, identity=dict)}
    return FitRequest(config=config, **(blank | others))
