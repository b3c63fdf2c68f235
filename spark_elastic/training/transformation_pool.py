"""Applies the user's `transformation_fn` to the steps of a stream, in processes or threads ahead of the training.

The main thread uses a pool; its workers see rows alone, so results do not depend on them.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import cloudpickle

from elastic_collectives import Group
from spark_elastic.data.loader import StepRows, StepStream
from spark_elastic.data.plan import DataPlan, compute_share_bounds
from spark_elastic.data.reading.decoding import ColumnArrays
from spark_elastic.data.transformation import BatchTransformation, RowBatch, Transformation
from spark_elastic.training.spec import FitConfig
from spark_elastic.training.transformation_process import TransformationProcess

STEPS_AHEAD = 2  # steps that are transformed or ready, per worker of the pool; as torch's prefetch_factor


class PendingStep:
    def __init__(
        self, rows: StepRows, transform: Callable[[], ColumnArrays] | Future[ColumnArrays] | None
    ) -> None:
        """rows: as they are stored. transform: a function that does it here, or the future of a worker of the pool;
        None: they stay as they are."""
        self.rows, self._transform = rows, transform
        self._finished = rows if transform is None else None

    def is_ready(self) -> bool:
        return not isinstance(self._transform, Future) or self._transform.done()

    def finish(self) -> StepRows:
        """The rows as model and loss take them. Raises what the user's function raised, which may take any time."""
        if self._finished is None:
            transform = self._transform
            assert transform is not None
            columns = transform.result() if isinstance(transform, Future) else transform()
            self._finished = replace(self.rows, columns=columns)
        return self._finished

    def cancel(self) -> None:
        if isinstance(self._transform, Future):
            self._transform.cancel()


class PendingSteps:
    """The steps of a stream, in order, of which a few are transformed ahead. A context that drops those at its end."""

    def __init__(self, steps: StepStream, begin: Callable[[StepRows], PendingStep], most: int) -> None:
        """begin: begins to transform the rows of a step. most: steps that are transformed ahead, or ready."""
        self._steps, self._begin, self._most = steps, begin, most
        self._coming: deque[PendingStep] = deque()
        self._has_more = True  # whether the stream has more steps

    def __enter__(self) -> PendingSteps:
        return self

    __iter__ = __enter__

    def __exit__(self, *error: object) -> None:
        for step in self._coming:
            step.cancel()

    def __next__(self) -> PendingStep:
        if not self._coming:
            self._take()
        # Beyond the next step only those that are there are taken: none waits for the rows of a later one.
        while self._has_more and len(self._coming) < self._most and self._steps.is_ready():
            self._take()
        if not self._coming:
            raise StopIteration
        return self._coming.popleft()

    def get_next_rows(self) -> StepRows | None:
        """The rows of the next step, which stays the next; None: not there yet. Raises what the function raised."""
        if not self._coming and self._has_more and self._steps.is_ready():
            self._take()
        return self._coming[0].finish() if self._coming and self._coming[0].is_ready() else None

    def _take(self) -> None:
        rows = next(self._steps, None) if self._has_more else None
        if rows is None:
            self._has_more = False
        else:
            self._coming.append(self._begin(rows))


class TransformationPool:
    """The workers that apply one transformation, for all epochs and worlds of a training process."""

    def __init__(self, transformation: BatchTransformation | None, workers: int, kind: str) -> None:
        """transformation: None: the rows stay as they are. workers, kind: see `TransformationConfig`."""
        self._transformation, self._kind = transformation, kind
        self._workers = workers if transformation is not None else 0
        self._executor: ThreadPoolExecutor | None = None
        self._processes: list[TransformationProcess] = []
        self._free: queue.SimpleQueue[TransformationProcess] = queue.SimpleQueue()  # that no thread uses

    def start(self) -> None:
        """Start the workers; does not wait until the processes have imported what they need."""
        if not self._workers:
            return
        if self._kind == "process":
            pickled = cloudpickle.dumps(self._transformation)
            self._processes = [TransformationProcess.spawn(pickled) for _ in range(self._workers)]
            for process in self._processes:
                self._free.put(process)
        self._executor = ThreadPoolExecutor(self._workers, "transformation")

    def transform(self, steps: StepStream, plan: DataPlan, group: Group, augments: bool) -> PendingSteps:
        """The steps of a stream, in order. augments: whether the function gets random numbers for the rows."""

        def begin(rows: StepRows) -> PendingStep:
            return self._begin(rows, cut_at_shares(plan, rows, group), augments)

        return PendingSteps(steps, begin, STEPS_AHEAD * self._workers)

    def close(self) -> None:
        """End the workers. A thread that still runs the user's function ends when that returns."""
        for process in self._processes:
            process.close()
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)

    def _begin(self, rows: StepRows, cuts: tuple[int, ...], augments: bool) -> PendingStep:
        if self._transformation is None:
            return PendingStep(rows, None)
        batch = RowBatch(rows.columns, rows.row_ids, rows.epoch, cuts, augments)
        if self._executor is None:
            return PendingStep(rows, partial(self._transformation.apply, batch))
        apply = self._apply_in_process if self._processes else self._transformation.apply
        return PendingStep(rows, self._executor.submit(apply, batch))

    def _apply_in_process(self, batch: RowBatch) -> ColumnArrays:
        process = self._free.get()  # there are as many as threads
        try:
            return process.apply(batch)
        finally:
            self._free.put(process)


def bind_transformation(
    config: FitConfig, function: Transformation | None, shapes_nothing: bool = False
) -> BatchTransformation | None:
    """The transformation with all that it needs of the fit; None: there is none."""
    wanted = tuple(dict.fromkeys(config.data.used_cols))
    seed = config.data.seed
    return None if function is None else BatchTransformation(function, wanted, seed, shapes_nothing)


def cut_at_shares(plan: DataPlan, rows: StepRows, group: Group) -> tuple[int, ...]:
    """Where a rank's rows are cut for the transformation: in bitwise mode into its virtual shares, since a function of
    other rows may give other bits; else nowhere."""
    if not plan.shares:
        return ()
    first, past = rows.division.get_rank_parts(group.rank)
    bounds = [compute_share_bounds(rows.planned, plan.shares, share)[0] for share in range(first, past)]
    return (*(bound - bounds[0] for bound in bounds), len(rows))
