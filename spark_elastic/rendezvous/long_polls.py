"""Long polls: requests whose answers wait for a change. Owned by the server's event loop thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from spark_elastic.rendezvous.http1 import Response


@dataclass(eq=False)
class LongPoll:
    """A request that waits for a reply, for its deadline, or for the end of its connection: the first one ends it."""

    waiters: Waiters  # wake it
    topic: Topic  # of what it waits for
    find_reply: Callable[[], object]  # the reply; None: it goes on waiting
    get_last_reply: Callable[[], object]  # the reply at its deadline
    # Called once it has ended. Given whether the connection broke, and then whether the network reset it: the kernel of
    # a machine closes the connections of a process that died. None: the connection did not break.
    on_ended: Callable[[bool | None], None] = lambda reset: None
    # Set by the dispatcher:
    hold: float = 0.0  # seconds until its deadline
    # Makes the reply that a call gives, or the error that it raises, a response; None, if it gives None.
    respond: Callable[[Callable[[], object]], object] = lambda compute: None

    def start(self, send: Callable[[Response], None]) -> None:
        """Wait; `send` is called once, unless `cancel` is called before."""
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._is_woken = False
        self._timer = self._loop.call_later(self.hold, self._end_with, self.get_last_reply)
        self.waiters.add(self.topic, self)

    def wake(self) -> None:
        """Look for a reply, after what this thread does now: several changes at once are one answer."""
        if not self._is_woken:
            self._is_woken = True
            self._loop.call_soon(self._look)

    def cancel(self, reset: bool | None) -> None:
        """The connection is over. reset: as for `on_ended`."""
        self._timer.cancel()
        self.waiters.remove(self.topic, self)
        self.on_ended(reset)

    def _look(self) -> None:
        self._is_woken = False
        if not self._timer.cancelled():
            self._end_with(self.find_reply)

    def _end_with(self, compute: Callable[[], object]) -> None:
        response = self.respond(compute)
        if isinstance(response, Response):
            self.cancel(None)
            self._send(response)


class Subject(Enum):
    """What a long poll waits for."""

    WORLD = "a worker's next world"
    UPDATE = "what a worker must know at once"
    COMMANDS = "commands to a slot"
    VALUES = "values of a scope"


Topic: TypeAlias = tuple[Subject, str]  # of which worker, slot or scope


class Waiters:
    """Long polls by topic. A change wakes those that it may concern: thousands of others wait all the time."""

    def __init__(self) -> None:
        self._polls: dict[Subject, dict[str, set[LongPoll]]] = {subject: {} for subject in Subject}

    def __len__(self) -> int:
        return sum(len(polls) for by_name in self._polls.values() for polls in by_name.values())

    def add(self, topic: Topic, poll: LongPoll) -> None:
        self._polls[topic[0]].setdefault(topic[1], set()).add(poll)

    def remove(self, topic: Topic, poll: LongPoll) -> None:
        by_name = self._polls[topic[0]]
        polls = by_name.get(topic[1], set())
        polls.discard(poll)
        if not polls:
            by_name.pop(topic[1], None)

    def wake(self, *topics: Topic) -> None:
        for subject, name in topics:
            for poll in self._polls[subject].get(name, ()):
                poll.wake()

    def wake_all(self, *subjects: Subject) -> None:
        for subject in subjects:
            for polls in self._polls[subject].values():
                for poll in polls:
                    poll.wake()
