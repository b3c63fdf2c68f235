"""What hand-written training tells of itself: its own numbers, beside the count of its commits."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import spark_elastic
from spark_elastic.errors import InvalidInput
from spark_elastic.worker.context import WorkerContext, set_context
from spark_elastic.worker.session import get_session


@pytest.fixture
def told() -> Iterator[list[Any]]:
    heard: list[Any] = []
    handle: Any = SimpleNamespace(
        persistent={}, report_metrics=heard.append, report_position=lambda position: None
    )
    world: Any = SimpleNamespace(size=3)
    set_context(WorkerContext("w", world=world, handle=handle))
    yield heard
    set_context(None)


def test_numbers_stay_beside_the_count_of_commits(told: list[Any]) -> None:
    spark_elastic.report(loss=np.float32(0.5), epoch=2)
    session = get_session()
    assert session is not None
    session.report_commit(7)
    spark_elastic.report(loss=0.25)
    assert told == [
        {"loss": 0.5, "epoch": 2, "world": 3},
        {"loss": 0.5, "epoch": 2, "world": 3, "step": 7},
        {"loss": 0.25, "epoch": 2, "world": 3, "step": 7},
    ]


@pytest.mark.parametrize(
    ("given", "says"),
    [({"loss": "low"}, "loss is a str and no number"), ({"steps": 3}, "counts steps itself")],
)
def test_what_is_no_number_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        spark_elastic.report(**given)


def test_elsewhere_it_does_nothing() -> None:
    spark_elastic.report(loss=0.5)
