"""Which platform a session is, what is said about it before any job, and where the driver over Spark Connect is."""

from __future__ import annotations

import re
import socket
import threading
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkNotImplementedError

from spark_elastic.clusters.spark import connect, make_platform
from spark_elastic.clusters.spark.classic import ClassicPlatform
from spark_elastic.clusters.spark.connect import ConnectPlatform
from spark_elastic.clusters.spark.host_facts import has_context
from spark_elastic.clusters.spark.platform import JobSpec
from spark_elastic.clusters.spark.probe import Probe
from spark_elastic.config import ElasticConfig
from spark_elastic.driver.discovery import JobHandle
from spark_elastic.driver.job import LaunchResult
from spark_elastic.errors import InvalidInput, PreflightError
from spark_elastic.protocol.types import Limits, SlotSpec
from spark_elastic.rendezvous.addresses import Bind
from spark_elastic.testing.fakes import FakeClock
from tests.memory_store import make_memory_store


class Session:
    """As much of a session as is asked for; its jobs end when they are interrupted."""

    def __init__(self, rows: list[Any] | None = None) -> None:
        self.client = self
        self.host = "127.0.0.1"
        self.tags: list[str] = []
        self.interrupted = threading.Event()
        self.rows = rows
        self.conf: dict[str, str] = {}

    def addTag(self, tag: str) -> None:
        self.tags.append(tag)

    def interruptTag(self, tag: str) -> None:
        assert tag in self.tags
        self.interrupted.set()

    def range(self, *numbers: int) -> Session:
        return self

    def mapInArrow(self, body: Any, schema: str) -> Session:
        return self

    def collect(self) -> list[Any]:
        if self.rows is None:
            assert self.interrupted.wait(20)
            raise RuntimeError("[OPERATION_CANCELED]")
        return self.rows


class SessionWithoutHost(Session):
    """Over a channel of a platform's own: pyspark's base class of channel builders names no host."""

    @property
    def host(self) -> str:
        raise PySparkNotImplementedError

    @host.setter
    def host(self, host: str) -> None:
        pass


OWN = socket.gethostbyname(socket.gethostname())


HERE = Bind("127.0.0.1", 0, "127.0.0.1")
NAMED = {"advertise_address": "driver.example"}


@pytest.mark.parametrize(
    ("session", "conf", "config", "bind"),
    [
        (Session(), {}, {}, HERE),  # towards the server
        (Session(), {}, {**NAMED, "bind_address": "::", "driver_port": 7}, Bind("::", 7, "driver.example")),
        (SimpleNamespace(), {}, NAMED, Bind("driver.example", 0, "driver.example")),  # needs no channel
        (SessionWithoutHost(), {"spark.driver.host": "127.0.0.1"}, {}, HERE),  # towards Spark's driver
        (SessionWithoutHost(), {}, {}, Bind(OWN, 0, OWN)),
    ],
)
def test_the_driver_listens_where_executors_reach_it(
    session: Any, conf: dict[str, str], config: dict[str, Any], bind: Bind
) -> None:
    session.conf = conf
    assert ConnectPlatform(session, ElasticConfig(**config))._choose_bind() == bind


def test_a_channel_without_a_host_name_and_without_tls_names_no_server() -> None:
    session: Any = SessionWithoutHost()
    session._builder = SimpleNamespace(secure=False)
    assert ConnectPlatform(session, ElasticConfig())._find_plaintext_server() is None


def test_a_session_that_denies_its_context_counts_as_without_one() -> None:
    class DeniedSession:
        @property
        def sparkContext(self) -> Any:
            raise RuntimeError("Py4JSecurityException")

    denied: Any = DeniedSession()
    assert not has_context(denied)


def test_probes_that_no_executor_takes_are_interrupted() -> None:
    session: Any = Session()
    with pytest.raises(PreflightError, match="no executor took a probe within 0 s"):
        connect.preflight(session, Probe(bind=Bind(), peers=2), 0.05)
    assert session.interrupted.is_set()


