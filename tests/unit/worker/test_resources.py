"""What Spark gave to a slot reaches the function on its worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import spark_elastic
from spark_elastic.worker.context import WorkerContext, set_context


@pytest.fixture
def worker() -> Iterator[None]:
    yield
    set_context(None)


def test_a_worker_sees_those_of_its_slot_and_others_see_none(worker: None) -> None:
    assert spark_elastic.task_resources() == {}
    set_context(WorkerContext("w", resources={"gpu": ("2",)}))
    assert spark_elastic.task_resources() == {"gpu": ("2",)}
