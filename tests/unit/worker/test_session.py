"""Numbers that hand-written training reports, and the resources of its slot."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import spark_elastic
from spark_elastic.errors import InvalidInput
from spark_elastic.handwritten.object_state import get_session
from spark_elastic.worker.context import WorkerContext, set_context


@pytest.fixture
def told() -> Iterator[list[Any]]:
    heard: list[Any] = []
    handle: Any = SimpleNamespace(
        process_values={}, report_metrics=heard.append, report_position=lambda position: None
    )
    world: Any = SimpleNamespace(size=3)
    set_context(WorkerContext("w", world=world, handle=handle))
    yield heard
    set_context(None)


def test_reported_numbers_stay_when_a_commit_is_reported(told: list[Any]) -> None:
    spark_elastic.report(loss=np.float32(0.5), epoch=2, converged=True)
    session = get_session()
    assert session is not None
    session.report_commit(7)
    spark_elastic.report(loss=0.25)
    assert told == [
        {"loss": 0.5, "epoch": 2, "converged": 1.0, "world": 3},
        {"loss": 0.5, "epoch": 2, "converged": 1.0, "world": 3, "step": 7},
        {"loss": 0.25, "epoch": 2, "converged": 1.0, "world": 3, "step": 7},
    ]
    assert type(told[0]["converged"]) is float, "JSON's true is no number for the status page"
    session.checkpointer = SimpleNamespace(stall_seconds=0.5)  # type: ignore[assignment]
    spark_elastic.report(
        loss=torch.tensor(0.5, requires_grad=True)
    )  # a warning of its graph would be an error
    session.report_commit(8)
    assert told[-1] == {
        "loss": 0.5,
        "epoch": 2,
        "converged": 1.0,
        "world": 3,
        "step": 8,
        "checkpoint_seconds": 0.5,
    }


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"loss": "low"}, "loss is a str and no number"),
        ({"steps": 3}, "counts steps itself"),
        ({"epoch": float("nan")}, "takes a finite epoch, not nan"),
        ({"epoch": np.float32("-inf")}, "takes a finite epoch, not -inf"),
    ],
)
def test_report_refuses_what_is_no_number_and_reserved_names(given: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        spark_elastic.report(**given)


def test_a_process_that_is_no_worker_reports_nothing_and_has_no_resources(told: list[Any]) -> None:
    set_context(None)
    spark_elastic.report(loss=0.5)
    assert (told, spark_elastic.task_resources()) == ([], {})
    set_context(WorkerContext("w", resources={"gpu": ("2",)}))
    assert spark_elastic.task_resources() == {"gpu": ("2",)}
