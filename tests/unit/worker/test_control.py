"""What the two threads of a worker say of the driver and to it: the last numbers before the end; its silence alike."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from spark_elastic.errors import DriverUnreachable
from spark_elastic.protocol import commands as do
from spark_elastic.protocol.commands import Exit
from spark_elastic.protocol.events import UserRaised
from spark_elastic.protocol.messages import Acknowledged, NextWorld, WorkerDone
from spark_elastic.protocol.types import DRIVER_SILENT_EXIT_CODE, START, Fence
from spark_elastic.rendezvous.messages import Report, WatchWorker, WorkerUpdate
from tests.unit.worker.loops import build_loop


def test_the_last_report_comes_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_elastic.worker.loop.REPORT_EVERY", 1000.0)
    heard: list[Any] = []
    over = threading.Event()

    def ask(request: Any, *time: float) -> Any:
        match request:
            case WatchWorker():
                over.wait(30)
                return WorkerUpdate(0)
            case Report():
                heard.append(request.numbers)
                return Acknowledged()
        heard.append(type(request))
        return NextWorld(stop="the job is over")

    driver: Any = SimpleNamespace(ask=ask, last_answered_at=lambda: 0.0)
    loop = build_loop(driver=driver)
    reporter = loop._reporter
    reporter.start()
    loop._handle.report_metrics({"val_loss": 0.5})
    loop._execute(do.ReportDone("", Fence(1, 1), START, "result"))
    reporter.close()
    over.set()
    assert heard == [{"val_loss": 0.5}, WorkerDone]


def test_r12_a_silent_driver_ends_the_main_thread_as_it_ends_the_control_thread() -> None:
    """Whoever waits for a world may be the first to give the driver up."""

    def ask(*what: Any) -> NextWorld:
        raise DriverUnreachable("The driver does not answer.")

    driver: Any = SimpleNamespace(ask=ask)
    program: Any = SimpleNamespace(close=lambda: None)
    loop = build_loop(program, driver)
    assert loop.run() == DRIVER_SILENT_EXIT_CODE


def test_r12_nor_does_it_hide_what_user_code_raised() -> None:
    def unreachable(*what: Any) -> None:
        raise DriverUnreachable("The driver does not answer.")

    driver: Any = SimpleNamespace(ask=unreachable)
    loop = build_loop(driver=driver)
    raised = UserRaised(0.0, "f", "Traceback: the user's\n")
    assert loop._advance(raised) == Exit("user code raised", 1)
