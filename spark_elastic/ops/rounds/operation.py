"""One operation of one rank: its arrays, and the handle by which its result is waited for.

The channel's thread settles it, any other may wait. Nothing here knows how it is carried out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NoReturn

from elastic_collectives import CollectiveError
from elastic_collectives.group import Array
from spark_elastic.clock import Clock
from spark_elastic.ops.rounds.request import Request

POLLED_AGAIN = 0.5  # seconds: who asks more rarely has other things to do meanwhile


@dataclass(frozen=True)
class Desk:
    """What the handles of a channel share. waiting: entered around a wait for other processes."""

    clock: Clock
    waiting: Callable[[], AbstractContextManager[object]] = nullcontext
    news: threading.Condition = field(default_factory=threading.Condition)


class Operation:
    """A handle. `outputs` once done: for allreduce and broadcast the arrays themselves, changed in place; allgather and
    reducescatter one new array for each; alltoall the rows received, and how many came from each rank."""

    def __init__(
        self,
        request: Request,
        arrays: Sequence[Array],
        desk: Desk,
        progress: Callable[[Operation], None],
        splits: list[int] | None = None,
    ) -> None:
        self.request = request
        self.arrays = tuple(arrays)
        self.splits = splits
        self.label = request.name or f"unnamed {request.kind}"
        self.asked = desk.clock.now()
        self.announced = self.asked
        self.outputs: tuple[Array, ...] = ()
        self._desk = desk
        self._progress = progress
        self._waited_from: float | None = None
        self._polled: float | None = None  # last
        self._waits = False
        self._done = False
        self._error: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether `wait` returns or raises at once."""
        return self._done

    def wait(self) -> tuple[Array, ...]:
        """Wait until it is done, driving rounds meanwhile. The channel's deadlines bound the wait.

        Raises:
            CollectiveError: it failed, or the world broke. Any other: this rank itself could not carry it out.
        """
        if not self._done:
            self._waits = True
            self._waited_from = self._waited_from or self._desk.clock.now()
            with self._desk.waiting():
                self._progress(self)
        if self._error is not None:
            raise_again(self._error)
        return self.outputs

    def poll(self) -> bool:
        """Whether it is done. A caller that polls again and again counts as waiting: see `waited`."""
        if not self._done:
            self._polled = self._desk.clock.now()
            self._waited_from = self._waited_from or self._polled
        return self._done

    def waited(self, now: float) -> float:
        """Seconds since somebody first waited for it or polled; 0 if nobody did."""
        return 0.0 if self._waited_from is None else now - self._waited_from

    def is_awaited(self, now: float) -> bool:
        """Whether a thread is blocked on it now, or polled within the last POLLED_AGAIN seconds."""
        return self._waits or (self._polled is not None and now - self._polled < POLLED_AGAIN)

    def settle(self, outputs: tuple[Array, ...] = (), error: Exception | None = None) -> None:
        """Set its outputs or its error. Called by the channel."""
        with self._desk.news:
            if not self._done:
                self.outputs, self._error, self._done = outputs, error, True
                self._desk.news.notify_all()


def raise_again(error: Exception) -> NoReturn:
    """Raise an error that several callers are told of. For a group's end each gets an error of its own; any other
    keeps the traceback of its origin."""
    if isinstance(error, CollectiveError):
        raise type(error)(error.ranks, error.reason)
    raise error
