"""The newest numbers reach the driver before the worker says that it is done."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from spark_elastic.clock import SystemClock
from spark_elastic.protocol import commands as do
from spark_elastic.protocol.types import START, Fence
from spark_elastic.rendezvous.messages import News, NextWorld
from spark_elastic.worker.control import Control
from spark_elastic.worker.loop import Identity, WorkerLoop


def test_the_last_report_comes_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_elastic.worker.control.REPORT_EVERY", 1000.0)
    heard: list[Any] = []
    over = threading.Event()

    def watch(*where: Any, **named: Any) -> News:
        over.wait(30)
        return News(0)

    def done(*what: Any, **named: Any) -> NextWorld:
        heard.append("done")
        return NextWorld(stop="the job is over")

    driver: Any = SimpleNamespace(watch=watch, report=heard.append, done=done, wrote_checkpoint=None)
    nothing: Any = None
    me = Identity("1-0.1", "1-0")
    loop = WorkerLoop(me, nothing, driver, nothing, SystemClock(), 5.0)
    control = Control(me, loop, driver, SystemClock(), 30.0)
    control.start()
    loop.report({"val_loss": 0.5})
    loop._carry_out(do.ReportDone("", Fence(1, 1), START, "result"))
    control.close()
    over.set()
    assert heard == [{"val_loss": 0.5}, "done"]
