"""What people see of a job on a terminal, in a notebook, or in a stream: its progress, messages and workers' output.

Several threads call these listeners; one lock guards each of their streams. They block only on the stream."""

from __future__ import annotations

import importlib
import io
import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import IO, Any

from spark_elastic.clock import Clock, SystemClock
from spark_elastic.monitoring.listener import JobListener, Metrics
from spark_elastic.monitoring.logs import format_as_spark
from spark_elastic.monitoring.report import Throughput

log = logging.getLogger("spark_elastic")

LINES_PER_SECOND = 50.0  # of each worker
LINES_BURST = 500.0  # of each worker, at once
PROGRESS_INTERVAL = 2.0  # seconds between two plain progress lines
BAR_FORMAT = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{postfix}"
BAR_COLUMNS = 80  # where tqdm does not know the stream's width
LIVE_LINE_SPACE = 20  # columns for percentage, bar and what separates the parts
# Metrics that are shown in a fixed place, or not at all.
POSITION_METRICS = {"epoch", "epochs", "closed", "step", "steps", "rows", "loss", "world"}
POSITION_METRICS |= {"checkpoint_seconds", "bulk_seconds", "bulk_generation"}
COMMIT_METRICS = {"step", "world", "checkpoint_seconds"}  # what every job reports without the program's doing


class LineRateLimiter:
    """A token bucket for each worker, so that one that prints much does not hide the others. Times are arguments."""

    def __init__(self, rate: float = LINES_PER_SECOND, burst: float = LINES_BURST) -> None:
        self._rate, self._burst = rate, burst
        self._left: dict[str, tuple[float, float]] = {}  # lines that each may still print, and at what time
        self._dropped: Counter[str] = Counter()  # lines of each worker since the last one that was shown

    def limit(self, now: float, who: str, line: str) -> tuple[str, ...]:
        """The line, preceded by a note on lines dropped before it; nothing if the worker is over its limit."""
        left, at = self._left.get(who, (self._burst, now))
        left = min(self._burst, left + self._rate * (now - at))
        self._left[who] = left - (left >= 1), now
        if left < 1:
            self._dropped[who] += 1
            return ()
        dropped = self._dropped.pop(who, 0)
        return (f"{dropped} lines were dropped", line) if dropped else (line,)

    def final_notes(self) -> list[str]:
        """A line for each worker whose last lines were dropped."""
        return [f"[{who}] {dropped} lines were dropped" for who, dropped in self._dropped.items()]


@dataclass(eq=False)
class OutputListener(JobListener):
    """Writes what the workers of a function or script print to one stream, with their ranks as prefixes."""

    stream: IO[str]
    clock: Clock
    timestamps: bool  # prefix each line with the time of day
    show_messages: bool  # show messages and reported metrics
    show_output: bool  # show what workers print
    limiter: LineRateLimiter | None = None  # of workers' lines; None for no limit
    as_spark: bool = False  # messages and metrics have the form of Spark's log, unless lines have timestamps

    def __post_init__(self) -> None:
        self._pending: Metrics | None = None  # the newest, not shown yet
        self._next_progress = 0.0  # when metrics may be shown again
        self._stream_closed = False  # the reader of a pipe has closed it, as `head` does
        self._lock = threading.RLock()

    def on_output(self, worker: str, rank: int | None, line: str) -> None:
        if not self.show_output:
            return
        who = "-" if rank is None else str(rank)
        with self._lock:
            lines = (line,) if self.limiter is None else self.limiter.limit(self.clock.now(), who, line)
            for shown in lines:
                self._write(f"[{who}] {shown}")

    def on_message(self, text: str) -> None:
        if self.show_messages:
            with self._lock:
                self._write_own(text)

    def on_progress(self, metrics: Metrics) -> None:
        """Shows what the program reports; mere commits are not shown."""
        if not self.show_messages or not (metrics.keys() - COMMIT_METRICS):
            return
        with self._lock:
            self._pending = metrics
            if self.clock.now() >= self._next_progress:
                self._next_progress = self.clock.now() + PROGRESS_INTERVAL
                self._show_pending()

    def close(self) -> None:
        with self._lock:
            self._show_pending()
            if self.limiter is not None:
                for note in self.limiter.final_notes():
                    self._write(note)

    def _show_pending(self) -> None:
        metrics, self._pending = self._pending, None
        if metrics is not None:
            step = f"step {metrics['step']} " if "step" in metrics else ""
            self._write_own(f"{step}{format_metrics(metrics, Throughput())}")

    def _write_own(self, text: str) -> None:
        """What no worker printed."""
        in_form = self.as_spark and not self.timestamps
        self._write(format_as_spark(self.clock.wall(), logging.INFO, text) if in_form else text)

    def _write(self, text: str) -> None:
        if self._stream_closed:
            return
        if self.timestamps:
            now = datetime.fromtimestamp(self.clock.wall()).astimezone()
            text = f"{now.isoformat(timespec='seconds')} {text}"
        try:
            if encoding := getattr(self.stream, "encoding", None):  # escapes what it lacks
                text = text.encode(encoding, "backslashreplace").decode(encoding)
            self.stream.write(text + "\n")
            self.stream.flush()
        except BrokenPipeError:
            self._stream_closed = True
            log.warning("the stream that shows workers' output has been closed; the job continues")


