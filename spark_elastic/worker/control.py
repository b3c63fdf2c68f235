"""The control thread of a worker: hears the driver while the main thread trains.

It long-polls the driver for aborts, the membership version and orders to stop, and sends progress along. It never
touches the program. R12: when the driver is silent for `driver_timeout`, the worker ends itself.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from spark_elastic.clock import Clock
from spark_elastic.errors import ElasticError
from spark_elastic.protocol.events import AbortHeard, DriverSilent, StopHeard
from spark_elastic.protocol.types import Fence
from spark_elastic.rendezvous.calls import WorkerCalls
from spark_elastic.worker.loop import Identity, WorkerLoop

LAST_WORDS = 2.0  # seconds that the main thread gets to end by itself after an order to stop
PAUSE = 0.2  # seconds between tries while the driver is away; the last ones come closer together
LEAST_PAUSE = 0.01
REPORT_EVERY = 0.25  # seconds between two progress messages


class Control:
    """Two daemon threads: `watch` for the driver's word, `report` for progress. `start` and `close` frame the run."""

    def __init__(
        self, me: Identity, loop: WorkerLoop, driver: WorkerCalls, clock: Clock, driver_timeout: float
    ):
        self._me = me
        self._loop = loop
        self._driver = driver
        self._clock = clock
        self._driver_timeout = driver_timeout
        self._version = 0
        self._closing = threading.Event()
        self._latest: Mapping[str, Any] | None = None
        self._threads = [
            threading.Thread(target=self._watch, name="spark-elastic-watch", daemon=True),
            threading.Thread(target=self._ship_reports, name="spark-elastic-report", daemon=True),
        ]

    def start(self) -> None:
        self._loop.membership_version = lambda: self._version
        self._loop.report, self._loop.ship_report = self._report, self._ship
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._closing.set()

    def _report(self, numbers: Mapping[str, Any]) -> None:
        self._latest = numbers  # the newest wins; a reader never sees half of one

    def _ship_reports(self) -> None:
        while not self._closing.wait(REPORT_EVERY):
            self._ship()

    def _ship(self) -> None:
        numbers, self._latest = self._latest, None
        if numbers is not None:
            # Progress is for people; the watch thread is who minds the driver's absence.
            with suppress(ElasticError):
                self._driver.report(dict(numbers))

    def _watch(self) -> None:
        began = self._clock.now()
        over: Fence | None = None  # the newest generation that is known to be over
        while not self._closing.is_set():
            heard = max(began, self._driver.heard_at())
            left = heard + self._driver_timeout - self._clock.now()
            if left <= 0.0:
                silent = DriverSilent(self._clock.now(), self._driver_timeout - left)
                self._leave(self._loop.hear(silent), "the driver is silent")
            try:
                news = self._driver.watch(over, self._version, within=max(0.0, left))
            except ElasticError:
                self._closing.wait(min(PAUSE, max(LEAST_PAUSE, left)))
                continue
            now = self._clock.now()
            self._version = max(self._version, news.version)
            if news.over is not None and news.over != over:
                over = news.over
                self._loop.hear(AbortHeard(now, over, news.why))
            if news.stop is not None:
                self._leave(self._loop.hear(StopHeard(now, news.stop)), news.stop)
                return

    def _leave(self, code: int | None, reason: str) -> None:
        """End the process even where user code does not come back."""
        if code is None or self._closing.wait(LAST_WORDS):
            return
        sys.stderr.write(f"worker {self._me.worker} ends: {reason}\n")
        sys.stderr.flush()
        os._exit(code)
