"""An HTTP server on one thread: one request of HTTP/1.1 at a time on each connection, with deadlines and bounds.

One function sees the head of a request before any byte of the body is read, and answers, or gives the function that
answers the body. An answer that waits for a change is a `LongPoll`. When the event loop dies, the next one takes over
the bound socket, so clients only wait; a socket that no longer listens is replaced on the same port. A second socket
may listen on localhost; it is dropped when it breaks.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
import os
import resource
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

from spark_elastic.errors import InvalidInput
from spark_elastic.rendezvous import http1
from spark_elastic.rendezvous.addresses import Bind, listen
from spark_elastic.rendezvous.http1 import HttpRequest, Response
from spark_elastic.rendezvous.sockets import Sockets

log = logging.getLogger("spark_elastic.rendezvous")


# ---- connections


class Subject(Enum):
    WORLD = "a worker's next world"
    UPDATE = "what a worker must know at once"
    COMMANDS = "commands to a slot"
    VALUES = "values of a scope"


Topic: TypeAlias = tuple[Subject, str]  # of which worker, slot or scope


@dataclass(frozen=True, eq=False)
class Wait:
    """How requests of one kind wait for a change."""

    subject: Subject  # of the changes that wake them
    # The reply to a message; None: it goes on waiting. True: it cannot, at its deadline.
    find_reply: Callable[[Any, bool], object]
    # Called once one has ended. Given its message and whether the connection broke, and then whether the network reset
    # it: the kernel of a machine closes the connections of a process that died. None: the connection did not break.
    on_ended: Callable[[Any, bool | None], None] = lambda message, reset: None


@dataclass(eq=False, slots=True)
class LongPoll:
    """A request that waits for a reply, for its deadline, or for the end of its connection: the first one ends it.

    Thousands wait all the time, and Python's garbage collector looks at all that they hold: so it is little."""

    wait: Wait
    name: str  # of the worker, slot or scope that it waits for
    message: Any  # the request
    waiters: Waiters  # wake it
    # Set by the dispatcher:
    hold: float = 0.0  # seconds until its deadline
    credentials: object = None  # of the request
    # Makes the reply, or the error that finding it raises, a response; None: it goes on waiting. True: at its deadline.
    respond: Callable[[LongPoll, bool], Response | None] = lambda poll, is_last: None
    is_woken: bool = False
    connection: Connection | None = None  # None: before it begins, and once it has ended

    def begin(self, connection: Connection) -> None:
        self.connection = connection
        self.waiters.add(self)

    def end(self, reset: bool | None) -> None:
        self.connection = None
        self.waiters.remove(self)
        self.wait.on_ended(self.message, reset)

    def answer(self, is_last: bool) -> None:
        """Answer the request, if there is a reply."""
        self.is_woken = False
        connection = self.connection
        response = None if connection is None else self.respond(self, is_last)
        if connection is not None and response is not None:
            self.end(None)
            connection.send(response)


