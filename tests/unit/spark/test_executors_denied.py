"""Where py4j is refused Spark's inner parts, hosts are known by registration, and nothing is reused or counted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyspark")

from py4j.protocol import Py4JError

from spark_elastic.clusters.spark.executors import ExecutorWatch
from spark_elastic.clusters.spark.preflight import _count_live_executors
from spark_elastic.estimators.dataframes.materialize import _describe_source
from spark_elastic.estimators.dataframes.store_access import check_store_access
from spark_elastic.testing.fakes import FakeClock
from tests.memory_store import make_memory_store


class DeniedGateway:
    """Any method of it is refused at its call."""

    def __getattr__(self, name: str) -> Any:
        def refuse(*arguments: Any) -> None:
            raise Py4JError(f"\nPy4JSecurityException: Method {name}() is not whitelisted")

        return refuse


def test_denied_discovery_falls_back_to_registrations_and_logs_it_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "spark_elastic.clusters.spark")
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


def test_the_store_check_passes_if_the_jvm_denies_access() -> None:
    user = SimpleNamespace(UserGroupInformation=DeniedGateway())
    hadoop = SimpleNamespace(hadoop=SimpleNamespace(security=user))
    session: Any = SimpleNamespace(_jvm=SimpleNamespace(org=SimpleNamespace(apache=hadoop)))
    store = make_memory_store()
    check_store_access(session, store)
    assert store.list("probes") == []
