"""The parameters of a fit, by name, whatever component they belong to."""

from __future__ import annotations

from typing import Any

from spark_elastic.training.spec import FitConfig


def make_config(**values: Any) -> FitConfig:
    return FitConfig.from_params({"feature_cols": ("x",), "label_cols": ("y",)} | values)


def change(config: FitConfig, **values: Any) -> FitConfig:
    """The same fit with other values."""
    old = {name: value for part in vars(config).values() for name, value in vars(part).items()}
    return FitConfig.from_params(old | {"max_workers": None} | values)