class AfterPass:
    """A call that the running event loop makes after what it does now: once, however often it was asked for."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._loop: asyncio.AbstractEventLoop | None = None  # that is about to make it

    def request(self) -> None:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # a loop that died will not
            self._loop = loop
            loop.call_soon(self._run)

    def _run(self) -> None:
        self._loop = None
        self._call()


class Waiters:
    """Long polls by topic. A change wakes those that it may concern: thousands of others wait all the time. They look
    for a reply after what the thread does now: several changes at once are one answer."""

    def __init__(self) -> None:
        self._polls: dict[Subject, dict[str, set[LongPoll]]] = {subject: {} for subject in Subject}
        self._woken: deque[LongPoll] = deque()
        self._answering = AfterPass(self._answer_woken)

    def __len__(self) -> int:
        return sum(len(polls) for by_name in self._polls.values() for polls in by_name.values())

    def add(self, poll: LongPoll) -> None:
        self._polls[poll.wait.subject].setdefault(poll.name, set()).add(poll)

    def remove(self, poll: LongPoll) -> None:
        by_name = self._polls[poll.wait.subject]
        by_name[poll.name].discard(poll)
        if not by_name[poll.name]:
            del by_name[poll.name]

    def wake(self, *topics: Topic) -> None:
        for subject, name in topics:
            self._wake(self._polls[subject].get(name, ()))

    def wake_all(self, *subjects: Subject) -> None:
        for subject in subjects:
            for polls in self._polls[subject].values():
                self._wake(polls)

    def _wake(self, polls: Iterable[LongPoll]) -> None:
        for poll in polls:
            if not poll.is_woken:
                poll.is_woken = True
                self._woken.append(poll)
        if self._woken:
            self._answering.request()

    def _answer_woken(self) -> None:
        while self._woken:
            try:
                self._woken.popleft().answer(is_last=False)
            except Exception:  # the others get theirs
                log.exception("a request could not be answered")


AnswerBody = Callable[[bytes], Response | LongPoll]
App = Callable[[HttpRequest], Response | AnswerBody]


@dataclass(frozen=True)
class ConnectionLimits:
    """What one connection, and all that have not authenticated themselves, may take."""

    head_seconds: float = 10.0  # for the head of a request, from its first byte or from the connect
    body_seconds: float = 10.0  # for the body to arrive
    handshake_seconds: float = 10.0  # for TLS to be agreed on
    idle_seconds: float = 600.0  # for which a connection is kept without a request
    unauthenticated: int | None = None  # connections; None: as `max_unauthenticated`


def max_unauthenticated() -> int:
    """Most connections that have not authenticated themselves: a quarter of the files that this process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2048 if soft == resource.RLIM_INFINITY else max(16, min(2048, soft // 4))


class Connection(asyncio.Protocol):
    """A connection: one request at a time, each with deadlines for its head and its body."""

    __slots__ = (
        "_answer_body", "_connections", "_has_body", "_is_encrypted", "_is_in_head", "_is_last", "_length", "_pending",
        "_received", "_socket", "_transport", "deadline", "looked_at", "number",
    )  # fmt: skip

    def __init__(self, connections: Connections, accepted: socket.socket, number: int) -> None:
        self.number = number  # of this connection; none has it twice
        self.deadline = math.inf  # when it has to be looked at, in the loop's time
        self.looked_at = math.inf  # when it will be, not later than that
        self._connections = connections
        self._socket = accepted
        self._transport: asyncio.Transport | None = None  # None: none yet, as before a TLS handshake
        self._received = bytearray()  # not read yet
        self._answer_body: AnswerBody | None = None  # of the newest request, while its body is awaited
        self._length = 0  # of that body
        self._has_body = True  # the answer to the newest request
        self._pending: LongPoll | None = None  # the newest request, while its answer is awaited
        self._is_in_head = True  # the deadline is that of a head
        self._is_last = False  # it closes behind the next response

    # ---- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._is_encrypted = transport.get_extra_info("sslcontext") is not None
        self._set_deadline(self._connections.limits.head_seconds)

    def data_received(self, data: bytes) -> None:
        if self._is_closing():
            return
        self._received += data
        if self._pending is None:
            self._read()
        if self._pending is not None and len(self._received) > http1.MAX_HEAD_BYTES:
            self.abort()  # the job's clients send nothing before they have their answer

    def connection_lost(self, exc: Exception | None) -> None:
        self._set_deadline(None)
        if self._transport is not None:
            self._transport.close()  # Python 3.10 takes one of TLS for open otherwise
        self._connections.forget(self)
        self._end_pending(exc is not None)

    # ---- called by the server

    def finish(self) -> None:
        """Close it behind the answer that is awaited, or now."""
        self._is_last = True
        if self._pending is None:
            if self._transport is not None and self._transport.get_write_buffer_size():
                self._transport.close()  # behind what is being sent
            else:
                self.abort()  # a client that reads nothing answers no end of TLS

    def abandon(self) -> None:
        self._end_pending(None)
        self.abort()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
            return
        with suppress(OSError):  # it has hung up itself
            self._socket.shutdown(socket.SHUT_RDWR)

    def expire(self) -> None:
        """Its deadline has come."""
        if self._pending is not None:
            self._pending.answer(is_last=True)
        elif self._answer_body is None:
            self.abort()
        else:
            self.send(Response(408, is_last=True))

    def send(self, response: Response) -> None:
        """Answer the newest request."""
        assert self._transport is not None
        self._pending = None
        if response.is_authenticated:
            self._connections.unauthenticated.pop(self, None)
        response.is_last = response.is_last or self._is_last
        self._transport.write(response.encode(with_body=self._has_body))
        self._set_deadline(None if response.is_last else self._connections.limits.idle_seconds)
        if response.is_last:
            self._transport.close()
        elif self._received:  # what was sent meanwhile
            self._connections.loop.call_soon(self._read)

    # ---- requests

    def _read(self) -> None:
        while self._pending is None and not self._is_closing():
            if self._answer_body is None:
                if not self._read_head():
                    return
            elif len(self._received) < self._length:
                return
            else:
                body = bytes(self._received[: self._length])
                del self._received[: self._length]
                answer, self._answer_body = self._answer_body, None
                self._set_deadline(None)
                self._take(answer(body))

    def _read_head(self) -> bool:
        end = self._received.find(http1.END_OF_HEAD, 0, http1.MAX_HEAD_BYTES)
        if end < 0 and len(self._received) < http1.MAX_HEAD_BYTES:
            if self._received and not self._is_in_head:
                self._is_in_head = True
                self._set_deadline(self._connections.limits.head_seconds)
            return False
        try:
            request = http1.parse_request(bytes(self._received[: max(0, end)]))
        except http1.MalformedHead as error:
            self._connections.note_refused(str(error))
            self.send(Response(400, is_last=True))
            return False
        del self._received[: end + len(http1.END_OF_HEAD)]
        self._is_in_head = False
        self._length, self._has_body = request.length, request.method != "HEAD"
        self._is_last = self._is_last or request.is_last
        request.is_encrypted = self._is_encrypted
        self._take(self._connections.app(request))
        return True

    def _take(self, answer: Response | LongPoll | AnswerBody) -> None:
        if isinstance(answer, Response):
            self.send(answer)
        elif isinstance(answer, LongPoll):
            self._pending = answer
            self._connections.unauthenticated.pop(self, None)  # only a genuine request waits
            answer.begin(self)
            self._set_deadline(answer.hold)
        else:
            self._answer_body = answer
            if len(self._received) < self._length:
                self._set_deadline(self._connections.limits.body_seconds)

    def _end_pending(self, reset: bool | None) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.end(reset)

    def _is_closing(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def _set_deadline(self, seconds: float | None) -> None:
        """seconds: from now; None: there is no deadline."""
        self._connections.deadlines.set(self, seconds)


class Deadlines:
    """When connections are to be looked at, with one timer for all: each has a deadline that moves with each request,
    and is looked at when an earlier one would have come. So most requests only note a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._connections: dict[int, Connection] = {}  # by number
        self._next: list[tuple[float, int]] = []  # heap: when to look at which one; may be out of date
        self._timer: asyncio.TimerHandle | None = None

    def set(self, connection: Connection, seconds: float | None) -> None:
        """seconds: from now; None: it has no deadline."""
        if seconds is None:
            connection.deadline = math.inf
            return
        connection.deadline = self._loop.time() + seconds
        if connection.deadline < connection.looked_at:
            self._look_at(connection)
            self._set_timer()

    def forget(self, connection: Connection) -> None:
        self._connections.pop(connection.number, None)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look_at(self, connection: Connection) -> None:
        connection.looked_at = connection.deadline
        self._connections[connection.number] = connection
        heapq.heappush(self._next, (connection.deadline, connection.number))

    def _set_timer(self) -> None:
        if self._timer is not None:
            if self._timer.when() <= self._next[0][0]:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(self._next[0][0], self._expire)

    def _expire(self) -> None:
        self._timer = None
        now = self._loop.time()
        try:
            while self._next and self._next[0][0] <= now:
                when, number = heapq.heappop(self._next)
                connection = self._connections.get(number)
                if connection is not None and connection.looked_at == when:
                    self._look(connection, now)
        finally:  # one that fails must not keep the others from being looked at
            if self._next:
                self._set_timer()

    def _look(self, connection: Connection, now: float) -> None:
        del self._connections[connection.number]
        connection.looked_at = math.inf
        if connection.deadline <= now:
            connection.deadline = math.inf
            connection.expire()
        elif connection.deadline < math.inf:
            self._look_at(connection)


# Connections; a whole queue at once could use up the files before the first ones are closed.
ACCEPT_BATCH = 64
UNSERVED_LOG_INTERVAL = 60.0  # seconds between two log lines about requests that are not served
# Seconds until a host that vanished without a word is noticed: 10 + 3 × 5. Leases are quicker; this frees descriptors.
OPTIONS = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3, socket.TCP_NODELAY: 1}


class Connections:
    """All connections of one event loop, from the moment at which they are accepted."""

    def __init__(
        self, app: App, limits: ConnectionLimits, tls: ssl.SSLContext | None, on_empty: Callable[[], None]
    ) -> None:
        """on_empty: called when the last connection is gone."""
        self.app = app
        self.limits = limits
        # Those that have not authenticated themselves, in the order in which they came; also before a TLS handshake.
        self.unauthenticated: dict[Connection, None] = {}
        self.loop = asyncio.get_running_loop()
        self.deadlines = Deadlines(self.loop)
        self._sockets = Sockets(self.loop)
        self._count = 0  # of all connections so far
        self._tls = tls
        self._on_empty = on_empty
        self._all: set[Connection] = set()
        self._handshakes: set[asyncio.Task[None]] = set()
        self._refused = 0  # requests since the last line of the log
        self._next_line = 0.0

    def __len__(self) -> int:
        return len(self._all)

    def accept(self, listener: socket.socket) -> None:
        """Take what waits at `listener`; an OSError: no file can be opened, or it listens no longer."""
        for _ in range(ACCEPT_BATCH):
            try:
                accepted, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            accepted.setblocking(False)
            accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in OPTIONS.items():
                accepted.setsockopt(socket.IPPROTO_TCP, option, value)
            self._count += 1
            connection = Connection(self, accepted, self._count)
            self._all.add(connection)
            self.unauthenticated[connection] = None
            if len(self.unauthenticated) > (self.limits.unauthenticated or max_unauthenticated()):
                first = next(iter(self.unauthenticated))
                del self.unauthenticated[first]
                first.abort()
            if self._tls is None:
                self._sockets.add(accepted, connection)
                continue
            task = self.loop.create_task(self._shake_hands(connection, accepted, self._tls))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _shake_hands(
        self, connection: Connection, accepted: socket.socket, tls: ssl.SSLContext
    ) -> None:
        seconds = self.limits.handshake_seconds
        with suppress(OSError):  # it hung up, or does not speak TLS
            await self.loop.connect_accepted_socket(
                lambda: connection, accepted, ssl=tls, ssl_handshake_timeout=seconds
            )
            return
        self.forget(connection)  # no `connection_lost` follows

    def forget(self, connection: Connection) -> None:
        self.unauthenticated.pop(connection, None)
        self.deadlines.forget(connection)
        self._all.discard(connection)
        if not self._all:
            self._on_empty()

    def note_refused(self, why: str) -> None:
        """Count a request that is no HTTP; their number is logged once per `UNSERVED_LOG_INTERVAL`."""
        self._refused += 1
        now = self.loop.time()
        if now >= self._next_line:
            self._next_line = now + UNSERVED_LOG_INTERVAL
            count, self._refused = self._refused, 0
            log.warning(
                "The driver's server refused %d request%s (the last one: Invalid HTTP, %s). A program outside of the "
                "job connects to its port, which does not affect the job. The next such line follows in %g s or later.",
                count, "" if count == 1 else "s", why, UNSERVED_LOG_INTERVAL,
            )  # fmt: skip

    def finish(self) -> None:
        for connection in tuple(self._all):
            connection.finish()

    async def abandon(self) -> None:
        for connection in tuple(self._all):
            connection.abandon()
        for task in self._handshakes:
            task.cancel()
        await asyncio.gather(*self._handshakes, return_exceptions=True)
        await asyncio.sleep(0)  # their transports close
        self.deadlines.close()
        self._sockets.close()


# ---- the server

RESTART_DELAY = 0.05  # seconds between the death of a loop and the next, doubled while none comes up
MAX_RESTART_DELAY = 1.0  # seconds
ACCEPT_PAUSE = 0.5  # seconds without accepting, once the process can open no more files
CLOSE_TIMEOUT = 10.0
GRACE = 1.0  # seconds for open requests to be answered, once the server closes


@dataclass(eq=False, repr=False)
class HttpServer:
    """Serves `app` on `listener` and, if given, on a `loopback` socket. It owns both."""

    app: App
    listener: socket.socket
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    tls: ssl.SSLContext | None = None
    loopback: socket.socket | None = None

    def __post_init__(self) -> None:
        self._address: tuple[str, int] = self.listener.getsockname()[:2]
        self._calls: deque[Callable[[], None]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connections: Connections | None = None  # of that loop
        self._served = False  # this loop came up
        self._started = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spark-elastic-rendezvous", daemon=True)

    def start(self) -> None:
        """Returns when requests are answered."""
        self._thread.start()
        if not self._started.wait(CLOSE_TIMEOUT):
            self.close()
            raise RuntimeError("the rendezvous server's event loop did not come up")

    def submit(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        self._call_in_loop(self.drain)  # a loop that is not there yet begins by draining

    def close(self) -> None:
        """Let open requests end, then stop the thread and free the port."""
        self._closing.set()
        self._call_in_loop(self._finish)
        if self._thread.ident is not None:
            self._thread.join(CLOSE_TIMEOUT)
        self.listener.close()
        if self.loopback is not None:
            self.loopback.close()

    def _call_in_loop(self, call: Callable[[], None]) -> None:
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # that loop just died
                loop.call_soon_threadsafe(call)

    def drain(self) -> None:
        """Make the submitted calls; in the loop's thread."""
        while self._calls:
            call = self._calls.popleft()
            try:
                call()
            except Exception:  # one bad call must not lose those after it
                log.exception("a call to the rendezvous server failed")

    # ---- the thread

    def _run(self) -> None:
        pause = RESTART_DELAY
        while not self._closing.is_set():
            self._served = False
            try:
                self._run_loop()
            except BaseException:  # whatever killed the loop, SystemExit too: the job needs the next one
                log.exception("the rendezvous server's event loop died")
            pause = RESTART_DELAY if self._served else min(2 * pause, MAX_RESTART_DELAY)
            if not self._closing.wait(pause):
                log.warning("the rendezvous server starts again on the same port")

    def _run_loop(self) -> None:
        if not _is_listening(self.listener):
            self.listener.close()
            self.listener = listen(Bind(*self._address))
        if self.loopback is not None and not _is_listening(self.loopback):
            self.loopback.close()
            self.loopback = None
        loop = self._loop = asyncio.SelectorEventLoop()
        try:
            loop.call_soon(self._begin)
            loop.run_forever()
        finally:
            self._loop = None
            try:
                if self._connections is not None:
                    loop.run_until_complete(self._connections.abandon())
            finally:
                self._connections = None
                loop.close()

    def _begin(self) -> None:
        self._connections = Connections(self.app, self.limits, self.tls, self._on_empty)
        for listener in self._listeners():
            self._watch(listener)
        self.drain()
        self._served = True
        self._started.set()
        if self._closing.is_set():
            self._finish()

    def _listeners(self) -> list[socket.socket]:
        return [self.listener] if self.loopback is None else [self.listener, self.loopback]

    def _watch(self, listener: socket.socket) -> None:
        if self._loop is not None and not self._closing.is_set():
            self._loop.add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        assert self._loop is not None
        assert self._connections is not None
        try:
            self._connections.accept(listener)
        except OSError as error:
            if not _is_listening(listener):
                log.error("the rendezvous server's socket is broken (%s)", error)
                self._loop.stop()
                return
            log.warning("the rendezvous server cannot accept a connection now (%s)", error)
            self._loop.remove_reader(listener)
            self._loop.call_later(ACCEPT_PAUSE, self._watch, listener)

    def _finish(self) -> None:
        if self._loop is None or self._connections is None:
            return
        self._loop.call_later(GRACE, self._loop.stop)
        for listener in self._listeners():
            self._loop.remove_reader(listener)
        self._connections.finish()
        self._on_empty()

    def _on_empty(self) -> None:
        if self._closing.is_set() and self._loop is not None and not self._connections:
            self._loop.stop()


def _is_listening(listener: socket.socket) -> bool:
    try:
        return bool(listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:
        return False  # it was closed


FILES_PER_WORKER = 6  # two long polls, and four requests at the same time
RESERVED_FILES = 256  # for what else the driver's process opens

_reserve_lock = threading.Lock()  # owns _reserved
_reserved: list[int] = []  # workers of each job that runs in this process; not all of them are connected yet


@contextmanager
def reserve_files(workers: int) -> Iterator[None]:
    """Let this process open the files for so many workers' connections beside those of its other jobs, while the block
    runs. Raises InvalidInput: the hard limit forbids it."""
    with _reserve_lock:
        raise_file_limit(workers, sum(_reserved))
        _reserved.append(workers)
    try:
        yield
    finally:
        with _reserve_lock:
            _reserved.remove(workers)


def raise_file_limit(workers: int, others: int = 0) -> None:
    """others: workers of other jobs. Some are connected already, so their need alone is no error."""
    needed = len(os.listdir("/proc/self/fd")) + RESERVED_FILES + FILES_PER_WORKER * workers
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_limited = hard != resource.RLIM_INFINITY
    wanted = needed + FILES_PER_WORKER * others
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if is_limited and hard < needed:
        most = workers - -(-(needed - hard) // FILES_PER_WORKER)
        fewer = f" or set max_workers to {most} or less" if most > 0 else ""
        raise InvalidInput(
            f"The driver may open {hard} files and needs {needed} for {workers} workers' connections: raise its hard "
            f"limit (ulimit -Hn){fewer}."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard) if is_limited else wanted, hard))
