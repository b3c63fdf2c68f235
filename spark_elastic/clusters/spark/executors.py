"""Discovery over Spark: polls the scheduler's list of executors, in a thread, and posts what changed to the driver.

The driver does not depend on it: slots and workers report themselves, and broken connections are seen earlier.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from py4j.protocol import Py4JError
from pyspark import InheritableThread, SparkContext

from spark_elastic.clock import Clock
from spark_elastic.driver.ports import Post
from spark_elastic.protocol.events import DrainRequested, HostAppeared, HostLost

log = logging.getLogger("spark_elastic.spark")

POLL_EVERY = 0.5  # seconds; a poll costs about 3 ms
END_WAIT = 5.0  # seconds for a poll that the JVM has not answered yet


class ExecutorWatch:
    """`driver.ports.Discovery` over the scheduler backend of a SparkContext; idle in local mode."""

    def __init__(self, sc: SparkContext, clock: Clock) -> None:
        self._sc = sc
        self._clock = clock
        self._closing = threading.Event()
        self._thread: InheritableThread | None = None

    def start(self, post: Post) -> None:
        try:
            if not _has_backend_method(self._sc, "getExecutorIds"):
                return
        except (Py4JError, AttributeError) as error:
            log.info("%s; hosts are known by their slots' registrations alone", describe_denial(error))
            return
        self._thread = InheritableThread(
            target=self._watch, args=(post,), name="spark-elastic-executors", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join(END_WAIT)

    def _watch(self, post: Post) -> None:
        known: set[str] | None = (
            None  # None: the first poll posts nothing, as slots may run on those executors already
        )
        draining: set[str] = set()
        while not self._closing.wait(POLL_EVERY):
            try:
                backend = _backend(self._sc)
                present = set(_to_strings(backend.getExecutorIds()))
                leaving = {host for host in present - draining if not backend.isExecutorActive(host)}
            except Exception as error:  # also a lack of descriptors or memory, which may pass
                # If the context was stopped, the slots' own jobs end with it.
                log.debug("the scheduler does not answer: %s", error)
                continue
            now = self._clock.now()
            for host in sorted(set() if known is None else present - known):
                post(HostAppeared(now, host))
            for host in sorted((known or set()) - present):
                post(HostLost(now, host, f"Spark lost executor {host}"))
            for host in sorted(leaving):
                post(DrainRequested(now, f"executor {host} is being decommissioned", host=host))
            draining |= leaving
            known = present


def _backend(sc: SparkContext) -> Any:
    return sc._jsc.sc().schedulerBackend()


def describe_denial(error: Exception) -> str:
    """A line that says that the cluster denies users access to Spark's scheduler."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"this cluster does not let users look at its executors ({lines[-1].strip()[:200]})"


def _has_backend_method(sc: SparkContext, method: str) -> bool:
    """Whether the scheduler backend has that method; that of local mode has not."""
    names = {m.getName() for m in _backend(sc).getClass().getMethods()}
    return method in names


def _to_strings(sequence: Any) -> list[str]:
    """A Scala Seq of strings."""
    return [str(sequence.apply(i)) for i in range(sequence.size())]
