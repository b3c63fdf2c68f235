"""What becomes of Spark's executors is posted as it is seen, or left to registrations where py4j is refused it."""

from __future__ import annotations

from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyspark")

from py4j.protocol import Py4JError

from spark_elastic.clusters.spark import executors
from spark_elastic.clusters.spark.executors import ExecutorWatch
from spark_elastic.clusters.spark.preflight import _count_live_executors
from spark_elastic.estimators.dataframes.materialize import _describe_source
from spark_elastic.protocol.events import DriverEvent, HostAppeared, HostLost
from spark_elastic.testing.fakes import FakeClock


class Backend:
    """Of a scheduler whose executors differ from look to look; the last ones stay."""

    def __init__(self, *looks: set[str] | Exception) -> None:
        self._looks = list(looks)

    def getExecutorIds(self) -> Any:
        look = self._looks.pop(0) if len(self._looks) > 1 else self._looks[0]
        if isinstance(look, Exception):
            raise look
        ids = sorted(look)
        return SimpleNamespace(size=lambda: len(ids), apply=ids.__getitem__)

    def isExecutorActive(self, host: str) -> bool:
        return True


def test_executors_of_the_first_poll_are_not_posted_and_later_ones_are_whatever_a_poll_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = Backend({"1", "2"}, {"1", "2"}, MemoryError(), {"2", "3"})
    context: Any = SimpleNamespace(
        _jsc=SimpleNamespace(sc=lambda: SimpleNamespace(schedulerBackend=lambda: backend))
    )
    monkeypatch.setattr(executors, "_has_backend_method", lambda sc, method: True)
    monkeypatch.setattr(executors, "POLL_EVERY", 0.001)
    posted: SimpleQueue[DriverEvent] = SimpleQueue()
    watch = executors.ExecutorWatch(context, FakeClock())
    watch.start(posted.put)
    try:
        events = [posted.get(timeout=30.0) for _ in range(2)]
    finally:
        watch.close()
    assert events == [HostAppeared(0.0, "3"), HostLost(0.0, "1", "Spark lost executor 1")]
    assert posted.empty()


class DeniedGateway:
    """Any method of it is refused at its call."""

    def __getattr__(self, name: str) -> Any:
        def refuse(*arguments: Any) -> None:
            raise Py4JError(f"\nPy4JSecurityException: Method {name}() is not whitelisted")

        return refuse


def test_denied_discovery_falls_back_to_registrations_and_logs_it_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "spark_elastic.spark")
    context: Any = SimpleNamespace(_jsc=SimpleNamespace(sc=DeniedGateway))
    watch = ExecutorWatch(context, FakeClock())
    watch.start(lambda event: None)
    watch.close()
    (said,) = [record.getMessage() for record in caplog.records]
    assert "schedulerBackend() is not whitelisted" in said
    assert said.endswith("hosts are known by their slots' registrations alone")


def test_as_many_probes_as_cores_run_if_executors_cannot_be_counted() -> None:
    context: Any = SimpleNamespace(_jsc=SimpleNamespace(sc=DeniedGateway), defaultParallelism=3)
    assert _count_live_executors(context) == 3


def test_a_plan_that_cannot_be_looked_at_is_never_the_same() -> None:
    frame: Any = SimpleNamespace(_jdf=DeniedGateway())
    assert _describe_source(frame) != _describe_source(frame)
