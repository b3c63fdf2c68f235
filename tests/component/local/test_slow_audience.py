"""Nobody reads, or a listener blocks: it costs what is shown, no worker and no world."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Mapping
from typing import Any, TypeVar

import pytest

from spark_elastic.clock import SystemClock
from spark_elastic.clusters.local.launcher import LocalLauncher
from spark_elastic.config import ElasticConfig
from spark_elastic.driver.discovery import CombinedDiscovery
from spark_elastic.driver.job import DriverOptions, LaunchResult, supervise
from spark_elastic.driver.ports import Post
from spark_elastic.monitoring.console import OutputListener
from spark_elastic.monitoring.listener import JobListener
from spark_elastic.protocol.types import Limits, SlotSpec
from spark_elastic.testing.fakes import NumberedHosts
from tests.component.worker.moments import HeldProgram

pytestmark = [pytest.mark.faults, pytest.mark.native, pytest.mark.timeout(120)]

TIMEOUT = 3.0  # seconds after which workers whose driver is silent end themselves


class PrintingProgram(HeldProgram):
    """Says a lot."""

    def run(self, *arguments: Any) -> Any:
        print("x" * 200_000, flush=True)  # noqa: T201 - more than a pipe holds
        return super().run(*arguments)


CONFIG = ElasticConfig(driver_timeout=TIMEOUT, lease=TIMEOUT, status_page=False)
L = TypeVar("L", bound=LocalLauncher)


def make_cluster(program: HeldProgram, kind: type[L]) -> L:
    return kind(program, NumberedHosts(2, 1), SystemClock())


def train(cluster: LocalLauncher, listener: JobListener) -> LaunchResult:
    limits = Limits(2, 1, 2, lease=TIMEOUT, driver_timeout=TIMEOUT)
    return supervise(cluster, CombinedDiscovery(), DriverOptions(), limits, CONFIG, "test", listener)


class Blocking(JobListener):
    """Holds up who calls it until `read`, once with progress and once with a sentence."""

    def __init__(self, began: threading.Event, read: threading.Event) -> None:
        self._began, self._read = began, read
        self.newest: Mapping[str, Any] = {}
        self.told: list[str] = []

    def on_progress(self, metrics: Mapping[str, Any]) -> None:
        self._began.set()
        self._read.wait(60)
        self.newest = metrics

    def on_message(self, text: str) -> None:
        self._began.set()
        self._read.wait(60)
        self.told.append(text)


class StalledListener(OutputListener):
    """Says when it has numbers to show."""

    began: threading.Event

    def on_progress(self, metrics: Mapping[str, Any]) -> None:
        self.began.set()
        super().on_progress({**metrics, "loss": 1.0})


def release_later(program: HeldProgram, began: threading.Event, read: threading.Event) -> threading.Thread:
    """Twice the timeout after training began people read again, and the program ends."""

    def read_later() -> None:
        began.wait(60)
        threading.Event().wait(2 * TIMEOUT)
        read.set()
        program.release()

    thread = threading.Thread(target=read_later)
    thread.start()
    return thread


def test_a_terminal_that_blocks_costs_no_world() -> None:
    ends = os.pipe()
    program, began, read = PrintingProgram(steps=20), threading.Event(), threading.Event()
    later = release_later(program, began, read)
    lines: list[str] = []

    def read_lines() -> None:
        read.wait(60)
        with os.fdopen(ends[0]) as stream:
            lines.extend(stream)

    reader = threading.Thread(target=read_lines)
    reader.start()
    with os.fdopen(ends[1], "w") as stream:
        output = StalledListener(stream, SystemClock(), False, show_messages=True, show_output=True)
        output.began = began
        result = train(make_cluster(program, LocalLauncher), output)
        output.close()
    for thread in (later, reader):
        thread.join()
    assert [world.size for world in result.worlds] == [2]
    assert any(line.startswith("world of 2: started") for line in lines)


class AddressLauncher(LocalLauncher):
    """Says where the driver listens."""

    def start(self, spec: SlotSpec, post: Post) -> None:
        self.address = spec.address
        super().start(spec, post)


class Collector(logging.Handler):
    """A user's own handler, whose collector does not answer between `began` and `read`."""

    def __init__(self, began: threading.Event, read: threading.Event) -> None:
        super().__init__()
        self._began, self._read = began, read
        self.held_up: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if self._began.is_set():
            self._read.wait(60)
            self.held_up.append(record.getMessage())


def test_a_listener_and_a_log_handler_that_block_cost_no_world() -> None:
    """Unauthenticated requests make the server log meanwhile."""
    program, began, read = HeldProgram(steps=20), threading.Event(), threading.Event()
    cluster = make_cluster(program, AddressLauncher)
    collector, root = Collector(began, read), logging.getLogger()

    def send_unauthenticated() -> None:
        began.wait(60)
        host, port = cluster.address.split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(b"garbage\r\n\r\n")

    sender = threading.Thread(target=send_unauthenticated)
    later = release_later(program, began, read)
    sender.start()
    root.addHandler(collector)
    listener = Blocking(began, read)
    try:
        result = train(cluster, listener)
    finally:
        root.removeHandler(collector)
    for thread in (sender, later):
        thread.join()
    assert [world.size for world in result.worlds] == [2]
    assert listener.newest["step"] >= 19, "the newest is heard in the end"
    assert any(text.startswith("world of 2: started") for text in listener.told)
    (line,) = collector.held_up
    assert line.startswith("The driver's server refused 1 request (the last one: Invalid HTTP, ")
