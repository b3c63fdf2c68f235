"""The progress of a job for people: a live line on a terminal or in a notebook, plain lines anywhere else.

Implements the narrator that `launch` calls, from several threads: one lock owns the output. Must not know Spark or a
framework, and never blocks on anything but the stream.
"""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import IO, Any

from spark_elastic.clock import Clock, SystemClock
from spark_elastic.monitoring.report import Throughput

# Keeps one worker that prints much from drowning all others: so many lines a second each, with a count of the rest.
#
# Pure: times are arguments.


RATE = 50.0  # lines a second of each worker
BURST = 500.0


@dataclass
class _Allowance:
    lines: float
    at: float
    left_out: int = 0


class LineRateLimiter:
    """A number of lines that each name may print, refilled as time goes on."""

    def __init__(self, rate: float = RATE, burst: float = BURST) -> None:
        self._rate = rate
        self._burst = burst
        self._allowances: dict[str, _Allowance] = {}

    def pass_on(self, now: float, who: str, line: str) -> tuple[str, ...]:
        """The line, after a note on those left out before it; nothing where the allowance is used up."""
        mine = self._allowances.setdefault(who, _Allowance(self._burst, now))
        mine.lines = min(self._burst, mine.lines + self._rate * (now - mine.at))
        mine.at = now
        if mine.lines < 1:
            mine.left_out += 1
            return ()
        mine.lines -= 1
        missed, mine.left_out = mine.left_out, 0
        return (f"{missed} lines were left out", line) if missed else (line,)

    def left_out(self) -> list[tuple[str, int]]:
        """Whose lines were left out since their last one that was shown, and how many."""
        return [(who, mine.left_out) for who, mine in self._allowances.items() if mine.left_out]


PLAIN_EVERY = 2.0  # seconds between two plain lines
Numbers = Mapping[str, Any]


class ProgressListener:
    """Shows epoch, step, loss and world size. `numbers` come from rank 0: epoch, step, steps, loss, rows, world.

    epochs: of the whole run. stream: default standard error. live: a line that is rewritten in place; default where
    the stream is a terminal, or in a notebook. listener: also called with each `numbers`. lines: show what workers
    print.
    """

    def __init__(
        self,
        epochs: int,
        *,
        stream: IO[str] | None = None,
        live: bool | None = None,
        listener: Callable[[Numbers], None] | None = None,
        clock: Clock | None = None,
        quiet: bool = False,
        lines: bool = True,
    ) -> None:
        self._epochs = epochs
        self._stream = sys.stderr if stream is None else stream
        self._live = _suits_live(self._stream) if live is None else live
        self._listener = listener
        self._clock = clock or SystemClock()
        self._quiet = quiet
        self._lines = lines
        self._lock = threading.RLock()
        self._bar: Any = None
        self._last: tuple[float, int] | None = None  # of the last plain line: when, and which epoch
        self._speed = Throughput()
        self._limit = LineRateLimiter()

    def log(self, rank: int | None, line: str) -> None:
        """A line that a worker printed."""
        if not self._lines:
            return
        with self._lock:
            who = "-" if rank is None else str(rank)
            for shown in self._limit.pass_on(self._clock.now(), who, line):
                self._say(f"[{who}] {shown}")

    def world(self, size: int, reason: str) -> None:
        """It is told with its cost, once it stands."""

    def tell(self, text: str) -> None:
        """A change of the world, or another sentence for people."""
        self._say(text)

    def progress(self, numbers: Numbers) -> None:
        """Where rank 0 stands."""
        if self._listener is not None:
            self._listener(numbers)
        if self._quiet or "step" not in numbers or "steps" not in numbers:
            return
        with self._lock:
            self._speed.add(self._clock.now(), {"epochs": self._epochs, **numbers})
            if self._live:
                self._redraw(numbers)
            else:
                self._plain(numbers)

    def close(self) -> None:
        """Leave the last state of the live line on the screen."""
        with self._lock:
            for who, count in self._limit.left_out():
                self._say(f"[{who}] {count} lines were left out")
            if self._bar is not None:
                self._bar.close()
                self._bar = None

    def _say(self, text: str) -> None:
        if self._quiet:
            return
        with self._lock:
            if self._bar is not None:
                self._bar.write(text, file=self._stream)
            else:
                self._stream.write(text + "\n")
                self._stream.flush()

    def _redraw(self, numbers: Numbers) -> None:
        steps = int(numbers["steps"])
        if self._bar is None:
            # Without tqdm's monitor, a thread that outlives the bar and whose work each report does already.
            bar = type("Bar", (importlib.import_module("tqdm.auto").tqdm,), {"monitor_interval": 0})
            self._bar = bar(total=self._epochs * steps, unit="step", file=self._stream, dynamic_ncols=True)
        self._bar.n = int(numbers.get("epoch", 0)) * steps + int(numbers["step"])
        self._bar.set_description_str(
            f"epoch {int(numbers.get('epoch', 0)) + 1}/{self._epochs}", refresh=False
        )
        self._bar.set_postfix_str(figures(numbers, self._speed), refresh=False)
        self._bar.refresh()

    def _plain(self, numbers: Numbers) -> None:
        now, epoch = self._clock.now(), int(numbers.get("epoch", 0))
        finished = int(numbers["step"]) == int(numbers["steps"])
        if (
            self._last is not None
            and not finished
            and self._last[1] == epoch
            and now - self._last[0] < PLAIN_EVERY
        ):
            return
        self._last = (now, epoch)
        where = f"epoch {epoch + 1}/{self._epochs} step {numbers['step']}/{numbers['steps']}"
        self._stream.write(f"{where} {figures(numbers, self._speed)}\n")
        self._stream.flush()


