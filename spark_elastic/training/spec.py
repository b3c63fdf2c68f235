"""What a training is told: settings as plain values. Shipped to the workers; knows no framework; no thread."""

from __future__ import annotations

from dataclasses import dataclass

from spark_elastic.data.loader import StepLoader
from spark_elastic.data.manifest import Column, Manifest
from spark_elastic.data.plan import DataPlan
from spark_elastic.data.reading.decoded_groups import DEFAULT_CACHE_BYTES
from spark_elastic.data.reading.reader import Reader
from spark_elastic.data.reading.readers import open_reader
from spark_elastic.data.store import Store
from spark_elastic.state.schedule import CheckpointPolicy


@dataclass(frozen=True)
class Rows:
    """A data set and the order of its steps."""

    data: Store
    manifest: Manifest
    plan: DataPlan


@dataclass(frozen=True)
class Clipping:
    """norm: most that the 2-norm of all gradients may be; value: most that one element may be. None: no limit."""

    norm: float | None = None
    value: float | None = None


@dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """Everything about a training but the user's objects.

    data, store: where the rows lie and where results go; the final model is written to `result`, a name in `store`.
    checkpoints: when and for which run, None for no checkpoints. validation: rows to validate with after each
    epoch. features: as the model sees them. label_shapes: of one row, None as they are stored. batch_size: most rows
    of one forward pass. lr_times: what all rates are multiplied by at the training's begin. precision, wire: None,
    "bf16" or "fp16", of forward passes and of gradients on their way. ledger: folder, None for no ledger. reader: one
    of `data.reading.readers`. cache_bytes: of decoded rows, as far as memory goes.
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
    clipping: Clipping = Clipping()
    label_shapes: tuple[tuple[int, ...], ...] | None = None
    validation: Rows | None = None
    val_batch_size: int | None = None
    learning_rate: float | None = None
    lr_times: int = 1
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

    def opened(self, rows: Rows) -> tuple[Reader, StepLoader]:
        """Reader and loader of the columns that the training uses."""
        used = [c.name for c in self.features] + [*self.labels, *([self.weight] if self.weight else [])]
        columns = [rows.manifest.column(name) for name in dict.fromkeys(used)]
        reader = open_reader(
            self.reader, rows.data, rows.manifest, [c.name for c in columns], self.cache_bytes
        )
        return reader, StepLoader(rows.plan, reader, columns)
