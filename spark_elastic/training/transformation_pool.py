"""Applies the user's `transformation_fn` to the steps of a stream, in processes or threads ahead of the training.

Without workers the training thread calls the function itself. The main thread uses a pool; its workers see rows alone.
Which rows a step has is the plan's business, and what a row draws is `RowRandom`'s: results do not depend on the
workers.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import cloudpickle

from elastic_collectives import Group
from spark_elastic.data.loader import StepRows, StepStream
from spark_elastic.data.plan import DataPlan, share_bounds
from spark_elastic.data.reading.decoding import ColumnArrays
from spark_elastic.training.fit_config import FitConfig
from spark_elastic.training.transformation import BatchTransformation, RowBatch, Transformation
from spark_elastic.training.transformation_process import TransformationProcess

STEPS_AHEAD = 2  # steps that are transformed or ready, per worker of the pool; as torch's prefetch_factor


@dataclass(frozen=True)
class PendingStep:
    """A step whose rows may not be transformed yet."""

    # As they are stored.
    rows: StepRows
    # Returns the transformed columns. Without a deadline: the user's code may take as long as in the training thread.
    _get_columns: Callable[[], ColumnArrays]
    # The columns are not wanted any more.
    cancel: Callable[[], object] = bool

    def finish(self) -> StepRows:
        """The rows as model and loss take them. Raises what the user's function raised."""
        return replace(self.rows, columns=self._get_columns())


class TransformationPool:
    """The workers that apply one transformation, for all epochs and worlds of a training process."""

    def __init__(self, transformation: BatchTransformation | None, workers: int, kind: str) -> None:
        """
        Args:
            transformation: None if the rows stay as they are.
            workers: how many apply it; 0: the training thread does.
            kind: "process" or "thread".
        """
        self._transformation = transformation
        self._workers = workers if transformation is not None else 0
        self._kind = kind
        self._executor: ThreadPoolExecutor | None = None
        self._processes: list[TransformationProcess] = []
        # A process is in it once for each request that it can take.
        self._free: queue.SimpleQueue[TransformationProcess] = queue.SimpleQueue()

    def start(self) -> None:
        """Start the workers; does not wait until the processes have imported what they need."""
        if not self._workers:
            return
        if self._kind == "process":
            pickled = cloudpickle.dumps(self._transformation)
            self._processes = [TransformationProcess.spawn(pickled) for _ in range(self._workers)]
            for process in self._processes * STEPS_AHEAD:
                self._free.put(process)
        threads = len(self._processes) * STEPS_AHEAD or self._workers
        self._executor = ThreadPoolExecutor(threads, "transformation")

    def transform(
        self, steps: StepStream, plan: DataPlan, group: Group, augments: bool
    ) -> Iterator[PendingStep]:
        """The steps of a stream, in order.

        Args:
            plan, group: those of the stream.
            augments: whether the function gets random numbers for the rows.
        """
        coming: deque[PendingStep] = deque()
        left = True  # whether the stream has more steps
        try:
            while True:
                # Beyond the next step only those that are there are taken: none waits for the rows of a later one.
                while left and (
                    not coming or (len(coming) < STEPS_AHEAD * self._workers and steps.is_ready())
                ):
                    rows = next(steps, None)
                    if rows is None:
                        left = False
                    else:
                        coming.append(self._begin(rows, cut_at_shares(plan, rows, group), augments))
                if not coming:
                    return
                yield coming.popleft()
        finally:
            for step in coming:
                step.cancel()

    def close(self) -> None:
        """End the workers. A thread that still runs the user's function ends when that returns."""
        for process in self._processes:
            process.close()
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)

    def _begin(self, rows: StepRows, cuts: tuple[int, ...], augments: bool) -> PendingStep:
        if self._transformation is None:
            return PendingStep(rows, lambda: rows.columns)
        batch = RowBatch(rows.columns, rows.row_ids, rows.epoch, cuts, augments)
        if self._executor is None:
            return PendingStep(rows, partial(self._transformation.apply, batch))
        apply = self._apply_in_process if self._processes else self._transformation.apply
        future = self._executor.submit(apply, batch)
        return PendingStep(rows, future.result, future.cancel)

    def _apply_in_process(self, batch: RowBatch) -> ColumnArrays:
        process = self._free.get()  # it has as many entries as there are threads
        try:
            return process.apply(batch)
        finally:
            self._free.put(process)


def make_pool(config: FitConfig, transformation: Transformation | None) -> TransformationPool:
    """The pool of a fit."""
    workers, kind = config.transformation_workers, config.transformation_pool
    return TransformationPool(bind_transformation(config, transformation), workers, kind)


def bind_transformation(
    config: FitConfig, transformation: Transformation | None
) -> BatchTransformation | None:
    """The transformation with all that it needs of the fit; None: there is none."""
    wanted = tuple(dict.fromkeys(config.used_cols))
    return None if transformation is None else BatchTransformation(transformation, wanted, config.seed)


def cut_at_shares(plan: DataPlan, rows: StepRows, group: Group) -> tuple[int, ...]:
    """Where a rank's rows of a step are cut into parts for the transformation: in bitwise mode into its virtual shares,
    since a function of other rows may give other bits; else nowhere."""
    if not plan.shares:
        return ()
    first, past = rows.division.rank_parts(group.rank)
    bounds = [share_bounds(rows.planned, plan.shares, share)[0] for share in range(first, past)]
    return (*(bound - bounds[0] for bound in bounds), len(rows))
