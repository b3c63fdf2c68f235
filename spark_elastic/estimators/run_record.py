"""Two documents of a run in the store: its record, which binds later fits (R19, resuming a run), and its result.

    runs/RUN/run.json       written once, after the rows; a fit that resumes the run must agree with it
    runs/RUN/result.json    written at the end; a fit of a finished run returns its model

Both are values; only `load` and `save` use the store.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from operator import itemgetter
from typing import Any

from spark_elastic.data.manifest import Manifest
from spark_elastic.data.plan import DataPlan, count_affordable_lanes
from spark_elastic.data.reading.row_group_cache import DEFAULT_CACHE_BYTES
from spark_elastic.data.store import Store, parse_document
from spark_elastic.errors import InvalidInput, StoreError
from spark_elastic.estimators.validation import FitRequest
from spark_elastic.rendezvous import codec
from spark_elastic.training.identity import WEIGHTS

log = logging.getLogger("spark_elastic")

FORMAT = 4  # of run.json


@dataclass(frozen=True)
class RunRecord:
    """Everything that stays the same when a run is resumed, whatever the number of workers then is."""

    # Where the rows are: a folder of the store ("": its root), or the url of existing files, or those of two tables.
    data: str
    manifest: str  # the manifest of the rows that are trained on, as JSON
    manifest_hash: str  # its `Manifest.hash`; `load_manifest` compares it
    global_batch: int  # rows of one step
    lanes: int  # streams that an epoch is cut into
    settings: Mapping[str, Any]  # the parameters that must stay the same
    # manifest, global_batch and lanes of the rows that are validated with; None: there are none.
    validation: Mapping[str, Any] | None
    objects: Mapping[str, str]  # digests of the user's objects, by the names that an error has for them
    format: int = FORMAT  # of this record; a release reads its own alone

    @classmethod
    def create(
        cls, request: FitRequest[Any], data: str, rows: Manifest, validation: Manifest | None
    ) -> RunRecord:
        """The record of a new run on these rows, which are in `data`."""
        config = request.config
        plan, seen = plan_rows(request, rows, config.global_batch, config.data.shuffle), None
        if validation is not None:
            batch = config.data.validation_batch * config.world.num_workers
            order = plan_rows(request, validation, batch, shuffle=False)
            seen = {
                "manifest": validation.to_json(),
                "global_batch": order.global_batch,
                "lanes": order.lanes,
            }
        return cls(
            data=data,
            manifest=rows.to_json(),
            manifest_hash=rows.hash,
            global_batch=plan.global_batch,
            lanes=plan.lanes,
            settings=config.list_run_settings(),
            validation=seen,
            objects=request.objects.identity(),
        )

    @property
    def is_on_files(self) -> bool:
        """Whether the rows are those of files that were there before the run."""
        return "://" in self.data

    @classmethod
    def load(cls, store: Store, run_id: str) -> RunRecord | None:
        """The run's record, or None while the run has none. Raises StoreError for one of another format, or damaged."""
        name = f"runs/{run_id}/run.json"
        if not store.exists(name):
            return None

        def read(fields: Any) -> RunRecord:
            found = fields.get("format", 1)
            if found != FORMAT:
                raise StoreError(
                    f"{name} in the store {store.url} has format {found}, and this release reads {FORMAT}: continue "
                    "the run with the release that began it."
                )
            record: RunRecord = codec.read(cls, fields)
            itemgetter("shuffle", "seed", "batch_size", "backward_passes_per_step")(record.settings)
            if record.validation is not None:
                itemgetter("manifest", "global_batch", "lanes")(record.validation)
            return record

        return parse_document(store.read_bytes(name), f"{name} in the store {store.url}", read)

    def save(self, store: Store, run_id: str) -> None:
        store.write_bytes(f"runs/{run_id}/run.json", json.dumps(asdict(self)).encode())

    def check(self, request: FitRequest[Any], run_id: str) -> None:
        """Raises InvalidInput with the first setting, or object of the user's, that differs."""
        for name, value in request.config.list_run_settings().items():
            before = self.settings.get(name, value)  # a parameter may be newer than the run
            if before != value:
                raise InvalidInput(
                    f"run_id {run_id!r} began with {name}={before!r} and this fit has {value!r}: "
                    "continue with the same, or use another run_id."
                )
        now = request.objects.identity() if self.objects else {}
        different = [name for name, before in self.objects.items() if now.get(name) != before]
        if different == [WEIGHTS]:
            log.warning("run %s keeps its own weights: this fit's model begins with others", run_id)
        elif different:
            raise InvalidInput(
                f"run_id {run_id!r} began with another {different[0]} than this fit's: continue with the same, or use "
                "another run_id."
            )

    def load_manifest(self) -> Manifest:
        """The manifest of the rows that are trained on. Raises StoreError if the document was altered."""
        manifest = Manifest.from_json(self.manifest)
        if manifest.hash != self.manifest_hash:
            raise StoreError("The run's manifest is not the one that it began with: it was altered.")
        return manifest

    def build_plan(self, manifest: Manifest) -> DataPlan:
        """The order of the rows that are trained on."""
        return self._plan_rows(manifest, self.global_batch, self.lanes, self.settings["shuffle"])

    def load_validation(self) -> tuple[Manifest, DataPlan] | None:
        """The validation rows and their plan; None: there are none."""
        if self.validation is None:
            return None
        manifest = Manifest.from_json(self.validation["manifest"])
        batch, lanes = self.validation["global_batch"], self.validation["lanes"]
        return manifest, self._plan_rows(manifest, batch, lanes, shuffle=False)

    def _plan_rows(self, manifest: Manifest, global_batch: int, lanes: int, shuffle: bool) -> DataPlan:
        settings = self.settings
        shares = settings.get("virtual_shares", 0) if settings.get("determinism") else 0
        return DataPlan(manifest.group_rows, global_batch, settings["seed"], lanes, shuffle, shares)

    def count_initial_workers(self) -> int:
        """`num_workers` of the fit that began the run; a later fit may have another number."""
        rows: int = self.settings["batch_size"] * self.settings["backward_passes_per_step"]
        return self.global_batch // rows


