"""Which platform a session is, and where its driver will be."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyspark")

from spark_elastic.clusters.spark import connect, make_platform
from spark_elastic.clusters.spark.classic import ClassicPlatform
from spark_elastic.clusters.spark.connect import ConnectPlatform
from spark_elastic.clusters.spark.platform import JobSpec
from spark_elastic.config import ElasticConfig
from spark_elastic.data.store import Store
from spark_elastic.driver.discovery import JobHandle
from spark_elastic.driver.job import LaunchResult
from spark_elastic.errors import InvalidInput, JobFailed, PreflightError, StoreError
from spark_elastic.protocol.types import Limits
from tests.memory_store import make_memory_store

UNREACHED = "host h cannot reach the driver at c:1 (refused): open it."


def session() -> Any:
    return SimpleNamespace(client=SimpleNamespace(host="127.0.0.1"), conf={}, addTag=lambda tag: None)


def make_context(**settings: str) -> Any:
    conf = SimpleNamespace(getAll={f"spark.{name}": value for name, value in settings.items()}.items)
    return SimpleNamespace(_jsc=1, defaultParallelism=7, getConf=lambda: conf)


def test_a_session_whose_settings_kill_each_slot_is_refused_before_any_job() -> None:
    old, new = "spark.python.worker.", "spark.sql.execution.pyspark.udf."
    kill = {f"{old}idleTimeoutSeconds": "9", f"{old}killOnIdleTimeout": "true"}
    context = make_context(**{name.removeprefix("spark."): value for name, value in kill.items()})
    with pytest.raises(InvalidInput, match="kills every slot after 9 seconds"):
        make_platform(SimpleNamespace(sparkContext=context), ElasticConfig())  # type: ignore[arg-type]
    over_connect = session()
    over_connect.conf = kill
    with pytest.raises(InvalidInput, match=rf"with {re.escape(new)}killOnIdleTimeout=true"):
        make_platform(over_connect, ElasticConfig())
    for harmless in ({f"{old}idleTimeoutSeconds": "0"}, {f"{new}killOnIdleTimeout": "false"}):
        over_connect.conf = kill | harmless
        make_platform(over_connect, ElasticConfig())


def test_a_session_with_a_context_is_classic() -> None:
    context = make_context(master="yarn")
    classic: Any = SimpleNamespace(sparkContext=context)
    platform = make_platform(classic, ElasticConfig())
    assert isinstance(platform, ClassicPlatform)
    assert (platform.master, platform.count_workers(None), platform.count_workers(2)) == ("yarn", 7, 2)
    assert isinstance(make_platform(session(), ElasticConfig()), ConnectPlatform)
    context._jsc = None
    with pytest.raises(InvalidInput, match="the SparkSession was stopped: create one"):
        make_platform(classic, ElasticConfig())


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ({"journal": "/nowhere/journal"}, "The journal /nowhere/journal cannot be written"),
        ({"host_discovery": "./nowhere.sh"}, "host_discovery is './nowhere.sh', which is no executable file"),
        ({"handle": "a handle"}, "handle must be a spark_elastic.JobHandle; got a str"),
        ({"tls_certificate": "/no/a", "tls_key": "/no/b"}, "tls_certificate /no/a and tls_key"),
    ],
)
def test_what_the_driver_cannot_use_is_refused_before_any_job(setting: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(sentence)):
        make_platform(session(), ElasticConfig(**setting))


@pytest.mark.parametrize("unreached", [UNREACHED, None])
def test_the_driver_runs_in_a_task_if_executors_cannot_reach_the_client(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, unreached: str | None
) -> None:
    monkeypatch.setattr(connect, "preflight", lambda *arguments: ([], unreached))
    ways: list[str] = []
    supervise = "spark_elastic.clusters.spark.platform.supervise"
    monkeypatch.setattr(supervise, lambda *arguments: ways.append("beside"))
    follow = "spark_elastic.clusters.coordinator.CoordinatorClient.follow"
    monkeypatch.setattr(follow, lambda self, *arguments: ways.append("in a task"))
    platform = ConnectPlatform(session(), ElasticConfig())
    platform.preflight(b"", make_memory_store(), (), 2, "it")
    found: LaunchResult | None = platform.launch(JobSpec("program", Limits(1, 1, 1), "job"))
    assert found is None
    assert ways == ["beside" if unreached is None else "in a task"]
    said = "the coordinator will run in a task: host h cannot reach" in caplog.text
    assert said is (unreached is not None)


@pytest.mark.parametrize("error", [None, JobFailed("two workers were lost.")])
def test_a_store_that_cannot_remove_a_job_s_messages_hides_neither_result_nor_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: JobFailed | None
) -> None:
    def follow(*arguments: object) -> str:
        if error is not None:
            raise error
        return "the result"

    def fail(*arguments: object) -> None:
        raise StoreError("Cannot delete 'channels' in the store.")

    monkeypatch.setattr(connect, "preflight", lambda *arguments: ([], UNREACHED))
    monkeypatch.setattr("spark_elastic.clusters.coordinator.CoordinatorClient.follow", follow)
    monkeypatch.setattr(Store, "remove_tree", fail)
    platform = ConnectPlatform(session(), ElasticConfig())
    platform.preflight(b"", make_memory_store(), (), 2, "it")
    job = JobSpec("program", Limits(1, 1, 1), "job")
    if error is None:
        assert platform.launch(job) == "the result"
    else:
        with pytest.raises(JobFailed, match="two workers were lost"):
            platform.launch(job)
    assert caplog.messages[-1] == "Cannot delete 'channels' in the store. Remove it by hand."


def test_settings_that_a_coordinator_cannot_have_are_refused_in_the_preflight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connect, "preflight", lambda *arguments: ([], UNREACHED))
    platform = ConnectPlatform(session(), ElasticConfig(handle=JobHandle()))
    with pytest.raises(InvalidInput, match="handle does not work where executors cannot reach the client"):
        platform.preflight(b"", make_memory_store(), (), 2, "it")


def test_an_unreachable_client_without_a_store_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    report: Any = SimpleNamespace(unreached=UNREACHED)
    monkeypatch.setattr(connect, "await_probes", lambda *arguments: [{"answer": b""}])
    monkeypatch.setattr(connect, "require_report", lambda answer: report)
    monkeypatch.setattr(connect.pickle, "loads", lambda content: None)
    monkeypatch.setattr(connect, "check_reports", lambda *arguments, **named: None)
    with pytest.raises(PreflightError, match=r"open it; or give a store, and the driver runs in a task\."):
        ConnectPlatform(session(), ElasticConfig()).preflight(b"", None, (), 1, "it")
