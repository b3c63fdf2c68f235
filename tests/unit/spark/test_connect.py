"""What is said about a session of Spark Connect before any job, and the end of a job that hangs."""

from __future__ import annotations

import threading
from typing import Any

import pytest

pytest.importorskip("pyspark")

from spark_elastic.config import ElasticConfig
from spark_elastic.errors import InvalidInput, PreflightError
from spark_elastic.rendezvous.serving import Bind
from spark_elastic.spark import connect
from spark_elastic.spark.active_session import is_connect, refuse_connect
from spark_elastic.testing.clock import FakeClock


class Session:
    """As much of a session as is asked for; its jobs end when they are interrupted."""

    def __init__(self, rows: list[Any] | None = None) -> None:
        self.client = self
        self.host = "127.0.0.1"
        self.tags: list[str] = []
        self.interrupted = threading.Event()
        self.rows = rows

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
    ("config", "number", "size", "sentence"),
    [
        (ElasticConfig(), None, 1, "give num_workers"),
        (ElasticConfig(ship=True), 2, 1, "ship=True does not work over Spark Connect"),
        (ElasticConfig(), 2, (64 << 20) + 1, "the function and its arguments are 64 MB"),
    ],
)
def test_what_cannot_work_is_a_sentence(
    config: ElasticConfig, number: int | None, size: int, sentence: str
) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        connect.check(config, number, bytes(size))
    assert connect.check(ElasticConfig(), 2, b"") == 2


def test_the_driver_listens_on_the_way_to_the_server() -> None:
    session: Any = Session()
    assert connect.bind_of(session, ElasticConfig()) == Bind("127.0.0.1", 0, "127.0.0.1")
    told = ElasticConfig(advertise_address="driver.example", bind_address="0.0.0.0", driver_port=7)
    assert connect.bind_of(session, told) == Bind("0.0.0.0", 7, "driver.example")


def test_fit_is_refused_and_says_what_works() -> None:
    session: Any = Session()
    assert is_connect(session)
    with pytest.raises(InvalidInput, match=r"fit\(\) does not work .* spark_elastic.run\(\) works on both"):
        refuse_connect(session, "fit()")


def test_probes_that_nobody_takes_are_interrupted() -> None:
    session: Any = Session()
    with pytest.raises(PreflightError, match="no executor took a probe within 0 s"):
        connect.preflight(session, b"", None, (), 2, Bind(), 0.05)
    assert session.interrupted.is_set()


def test_a_slot_job_that_is_left_is_interrupted_at_the_end() -> None:
    session: Any = Session()
    ended: list[Any] = []
    launcher = connect.ConnectLauncher(session, lambda contact: None, FakeClock())  # type: ignore[arg-type, return-value]
    launcher.start(None, ended.append)  # type: ignore[arg-type]
    launcher.launch(0, 0.0)
    while not session.tags:
        threading.Event().wait(0.001)
    assert launcher.close(3.0) == []
    assert session.interrupted.is_set()
    assert ended == []
