"""What a fit is asked for: parameters as they come, and a request that has been checked."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch

from spark_elastic.estimators.validation import FitRequest
from spark_elastic.training.fit_config import FitConfig


def net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))


def values(**changes: Any) -> dict[str, Any]:
    model = changes.get("model", net())
    parameters = list(model.parameters()) if isinstance(model, torch.nn.Module) else list(net().parameters())
    good: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.SGD(parameters, lr=0.1),
        "loss": torch.nn.MSELoss(),
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "sample_weight_col": None,
        "input_shapes": None,
        "learning_rate": None,
        "scale_lr": False,
        "loss_weights": None,
        "metrics": (),
        "callbacks": (),
        "train_minibatch_fn": None,
        "transformation_fn": None,
        "label_shapes": None,
        "validation": None,
        "val_batch_size": None,
        "backward_passes_per_step": 1,
        "precision": None,
        "gradient_compression": None,
        "reader": "arrow",
        "terminate_on_nan": False,
        "inmemory_cache_all": False,
        "batch_size": 8,
        "epochs": 1,
        "num_workers": 2,
        "min_workers": 1,
        "max_workers": None,
        "store": None,
        "seed": 0,
        "shuffle": True,
        "gradient_clip_norm": None,
        "gradient_clip_value": None,
        "run_id": None,
        "verbose": 1,
        "keep_data": False,
        "storage_options": None,
        "missing": "refuse",
        "materialize": "auto",
        "on_progress": None,
        "config": None,
        "settings": {},
    }
    return good | changes


def request(**values: Any) -> FitRequest[Any]:
    """A checked request. values: fields of the request or of its FitConfig."""
    fields = {field.name for field in dataclasses.fields(FitConfig)}
    given = {"feature_cols": ("x",), "label_cols": ("y",), "batch_size": 4, "num_workers": 2, "seed": 1}
    config = {name: value for name, value in (given | values).items() if name in fields}
    others = {name: value for name, value in values.items() if name not in fields}
    blank = {"objects": SimpleNamespace(transformation=None, identity=dict)}
    return FitRequest(config=FitConfig(**config), **(blank | others))
