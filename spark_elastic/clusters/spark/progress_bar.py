"""Pauses Spark's own progress bar on a terminal while a job of ours shows its progress there.

A job's slots are Spark jobs that run as long as the training does, so that the bar has nothing to say about them, and
both would rewrite the same line.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark import SparkContext

log = logging.getLogger("spark_elastic")


class ProgressBarPause:
    """Stops Spark's bar when the first of an application's jobs begins and gives it a new one when the last has ended.

    Spark cannot resume a stopped bar and offers no way to set another one: the field is set by reflection. Where a
    platform refuses that, Spark's bar stays as it is.
    """

    def __init__(self, context: SparkContext) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._jobs = 0  # that run now
        self._stopped = False  # there was a bar, and it is stopped

    def __enter__(self) -> None:
        with self._lock:
            self._jobs += 1
            if self._jobs == 1:
                self._stopped = self._attempt(self._stop_bar)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._jobs -= 1
            if self._jobs == 0 and self._stopped:
                self._attempt(self._start_bar)

    def _attempt(self, action: Any) -> bool:
        try:
            return bool(action())
        except Exception as error:  # py4j is closed to us, or the SparkContext has been stopped
            log.debug("Spark's console progress bar is left as it is: %s", error)
            return False

    def _stop_bar(self) -> bool:
        bar = self._context._jsc.sc().progressBar()
        if bar.isEmpty():
            return False
        bar.get().finishAll()  # clears the line
        bar.get().stop()
        return True

    def _start_bar(self) -> bool:
        jvm: Any = self._context._jvm
        context = self._context._jsc.sc()
        if context.isStopped():
            return False
        field = context.getClass().getDeclaredField("_progressBar")
        field.setAccessible(True)
        field.set(context, jvm.scala.Some(jvm.org.apache.spark.ui.ConsoleProgressBar(context)))
        return True


@contextmanager
def pause_progress_bar(context: SparkContext) -> Iterator[None]:
    """Spark shows no progress bar while the block runs. Blocks may overlap."""
    pause: ProgressBarPause = vars(context).setdefault(
        "_spark_elastic_progress_bar", ProgressBarPause(context)
    )
    with pause:
        yield
