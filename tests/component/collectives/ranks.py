"""Ranks of the real engine, one process each, kept over many tests: a test takes some and gives them calls.

A call is a function of `calls.py`; it runs in the rank's main thread, where Ctrl-C arrives. A second thread of the
rank reads what the test says, so that it can abort while the main thread is blocked.
"""

from __future__ import annotations

import itertools
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from socket import socketpair
from typing import Any

import psutil

from elastic_collectives import CollectiveError, Endpoint, Group, connect
from tests.leaks import SessionOwned
from tests.patience import until
from tests.sources import ROOT

KEY = b"the key of the tests"
PATIENCE = 120.0  # seconds after which an answer is missing, on a busy machine


@dataclass(frozen=True)
class Failed:
    """How a call ended that raised."""

    kind: str
    ranks: tuple[int, ...]
    reason: str


@dataclass
class Member:
    """What a rank's process holds; the first argument of every call."""

    endpoint: Endpoint
    group: Group | None = None

    @property
    def live(self) -> Group:
        assert self.group is not None
        return self.group


def serve(descriptor: int) -> None:
    """The life of a rank's process: ends with the test's end of the pipe."""
    pipe = Connection(descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Ctrl-C is for calls: it waits for the next one.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    tasks: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...]]] = queue.SimpleQueue()
    member = Member(Endpoint(KEY))
    pipe.send(member.endpoint.address)
    threading.Thread(target=_listen, args=(pipe, member, tasks), daemon=True).start()
    while True:
        function, arguments = tasks.get()
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            answer = function(member, *arguments)
        except CollectiveError as error:
            answer = Failed(type(error).__name__, error.ranks, error.reason)
        except (Exception, KeyboardInterrupt) as error:
            answer = Failed(type(error).__name__, (), str(error))
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        pipe.send(answer)


def _listen(pipe: Connection, member: Member, tasks: queue.SimpleQueue[Any]) -> None:
    while True:
        try:
            message = pipe.recv()
        except (EOFError, OSError):
            os._exit(0)  # the main thread may be blocked in a collective
        if isinstance(message, str):
            member.live.abort(message)
        else:
            tasks.put(message)


class Rank:
    """A test's handle of one process."""

    def __init__(self) -> None:
        ours, theirs = socketpair()
        code = f"from tests.component.collectives.ranks import serve; serve({theirs.fileno()})"
        paths = os.pathsep.join([str(ROOT), str(ROOT / "python")])
        environment, shared = {**os.environ, "PYTHONPATH": paths}, [theirs.fileno()]
        self.process = subprocess.Popen([sys.executable, "-c", code], pass_fds=shared, env=environment)
        theirs.close()
        self.pipe = Connection(ours.detach())
        self._address: str | None = None
        self._due = 1  # answers, its address the first
        self._killed = False

    @property
    def spoilt(self) -> bool:
        return self._killed or self.process.poll() is not None or self._due > 0

    @property
    def address(self) -> str:
        if self._address is None:
            self._address = self.answer()
        return self._address

    def call(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._due += 1
        self.pipe.send((function, arguments))

    def abort(self, reason: str) -> None:
        self.pipe.send(reason)

    def answer(self) -> Any:
        assert self.pipe.poll(PATIENCE), f"rank with pid {self.process.pid} does not answer"
        self._due -= 1
        return self.pipe.recv()

    def send_signal(self, number: int) -> None:
        # Peers hear of its end before the process can be waited for.
        self._killed |= number == signal.SIGKILL
        self.process.send_signal(number)

    def await_stopped(self) -> None:
        """Until a SIGSTOP that the process sends itself has come to work."""
        until(lambda: psutil.Process(self.process.pid).status() == psutil.STATUS_STOPPED, PATIENCE)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.pipe.close()


@dataclass
class Pool:
    """All ranks of the session; dead ones are replaced when they are needed."""

    owned: SessionOwned
    ranks: list[Rank] = field(default_factory=list)
    generations: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def take(self, count: int) -> list[Rank]:
        """That many live ranks; what an earlier test has spoilt is replaced."""
        for rank in [rank for rank in self.ranks if rank.spoilt]:
            rank.close()
            self.ranks.remove(rank)
        with self.owned.adopt():
            while len(self.ranks) < count:
                self.ranks.append(Rank())
            for rank in self.ranks:
                assert rank.address
        return self.ranks[:count]

    def world(
        self, ranks: Sequence[Rank], timeout: float = 30.0, hosts: Sequence[int] = ()
    ) -> tuple[int, int]:
        """Make the next generation's group of these ranks; returns its fence.

        hosts: how many ranks each host has that they are to take themselves to be on; none: sockets alone.
        """
        fence = (1, next(self.generations))
        everybody = [rank.address for rank in ranks]
        for number, rank in enumerate(ranks):
            rank.call(join, number, everybody, fence, timeout, local_ranks(number, hosts))
        assert answers(ranks) == [None] * len(ranks)
        return fence

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


def local_ranks(rank: int, hosts: Sequence[int]) -> list[int] | None:
    """Those on the rank's host, of hosts with that many ranks each."""
    for end, count in zip(itertools.accumulate(hosts), hosts, strict=True):
        if rank < end:
            return list(range(end - count, end))
    return None


def join(member: Member, rank: int, everybody: list[str], *how: Any) -> None:
    """how: fence, timeout, local ranks."""
    if member.group is not None:
        member.group.close()
    blobs = [address.encode() for address in everybody]
    fence, timeout, local = how
    place = rank, len(blobs), fence
    member.group = connect(member.endpoint, *place, lambda own: blobs, timeout, local_ranks=local)


def call_all(ranks: Sequence[Rank], function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call on all ranks and return the answers in rank order."""
    for rank in ranks:
        rank.call(function, *arguments)
    return answers(ranks)


def answers(ranks: Sequence[Rank]) -> list[Any]:
    return [rank.answer() for rank in ranks]
