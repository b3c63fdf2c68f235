"""What a run of the estimator is bound to (R19), and what it came to: two documents beside its checkpoints.

    runs/RUN/run.json       written once, when the rows are there; a fit that goes on with the run must agree with it
    runs/RUN/result.json    written at the end; a fit of a finished run returns its model

Pure values but for load and save.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from spark_elastic.data.manifest import Manifest
from spark_elastic.data.plan import DataPlan
from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidInput, StoreError
from spark_elastic.estimators.validation import FitRequest
from spark_elastic.training.checkpointing import WEIGHTS

log = logging.getLogger("spark_elastic")

FORMAT = 3  # of run.json

Planned = tuple[Manifest, DataPlan]


@dataclass(frozen=True)
class RunRecord:
    """data: where the rows are, "" for the store's root. manifest: the document itself, and its hash.

    The global batch and the lanes stay what they were, whatever the number of workers is when the run goes on.
    """

    data: str
    manifest: str
    manifest_hash: str
    global_batch: int
    lanes: int
    settings: Mapping[str, Any]
    validation: Mapping[str, Any] | None = None  # manifest, global_batch and lanes of the rows that validate
    objects: Mapping[str, str] = field(default_factory=dict)
    format: int = 1

    @classmethod
    def create(cls, request: FitRequest, data: str, rows: Planned, validation: Planned | None) -> RunRecord:
        manifest, plan = rows
        seen = (
            None
            if validation is None
            else {
                "manifest": validation[0].to_json(),
                "global_batch": validation[1].global_batch,
                "lanes": validation[1].lanes,
            }
        )
        hashed = manifest.to_json(), manifest.hash
        brought = request.brought.identity()
        return cls(data, *hashed, plan.global_batch, plan.lanes, _bound(request), seen, brought, FORMAT)

    @classmethod
    def load(cls, store: Store, run_id: str) -> RunRecord | None:
        """The run's record, or None while the run has none. Raises StoreError for a record of another format."""
        name = f"runs/{run_id}/run.json"
        if not store.exists(name):
            return None
        fields = _read(store, name)
        found = fields.get("format", 1)
        if found != FORMAT:
            raise StoreError(
                f"{name} in the store {store.url} has format {found}, and this release reads {FORMAT}: continue the "
                "run with the release that began it."
            )
        return cls(**fields)

    def save(self, store: Store, run_id: str) -> None:
        store.write_bytes(f"runs/{run_id}/run.json", json.dumps(asdict(self)).encode())

    def check(self, request: FitRequest, run_id: str) -> None:
        """Raises InvalidInput with the first setting, or thing of the user's, that is another one."""
        for name, value in _bound(request).items():
            before = self.settings.get(name, value)  # a setting that came after the run
            if before != value:
                raise InvalidInput(
                    f"run_id {run_id!r} was begun with {name}={before!r} and this fit has {value!r}: "
                    "go on with the same, or use another run_id."
                )
        now = request.brought.identity() if self.objects else {}
        different = [name for name, before in self.objects.items() if now.get(name) != before]
        if different == [WEIGHTS]:
            log.warning("run %s goes on with its own weights: this fit's model begins with others", run_id)
        elif different:
            raise InvalidInput(
                f"run_id {run_id!r} was begun with another {different[0]} than this fit's: go on with the same, or use "
                "another run_id."
            )

    def load_manifest(self) -> Manifest:
        """Raises StoreError where the document was altered."""
        manifest = Manifest.from_json(self.manifest)
        if manifest.hash != self.manifest_hash:
            raise StoreError("The run's manifest is not the one that it was begun with: it was altered.")
        return manifest

    def build_plan(self, manifest: Manifest) -> DataPlan:
        return DataPlan(
            manifest.group_rows,
            self.global_batch,
            self.settings["seed"],
            self.lanes,
            self.settings["shuffle"],
        )

    def count_initial_workers(self, request: FitRequest) -> int:
        """`num_workers` of the fit that began the run, which a later one need not repeat."""
        return self.global_batch // (request.batch_size * request.backward_passes_per_step)

    def load_validation(self) -> Planned | None:
        """The rows that validate, in the order of the table."""
        if self.validation is None:
            return None
        manifest = Manifest.from_json(self.validation["manifest"])
        batch, lanes = self.validation["global_batch"], self.validation["lanes"]
        return manifest, DataPlan(manifest.group_rows, batch, self.settings["seed"], lanes, shuffle=False)


@dataclass(frozen=True)
class RunResult:
    """The end of a run. model: name of its weights in the store."""

    model: str
    sha256: str
    digest: str
    epochs: int
    history: list[dict[str, Any]]
    data_rows: int

    @classmethod
    def load(cls, store: Store, run_id: str) -> RunResult | None:
        """None where the run has not ended."""
        name = f"runs/{run_id}/result.json"
        return cls(**_read(store, name)) if store.exists(name) else None

    def save(self, store: Store, run_id: str) -> None:
        store.write_bytes(f"runs/{run_id}/result.json", json.dumps(asdict(self)).encode())


def _bound(request: FitRequest) -> dict[str, Any]:
    return {
        "feature_cols": list(request.feature_cols),
        "label_cols": list(request.label_cols),
        "sample_weight_col": request.sample_weight_col,
        "batch_size": request.batch_size,
        "backward_passes_per_step": request.backward_passes_per_step,
        "scale_lr": request.scale_lr,
        "validation": request.validation,
        "seed": request.seed,
        "shuffle": request.shuffle,
        "learning_rate": request.learning_rate,
        "gradient_clip_norm": request.gradient_clip_norm,
        "gradient_clip_value": request.gradient_clip_value,
        "precision": request.precision,
        "gradient_compression": request.gradient_compression,
        "input_shapes": _lists(request.input_shapes),
        "label_shapes": _lists(request.label_shapes),
    }


def _lists(shapes: tuple[tuple[int, ...], ...] | None) -> list[list[int]] | None:
    """As JSON gives them back."""
    return None if shapes is None else [list(shape) for shape in shapes]


def _read(store: Store, name: str) -> dict[str, Any]:
    try:
        fields: dict[str, Any] = json.loads(store.read_bytes(name))
    except ValueError as error:
        raise StoreError(f"{name} in the store {store.url} is damaged: {error}") from error
    return fields
