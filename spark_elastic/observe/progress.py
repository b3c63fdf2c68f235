"""The progress of a job for people: a live line on a terminal or in a notebook, plain lines anywhere else.

Implements the narrator that `launch` calls, from several threads: one lock owns the output. Must not know Spark or a
framework, and never blocks on anything but the stream.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Mapping
from typing import IO, Any

from spark_elastic.clock import Clock, SystemClock
from spark_elastic.observe.curve import Speed
from spark_elastic.observe.line_limit import LineLimit

PLAIN_EVERY = 2.0  # seconds between two plain lines
Numbers = Mapping[str, Any]


class Progress:
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
        self._speed = Speed()
        self._limit = LineLimit()

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


def figures(numbers: Numbers, speed: Speed) -> str:
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