PLACE = ("epoch", "epochs", "step", "steps", "rows", "loss", "world", "checkpoint_seconds")


def figures(numbers: Numbers, speed: Throughput) -> str:
    """Loss, whatever else the program reports as a float, speed, world and time left, as far as they are known."""
    loss, world, left = numbers.get("loss"), numbers.get("world"), speed.seconds_left
    others = (f"{k} {v:.4g}" for k, v in numbers.items() if k not in PLACE and isinstance(v, float))
    parts = [
        f"loss {float(loss):.4f}" if loss is not None else "",
        *others,
        f"{speed.rows_per_second:,.0f} rows/s" if speed.rows_per_second > 0 else "",
        f"world {world}" if world is not None else "",
        f"{left:.0f} s left" if left is not None else "",
    ]
    return " ".join(part for part in parts if part)


def _suits_live(stream: IO[str]) -> bool:
    """A terminal or a notebook."""
    return "ipykernel" in sys.modules or stream.isatty()


# What workers of a function or script print, on one stream: a narrator, called from several threads.


log = logging.getLogger("spark_elastic")

COUNTED = {"step", "world"}  # of each job


class OutputListener:
    """Lines prefixed with their rank, and with the time of day where wanted; one lock owns the stream."""

    def __init__(
        self,
        stream: IO[str],
        clock: Clock,
        timestamps: bool,
        worlds: bool,
        lines: bool,
        limit: LineRateLimiter | None = None,
    ) -> None:
        """worlds: tell of each new world. lines: show what workers print. limit: of their lines, None for all."""
        self._stream = stream
        self._clock = clock
        self._timestamps = timestamps
        self._worlds = worlds
        self._lines = lines
        self._limit = limit
        self._pending: Mapping[str, Any] | None = None
        self._next_line = 0.0
        self._nobody_reads = False  # the pipe's other end was closed, as by `head`
        self._lock = threading.Lock()

    def log(self, rank: int | None, line: str) -> None:
        if not self._lines:
            return
        who = "-" if rank is None else str(rank)
        with self._lock:
            for shown in (
                (line,) if self._limit is None else self._limit.pass_on(self._clock.now(), who, line)
            ):
                self._write(f"[{who}] {shown}")

    def progress(self, numbers: Mapping[str, Any]) -> None:
        """What it reports by itself; commits alone are no news."""
        if not self._worlds or not (numbers.keys() - COUNTED):
            return
        with self._lock:
            self._pending = numbers
            if self._clock.now() >= self._next_line:
                self._next_line = self._clock.now() + PLAIN_EVERY
                self._show()

    def world(self, size: int, reason: str) -> None:
        """It is told with its cost, once it stands."""

    def tell(self, text: str) -> None:
        if self._worlds:
            with self._lock:
                self._write(text)

    def close(self) -> None:
        """Say what was left out last."""
        with self._lock:
            self._show()
            for who, count in () if self._limit is None else self._limit.left_out():
                self._write(f"[{who}] {count} lines were left out")

    def _show(self) -> None:
        numbers, self._pending = self._pending, None
        if numbers is not None:
            step = f"step {numbers['step']} " if "step" in numbers else ""
            self._write(f"{step}{figures(numbers, Throughput())}")

    def _write(self, text: str) -> None:
        if self._timestamps:
            text = f"{datetime.fromtimestamp(self._clock.wall()).astimezone().isoformat(timespec='seconds')} {text}"
        if self._nobody_reads:
            return
        try:
            self._stream.write(_writable(text, self._stream) + "\n")
            self._stream.flush()
        except BrokenPipeError:
            self._nobody_reads = True
            log.warning("nobody reads what workers print any more; the job goes on")


def _writable(text: str, stream: IO[str]) -> str:
    """What the stream's encoding lacks is told by its number."""
    encoding = getattr(stream, "encoding", None)
    return text if encoding is None else text.encode(encoding, "backslashreplace").decode(encoding)
