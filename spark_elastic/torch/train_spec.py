"""What a training is told: settings as plain values, and what the user brings. Shipped to the workers; no thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from spark_elastic.data.decoded_groups import DEFAULT_CACHE_BYTES
from spark_elastic.data.manifest import Column, Manifest
from spark_elastic.data.plan import DataPlan
from spark_elastic.data.store import Store
from spark_elastic.state.schedule import CheckpointPolicy
from spark_elastic.torch.callbacks import Callback
from spark_elastic.torch.objective import FunctionLoss, LightningLoss, ModelLoss, ModelLosses, Objective
from spark_elastic.torch.training import Clipping

Transformation = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Rows:
    """A data set and the order of its steps."""

    data: Store
    manifest: Manifest
    plan: DataPlan


@dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """Everything about a training but the user's objects.

    data, store: where the rows lie and where results go; the final model is written to `result`, a name in `store`.
    checkpoints: when and for which run, None for no checkpoints. validation: rows that are looked at behind each epoch.
    features: as the model sees them. label_shapes: of one row, None as they are stored. batch_size: most rows of one
    forward pass. precision, wire: None, "bf16" or "fp16", of forward passes and of gradients on their way. ledger:
    folder, None for no ledger. reader: one of `data.readers`. cache_bytes: of decoded rows.
    """

    data: Store
    manifest: Manifest
    plan: DataPlan
    store: Store
    result: str
    features: tuple[Column, ...]
    labels: tuple[str, ...]
    weight: str | None
    batch_size: int
    epochs: int
    seed: int
    clipping: Clipping
    label_shapes: tuple[tuple[int, ...], ...] | None = None
    validation: Rows | None = None
    val_batch_size: int | None = None
    learning_rate: float | None = None
    precision: str | None = None
    wire: str | None = None
    terminate_on_nan: bool = False
    ledger: str | None = None
    checkpoints: CheckpointPolicy | None = None
    reader: str = "arrow"
    cache_bytes: int = DEFAULT_CACHE_BYTES

    @property
    def rows(self) -> Rows:
        """What is trained on."""
        return Rows(self.data, self.manifest, self.plan)


@dataclass(frozen=True)
class Brought:
    """What the user brings.

    optimizer: over the model's parameters (pickled together with it), a function that makes one, or None with a
    LightningModule. losses: one of (output, *labels), or one per label with `loss_weights`; () where
    `train_minibatch_fn` or the model has its own. metrics: by name. transformation: of the columns of a part, by name.
    """

    model: torch.nn.Module
    optimizer: Any
    losses: tuple[Callable[..., torch.Tensor], ...]
    loss_weights: tuple[float, ...] | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    callbacks: tuple[Callback, ...] = ()
    train_minibatch_fn: Callable[..., Any] | None = None
    transformation: Transformation | None = None

    def objective(self, spec: TrainSpec) -> Objective:
        weighted = spec.weight is not None
        if self.train_minibatch_fn is not None:
            return FunctionLoss(self.train_minibatch_fn, weighted)
        if not self.losses:
            return LightningLoss(weighted)
        if len(self.losses) == 1:
            return ModelLoss(self.losses[0], weighted, spec.precision)
        weights = self.loss_weights or (1.0 / len(self.losses),) * len(self.losses)
        pairs = zip(spec.labels, zip(self.losses, weights, strict=True), strict=True)
        return ModelLosses(dict(pairs), weighted, spec.precision)
