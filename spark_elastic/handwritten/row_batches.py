"""Batches of `Rows` for `ElasticDataLoader`: read ahead by threads, as estimators read, or by torch's worker processes.

Which rows a batch has is the loader's business. `RowBatches` is what torch's worker processes see; `RowStream` belongs
to the training thread.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

from spark_elastic.data.loader import Prefetch, StepLoader
from spark_elastic.data.packing import Ragged
from spark_elastic.data.plan import DataPlan, Division, Int64s, compute_share_bounds
from spark_elastic.data.reading.row_group_cache import DEFAULT_CACHE_BYTES
from spark_elastic.data.row_handle import RowAccess, RowHandle
from spark_elastic.data.transformation import RowRandom, Transformation, transform_columns
from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.row_dataset import iter_items, to_tensors
from spark_elastic.gradients.generators import borrow_rng, seeded_rng

BYTES_AHEAD = 32 << 20  # of steps that are read ahead: with it a worker stays below 700 MB
USUAL_WORKERS = 8  # that estimators' `max_workers` must exceed to get more lanes than a loader has


def plan_rows(
    rows: RowHandle, global_batch_size: int, seed: int, shuffle: bool, drop_last: bool, lanes: int | None
) -> DataPlan:
    """The order of the rows: that of an estimator with as many lanes. lanes: None: as many as memory allows, up to
    16."""
    groups, nbytes = rows.manifest.group_rows, rows.manifest.max_decoded_group_bytes()
    memory = nbytes, DEFAULT_CACHE_BYTES
    plan = DataPlan.for_run(groups, global_batch_size, seed, USUAL_WORKERS, *memory, shuffle)
    if lanes is not None and lanes > plan.base_rows:
        raise InvalidInput(f"lanes={lanes} is more than the {plan.base_rows} rows of a step: lower it.")
    return replace(plan, lanes=lanes or plan.lanes, drop_last=drop_last)


class RowBatches:
    """Whole batches, as torch's worker processes make them: `__getitems__` gets a key, then the numbers of the rows.

    The key is the epoch, or epoch, step and virtual share in bitwise mode.
    """

    def __init__(
        self,
        rows: RowHandle,
        seed: int,
        transformation: Transformation | None,
        collate: Callable[[list[Any]], Any] | None,
        determinism: str | None,
    ) -> None:
        """collate: makes a batch of rows, each a dict; None: a batch is a dict of tensors."""
        self.rows = rows
        self._access = RowAccess(rows.store, rows.manifest)
        self._seed = seed
        self._transformation, self._collate, self._determinism = transformation, collate, determinism
        self.key_length = 3 if determinism == "bitwise" else 1

    def __len__(self) -> int:
        return self.rows.count

    def __getitems__(self, places: Sequence[int]) -> Any:
        key, numbers = places[: self.key_length], np.asarray(places[self.key_length :], np.int64)
        return self.make(key, numbers, self._access.take(numbers))

    def make(self, key: Sequence[int], numbers: Int64s, columns: Mapping[str, Any]) -> Any:
        is_bitwise = self._determinism == "bitwise"
        with seeded_rng(self._seed, *key, -1) if is_bitwise else nullcontext():  # not what the model draws
            if self._transformation is not None:
                columns = self._transform(key[0], numbers, columns)
            if self._collate is None:
                return to_tensors(columns)
            return self._collate(list(iter_items(columns)))

    def open_stream(self, plan: DataPlan) -> RowStream:
        """The steps of a plan over these rows, read ahead by threads of this process."""
        ahead = Prefetch(bytes=BYTES_AHEAD)
        return RowStream(self, StepLoader(plan, self._access.reader, self.rows.columns, ahead))

    def _transform(self, epoch: int, numbers: Int64s, columns: Mapping[str, Any]) -> dict[str, Any]:
        assert self._transformation is not None
        if self._determinism != "rows" or not len(numbers):
            random = RowRandom(self._seed, epoch, numbers)
            return transform_columns(columns, len(numbers), None, self._transformation, random)
        parts = []
        with borrow_rng() as seed:  # it may draw from the generators of the process
            for row, number in enumerate(numbers.tolist()):
                seed(self._seed, epoch, number)
                own = {name: values[row : row + 1] for name, values in columns.items()}
                random = RowRandom(self._seed, epoch, numbers[row : row + 1])
                parts.append(transform_columns(own, 1, None, self._transformation, random))
        return {name: _concatenate([part[name] for part in parts]) for name in parts[0]}


class SeededRows:
    """A map-style data set that draws the same random numbers for a row, or for a virtual share in bitwise mode,
    whichever process reads it. Takes the key that `RowBatches` takes."""

    def __init__(self, dataset: Any, seed: int, determinism: str) -> None:
        self._dataset, self._seed, self._by_share = dataset, seed, determinism == "bitwise"

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, places: list[int]) -> Any:
        if self._by_share:
            key, rows = places[:3], places[3:]
            with seeded_rng(self._seed, *key, -1):  # not what the model draws
                if hasattr(self._dataset, "__getitems__"):
                    return self._dataset.__getitems__(rows)
                return [self._dataset[row] for row in rows]
        items = []
        with borrow_rng() as seed:
            for row in places[1:]:
                seed(self._seed, places[0], row)
                items.append(self._dataset[row])
        return items


def pass_batch(batch: Any) -> Any:
    """As `collate_fn` of a data set that gives whole batches."""
    return batch


def _concatenate(parts: Sequence[Any]) -> Any:
    return Ragged.concatenate(parts) if isinstance(parts[0], Ragged) else np.concatenate(parts)


class RowStream:
    """A rank's batches from a position on; the reading goes on from epoch to epoch while the world stays."""

    def __init__(self, batches: RowBatches, loader: StepLoader) -> None:
        self._batches, self._loader = batches, loader
        weakref.finalize(self, loader.close).atexit = False  # daemon threads end with the process

    def __call__(
        self, epoch: int, first_step: int, rank: int, division: Division, shares: range
    ) -> Iterator[Any]:
        """The batches of an epoch. shares: the rank's virtual shares, each with a batch of its own; empty: a batch is
        a step."""
        total = division.cuts[-1]
        with self._loader.steps(epoch, first_step, rank, division.size, division, sys.maxsize) as steps:
            for rows in steps:
                if not shares:
                    yield self._batches.make([epoch], rows.row_ids, rows.columns)
                    continue
                start, _ = compute_share_bounds(rows.planned, total, shares[0])
                for share in shares:
                    low, high = compute_share_bounds(rows.planned, total, share)
                    part = slice(low - start, high - start)
                    columns = {name: values[part] for name, values in rows.columns.items()}
                    yield self._batches.make([epoch, rows.step, share], rows.row_ids[part], columns)