def test_a_slot_job_that_still_runs_is_interrupted_at_close() -> None:
    session: Any = Session()
    ended: list[Any] = []
    launcher = connect.ConnectLauncher(session, lambda contact: None, FakeClock())  # type: ignore[arg-type, return-value]
    launcher.start(SlotSpec(address="", key=b"", attempt=1), ended.append)
    launcher.launch(0)
    while not session.tags:
        threading.Event().wait(0.001)
    assert launcher.close(3.0) == []
    assert session.interrupted.is_set()
    assert ended == []


@pytest.mark.parametrize(("attempt", "calls"), [(0, ["run_driver"]), (1, ["wait_standby"])])
def test_only_the_first_attempt_of_the_task_runs_the_driver(
    monkeypatch: pytest.MonkeyPatch, attempt: int, calls: list[str]
) -> None:
    def map_in_arrow(body: Any, schema: str) -> Any:
        (batch,) = body([pa.RecordBatch.from_pydict({"id": [0]})])
        return SimpleNamespace(collect=batch.to_pylist)

    called: list[str] = []
    context = SimpleNamespace(attemptNumber=lambda: attempt)
    monkeypatch.setattr(connect.TaskContext, "get", lambda: context)
    session: Any = Session()
    session.mapInArrow = map_in_arrow
    launcher = connect.ConnectLauncher(session, lambda contact: None, FakeClock())  # type: ignore[arg-type, return-value]
    task: Any = SimpleNamespace(
        run_driver=lambda host: called.append("run_driver"),
        wait_standby=lambda: called.append("wait_standby"),
    )
    how = "it has ended" if attempt == 0 else connect.RETRIED
    assert launcher.run_coordinator(task, None) == how
    assert called == calls


UNREACHED = "host h cannot reach the driver at c:1 (refused): open it."


def make_context(**settings: str) -> Any:
    conf = SimpleNamespace(getAll={f"spark.{name}": value for name, value in settings.items()}.items)
    return SimpleNamespace(_jsc=1, defaultParallelism=7, getConf=lambda: conf)


def test_a_session_whose_settings_kill_each_slot_is_refused_before_any_job() -> None:
    old, new = "spark.python.worker.", "spark.sql.execution.pyspark.udf."
    kill = {f"{old}idleTimeoutSeconds": "9", f"{old}killOnIdleTimeout": "true"}
    context = make_context(**{name.removeprefix("spark."): value for name, value in kill.items()})
    with pytest.raises(InvalidInput, match="kills every slot after 9 seconds"):
        make_platform(SimpleNamespace(sparkContext=context), ElasticConfig())  # type: ignore[arg-type]
    over_connect: Any = Session()
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
    assert isinstance(make_platform(Session(), ElasticConfig()), ConnectPlatform)
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
        make_platform(Session(), ElasticConfig(**setting))


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
    platform = ConnectPlatform(Session(), ElasticConfig())
    platform.preflight(b"", make_memory_store(), (), 2, "it")
    found: LaunchResult | None = platform.launch(JobSpec("program", Limits(1, 1, 1), "job"))
    assert found is None
    assert ways == ["beside" if unreached is None else "in a task"]
    said = "the coordinator will run in a task: host h cannot reach" in caplog.text
    assert said is (unreached is not None)


def test_settings_that_a_coordinator_cannot_have_are_refused_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "preflight", lambda *arguments: ([], UNREACHED))
    platform = ConnectPlatform(Session(), ElasticConfig(handle=JobHandle()))
    with pytest.raises(InvalidInput, match="handle does not work where executors cannot reach the client"):
        platform.preflight(b"", make_memory_store(), (), 2, "it")


def test_an_unreachable_client_without_a_store_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    report: Any = SimpleNamespace(unreached=UNREACHED)
    monkeypatch.setattr(connect, "await_probes", lambda *arguments: [{"answer": b""}])
    monkeypatch.setattr(connect, "require_report", lambda answer: report)
    monkeypatch.setattr(connect.pickle, "loads", lambda content: None)
    monkeypatch.setattr(connect, "check_reports", lambda *arguments, **named: None)
    with pytest.raises(PreflightError, match=r"open it; or give a store, and the driver runs in a task\."):
        ConnectPlatform(Session(), ElasticConfig()).preflight(b"", None, (), 1, "it")
