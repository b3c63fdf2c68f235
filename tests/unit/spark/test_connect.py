"""What is said about a session of Spark Connect before any job, and the end of a job that hangs."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyspark")

import pyarrow as pa
from pyspark.errors import PySparkNotImplementedError

from spark_elastic.clusters.spark import connect
from spark_elastic.clusters.spark.host_facts import has_context
from spark_elastic.clusters.spark.probe import Probe
from spark_elastic.config import ElasticConfig
from spark_elastic.errors import InvalidInput, PreflightError
from spark_elastic.protocol.types import SlotSpec
from spark_elastic.rendezvous.http_server import Bind
from spark_elastic.testing.fakes import FakeClock


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


@pytest.mark.parametrize(
    ("settings", "number", "sentence"),
    [({}, None, "give num_workers"), ({"ship": True}, 2, "ship=True does not work over Spark Connect")],
)
def test_a_call_that_cannot_work_over_connect_is_refused(
    settings: dict[str, bool], number: int | None, sentence: str
) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        make_platform(Session(), ElasticConfig(**settings)).count_workers(number)  # type: ignore[arg-type]
    assert make_platform(Session()).count_workers(2) == 2


def make_platform(session: Any, config: ElasticConfig | None = None) -> connect.ConnectPlatform:
    return connect.ConnectPlatform(session, config or ElasticConfig())


class SessionWithoutHost(Session):
    """Over a channel of a platform's own: pyspark's base class of channel builders names no host."""

    @property
    def host(self) -> str:
        raise PySparkNotImplementedError

    @host.setter
    def host(self, host: str) -> None:
        pass


OWN = socket.gethostbyname(socket.gethostname())


@pytest.mark.parametrize(
    ("session", "conf", "config", "bind"),
    [
        (Session(), {}, {}, Bind("127.0.0.1", 0, "127.0.0.1")),  # towards the server
        (
            Session(),
            {},
            {"advertise_address": "driver.example", "bind_address": "0.0.0.0", "driver_port": 7},
            Bind("0.0.0.0", 7, "driver.example"),
        ),
        (
            SimpleNamespace(),  # needs no channel
            {},
            {"advertise_address": "driver.example"},
            Bind("driver.example", 0, "driver.example"),
        ),
        (  # towards Spark's driver
            SessionWithoutHost(),
            {"spark.driver.host": "127.0.0.1"},
            {},
            Bind("127.0.0.1", 0, "127.0.0.1"),
        ),
        (SessionWithoutHost(), {}, {}, Bind(OWN, 0, OWN)),
    ],
)
def test_the_driver_listens_where_executors_reach_it(
    session: Any, conf: dict[str, str], config: dict[str, Any], bind: Bind
) -> None:
    session.conf = conf
    assert make_platform(session, ElasticConfig(**config))._choose_bind() == bind


def test_a_channel_without_a_host_name_and_without_tls_names_no_server() -> None:
    session: Any = SessionWithoutHost()
    session._builder = SimpleNamespace(secure=False)
    assert make_platform(session)._find_plaintext_server() is None


def test_a_session_that_denies_its_context_counts_as_without_one() -> None:
    class DeniedSession:
        @property
        def sparkContext(self) -> Any:
            raise RuntimeError("Py4JSecurityException")

    session: Any = Session()
    denied: Any = DeniedSession()
    assert not has_context(session)
    assert not has_context(denied)
    session.sparkContext = object()
    assert has_context(session)


def test_a_setting_that_the_server_refuses_is_left_out() -> None:
    class DeniedConf:
        def get(self, name: str, default: str | None) -> str | None:
            if name == "spark.master":
                raise RuntimeError("CONFIG_NOT_AVAILABLE")
            return "h" if name == "spark.driver.host" else default

    session: Any = Session()
    session.conf = DeniedConf()
    assert connect.read_settings(session) == {"spark.driver.host": "h"}


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


@pytest.mark.parametrize(
    ("attempt", "calls"), [(0, ["run_driver"]), (1, ["wait_standby"]), (2, ["wait_standby"])]
)
def test_only_the_first_attempt_of_the_task_runs_the_driver(
    monkeypatch: pytest.MonkeyPatch, attempt: int, calls: list[str]
) -> None:
    class Coordinator:
        def run_driver(self, host: str) -> None:
            called.append("run_driver")

        def wait_standby(self) -> None:
            called.append("wait_standby")

    called: list[str] = []
    context = SimpleNamespace(attemptNumber=lambda: attempt)
    monkeypatch.setattr(connect.TaskContext, "get", lambda: context)
    session: Any = Session()
    session.mapInArrow = lambda body, schema: SimpleNamespace(
        collect=lambda: [
            row for batch in body([pa.RecordBatch.from_pydict({"id": [0]})]) for row in batch.to_pylist()
        ]
    )
    launcher = connect.ConnectLauncher(session, lambda contact: None, FakeClock())  # type: ignore[arg-type, return-value]
    task: Any = Coordinator()
    how = "it has ended" if attempt == 0 else connect.RETRIED
    assert launcher.run_coordinator(task, None) == how
    assert called == calls
