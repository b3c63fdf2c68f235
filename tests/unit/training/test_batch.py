"""A rank's part of a step, and its rows for metrics: whole, in rank order, gone once they are given up or taken."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from elastic_collectives import CollectiveError
from spark_elastic.training.batch import Arrays, LocalBatch, StepMetrics

ROWS = np.arange(30.0).reshape(10, 3)


@pytest.mark.parametrize("made", [np.asarray, torch.from_numpy])
def test_micro_batches_hold_every_row_once(made: Callable[[Any], Any]) -> None:
    share = LocalBatch(25, np.arange(10), (made(ROWS),), (made(ROWS[:, 0]),), made(ROWS[:, 1]))
    parts = list(share.micro_batches(4))
    assert [len(part) for part in parts] == [3, 3, 4]
    assert np.array_equal(np.concatenate([part.row_ids for part in parts]), share.row_ids)
    assert np.array_equal(np.concatenate([part.features[0] for part in parts]), ROWS)
    assert np.array_equal(np.concatenate([part.labels[0] for part in parts]), ROWS[:, 0])
    weights = [part.weights for part in parts if part.weights is not None]
    assert np.array_equal(np.concatenate(weights), ROWS[:, 1])
    assert {part.planned for part in parts} == {25}


@pytest.mark.parametrize("made", [np.asarray, torch.from_numpy])
def test_a_batch_has_weight_if_one_of_its_rows_has(made: Callable[[Any], Any]) -> None:
    zeros, some = made(np.zeros(3)), made(np.array([0.0, 0.5, 0.0]))
    batches = [LocalBatch(3, np.arange(3), (), (), each) for each in (zeros, some)]
    assert [each.has_weight for each in batches] == [False, True]
    assert LocalBatch(3, np.arange(3), (), (), zeros, shares=tuple(batches)).has_weight
    assert not LocalBatch(3, np.arange(3), (), (), some, on_host=((), zeros)).has_weight
    assert LocalBatch(3, np.arange(3), (), (), None).has_weight


class Recorder(StepMetrics):
    def _count_rows(self, columns: Arrays) -> None:
        self.counted = columns


def test_neither_a_broken_exchange_nor_a_discard_leaves_rows() -> None:
    def fail(data: bytes) -> list[bytes]:
        raise CollectiveError([1], "gone")

    metrics, echo = Recorder(), SimpleNamespace(allgather_bytes=lambda data: [data, data])
    for number in range(3):
        metrics.add_rows({"loss": (1.5, 3)}, [np.array([10 + number])] if number else None)
        if number == 0:
            with pytest.raises(CollectiveError):
                metrics.gather(SimpleNamespace(allgather_bytes=fail))  # type: ignore[arg-type]
        elif number == 1:
            metrics.discard()
        metrics.gather(echo)  # type: ignore[arg-type]
        metrics.commit()
        assert metrics.sums == ({"loss": (3.0, 6)} if number == 2 else {})
    assert [column.tolist() for column in metrics.counted] == [[12, 12]]