def plan_rows(request: FitRequest[Any], manifest: Manifest, global_batch: int, shuffle: bool) -> DataPlan:
    """The order of a new run's rows."""
    decoded = manifest.max_decoded_group_bytes()
    config = request.config
    plan = DataPlan.for_run(
        manifest.group_rows,
        global_batch,
        config.data.seed,
        config.world.max_workers,
        decoded,
        DEFAULT_CACHE_BYTES,
        shuffle,
    )
    lanes = plan.lanes
    if config.data.lanes is not None:
        lanes = min(config.data.lanes, plan.base_rows, count_affordable_lanes(decoded, DEFAULT_CACHE_BYTES))
    return replace(plan, lanes=lanes, shares=config.exchange.shares)


@dataclass(frozen=True)
class RunResult:
    """The result of a finished run."""

    model: str  # name of the trained weights in the store
    sha256: str  # SHA-256 of that object
    digest: str  # checksum of weights and optimizer, equal on all replicas
    epochs: int  # that the run was to have; callbacks may have ended it sooner
    history: list[dict[str, Any]]  # one dict for each epoch
    data_rows: int  # rows of the training table

    @classmethod
    def load(cls, store: Store, run_id: str) -> RunResult | None:
        """None while the run has not ended."""
        name = f"runs/{run_id}/result.json"
        if not store.exists(name):
            return None
        name_there = f"{name} in the store {store.url}"
        return parse_document(store.read_bytes(name), name_there, lambda fields: codec.read(cls, fields))

    def save(self, store: Store, run_id: str) -> None:
        store.write_bytes(f"runs/{run_id}/result.json", json.dumps(asdict(self)).encode())