class ProgressListener(OutputListener):
    """Shows the progress of an estimator's fit: one live line, or now and then a line in the form of Spark's log.

    Args:
        epochs: of the whole run.
        stream: default standard error; in a notebook, which shows that on red, standard output.
        live: rewrite one line in place; default if the stream is a terminal, or in a notebook.
        callback: also called with the metrics of each report.
        quiet: show nothing; `callback` is still called.
        show_output: show what workers print.
    """

    def __init__(
        self,
        epochs: int,
        *,
        stream: IO[str] | None = None,
        live: bool | None = None,
        callback: Callable[[Metrics], None] | None = None,
        clock: Clock | None = None,
        quiet: bool = False,
        show_output: bool = True,
    ) -> None:
        stream = stream or (sys.stdout if is_in_notebook() else sys.stderr)
        self._live = supports_live_line(stream) if live is None else live
        super().__init__(
            stream,
            clock or SystemClock(),
            timestamps=False,
            show_messages=not quiet,
            show_output=show_output and not quiet,
            limiter=LineRateLimiter(),
            as_spark=not self._live,
        )
        self._epochs, self._callback = epochs, callback
        self._bar: Any = None  # tqdm's
        self._last_line: tuple[float, int] | None = None  # time and epoch of the last plain progress line
        self._throughput = Throughput()

    def on_progress(self, metrics: Metrics) -> None:
        if self._callback is not None:
            self._callback(metrics)
        if not self.show_messages or "step" not in metrics or "steps" not in metrics:
            return
        with self._lock:
            self._throughput.add(self.clock.now(), {"epochs": self._epochs, **metrics})
            if self._live:
                self._redraw_live_line(metrics)
            else:
                self._write_plain_line(metrics)

    def close(self) -> None:
        """Leaves the last state of the live line on the screen."""
        with self._lock:
            super().close()
            if self._bar is not None:
                self._bar.close()
                self._bar = None

    def _write(self, text: str) -> None:
        if self._bar is not None:
            self._bar.write(text, file=self.stream)
        else:
            super()._write(text)

    def _redraw_live_line(self, metrics: Metrics) -> None:
        epoch, steps = int(metrics.get("epoch", 0)), int(metrics["steps"])
        if self._bar is None:
            self._bar = self._create_bar(self._epochs * steps)
        self._bar.n = epoch * steps + int(metrics["step"])
        description = f"epoch {epoch + 1}/{self._epochs}"
        total = len(str(self._bar.total))
        width = (self._bar.ncols or BAR_COLUMNS) - len(description) - 2 * total - LIVE_LINE_SPACE
        self._bar.set_description_str(description, refresh=False)
        self._bar.set_postfix_str(format_metrics(metrics, self._throughput, width), refresh=False)
        self._bar.refresh()

    def _create_bar(self, total: int) -> Any:
        """A bar without tqdm's own speed and time left: it counts from when it is drawn, also after a resume."""
        # Without tqdm's monitor: its thread outlives the bar, and each report refreshes the bar anyway.
        kind, own = importlib.import_module("tqdm").tqdm, {"monitor_interval": 0}
        if not is_in_notebook():
            form = {"bar_format": BAR_FORMAT, "dynamic_ncols": True}
            bar = type("Bar", (kind,), own)(total=total, file=self.stream, **form)
            if (bar.ncols or 0) < 1:  # a terminal that nobody told its size
                bar.dynamic_ncols, bar.ncols, bar.nrows = False, BAR_COLUMNS, None
            return bar
        bar = type("Bar", (kind,), {**own, "display": _make_notebook_display()})
        return bar(total=total, bar_format=BAR_FORMAT, file=io.StringIO(), ncols=BAR_COLUMNS, ascii=False)

    def _write_plain_line(self, metrics: Metrics) -> None:
        now, epoch = self.clock.now(), int(metrics.get("epoch", 0))
        epoch_finished = int(metrics["step"]) == int(metrics["steps"])
        at, last_epoch = self._last_line or (float("-inf"), -1)
        if not epoch_finished and last_epoch == epoch and now - at < PROGRESS_INTERVAL:
            return
        self._last_line = (now, epoch)
        position = f"epoch {epoch + 1}/{self._epochs} step {metrics['step']}/{metrics['steps']}"
        self.on_message(f"{position} {format_metrics(metrics, self._throughput)}")


def _make_notebook_display() -> Callable[..., None]:
    """For `tqdm.display`, which tqdm offers to other front ends: one output of a cell, which each refresh replaces. An
    exported notebook has every state of a line that is rewritten, and one of such an output."""
    handle: Any = None

    def show(bar: Any, *_: object, **__: object) -> None:
        nonlocal handle
        data = {"text/plain": str(bar)}
        if handle is None:
            display = importlib.import_module("IPython.display").display
            handle = display(data, raw=True, display_id=True)
        else:
            handle.update(data, raw=True)

    return show


def format_metrics(metrics: Metrics, throughput: Throughput, width: int | None = None) -> str:
    """Loss, throughput, world size, time left, and other floats that the program reports, as far as they are known.
    width: leaves out what does not fit into so many characters, from the end."""
    loss, world, seconds_left = metrics.get("loss"), metrics.get("world"), throughput.seconds_left
    parts = [
        f"loss {float(loss):.4f}" if loss is not None else "",
        f"{throughput.rows_per_second:,.0f} rows/s" if throughput.rows_per_second > 0 else "",
        f"world {world}" if world is not None else "",
        f"{seconds_left:.0f} s left" if seconds_left is not None else "",
        *(f"{k} {v:.4g}" for k, v in metrics.items() if k not in POSITION_METRICS and isinstance(v, float)),
    ]
    shown = list(filter(None, parts))
    while width is not None and len(shown) > 1 and len(" ".join(shown)) > width:
        shown.pop()
    return " ".join(shown)


def supports_live_line(stream: IO[str]) -> bool:
    """Whether a line can be shown again and again in one place."""
    return is_in_notebook() or stream.isatty()


def is_in_notebook() -> bool:
    """Whether this process is a notebook's kernel; Spark alone imports ipykernel, too."""
    ipython = sys.modules.get("IPython")
    return hasattr(ipython.get_ipython() if ipython is not None else None, "kernel")
