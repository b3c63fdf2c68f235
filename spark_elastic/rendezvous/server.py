"""The rendezvous server of a job: takes the driver's decisions in, and posts what workers and slots send.

The driver's calls come from its loop thread and return at once; all state belongs to the HTTP server's thread.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from spark_elastic.clock import Clock
from spark_elastic.errors import InvalidInput
from spark_elastic.protocol.types import Fence, MembershipVersion, SlotId, WorkerId, World
from spark_elastic.rendezvous.connections import AnswerBody
from spark_elastic.rendezvous.http1 import HttpRequest, Response
from spark_elastic.rendezvous.http_server import Bind, HttpServer, format_address, listen, listen_on_loopback
from spark_elastic.rendezvous.messages import LogLines
from spark_elastic.rendezvous.routes import Dispatcher, Routes, ServerCallbacks
from spark_elastic.rendezvous.server_state import ServerState
from spark_elastic.rendezvous.status_app import StatusApp

log = logging.getLogger("spark_elastic.rendezvous")

MAX_PENDING = 16 << 20  # characters
CLOSE_TIMEOUT = 2.0


class LogForwarder:
    """Delivers workers' output in order, from a thread of its own, so that a blocked terminal does not delay the
    server. It holds `max_pending` characters; when the reader is too slow, the newest lines are dropped and counted."""

    def __init__(self, deliver: Callable[[LogLines], None], max_pending: int = MAX_PENDING) -> None:
        self._deliver = deliver
        self._max_pending = max_pending
        self._queue: queue.SimpleQueue[LogLines | None] = queue.SimpleQueue()  # None ends the thread
        self._put = self._taken = 0  # characters so far; one thread counts each
        self._dropped = 0  # lines since the last one that was taken
        self._last_dropped: LogLines | None = None  # whose they were last
        self._thread = threading.Thread(target=self._run, name="spark-elastic-logs", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, message: LogLines) -> None:
        """Take a message or drop it; never blocks. The server's thread."""
        if self._put - self._taken + _count_characters(message) > self._max_pending:
            self._dropped += len(message.lines)
            self._last_dropped = message
        else:
            self._enqueue(message, message.lines)

    def close(self) -> None:
        """Deliver what waits, for CLOSE_TIMEOUT at most; a reader that blocks longer is left to itself."""
        if self._last_dropped is not None and self._dropped:  # none was taken after those
            self._enqueue(self._last_dropped, ())
        self._queue.put(None)
        if self._thread.ident is not None:
            self._thread.join(CLOSE_TIMEOUT)

    def _enqueue(self, message: LogLines, lines: tuple[str, ...]) -> None:
        """The lines, behind one that tells of those that were dropped."""
        dropped, self._dropped = self._dropped, 0
        if dropped:
            lines = (f"[{dropped} lines were dropped: they came faster than they were read]", *lines)
        message = dataclasses.replace(message, lines=lines)
        self._put += _count_characters(message)
        self._queue.put(message)

    def _run(self) -> None:
        for message in iter(self._queue.get, None):
            self._taken += _count_characters(message)
            try:
                self._deliver(message)
            except Exception:  # a reader's defect must not end the stream
                log.exception("handing on the output of %s failed", message.worker)


def _count_characters(message: LogLines) -> int:
    return sum(map(len, message.lines))


MIN_KEY_BYTES = 16


@dataclass(eq=False, repr=False)
class RendezvousServer:
    """The driver's server. Its methods may be called from any thread and return at once."""

    key: bytes  # the job's secret
    attempt: int  # of the run; requests of another attempt are answered as stale (R10, fence)
    callbacks: ServerCallbacks
    clock: Clock
    bind: Bind | None = None  # None: any port of localhost
    status_app: StatusApp | None = None  # serves the status page, on localhost too; None: no page

    def __post_init__(self) -> None:
        if len(self.key) < MIN_KEY_BYTES:
            raise InvalidInput(
                f"The job's key has {len(self.key)} bytes; it needs {MIN_KEY_BYTES} random ones at least."
            )
        self._bind = self.bind or Bind()
        if self._bind.advertise is None and _is_wildcard(self._bind.host):
            raise InvalidInput(
                f"The driver binds every interface ({self._bind.host}) and cannot tell which address executors "
                "reach: set advertise_address or spark.driver.host."
            )
        self._state = ServerState(self.attempt)
        self._logs = LogForwarder(self.callbacks.on_logs)
        # Workers' output leaves the event loop's thread through `_logs`.
        routes = Routes(self._state, dataclasses.replace(self.callbacks, on_logs=self._logs.put), self.clock)
        self._dispatcher = Dispatcher(self.key, self.attempt, routes.handlers())
        self._http_server: HttpServer | None = None
        self.address = ""  # what clients dial: "host:port", or "[host]:port" for IPv6

    def start(self) -> None:
        """Bind and serve; `InvalidInput`: the address cannot be bound."""
        listener = listen(self._bind)
        self.address = format_address(self._bind, listener)
        certificate = self._bind.certificate
        tls = certificate.context if certificate else None
        loopback = listen_on_loopback(listener) if self.status_app is not None else None
        self._http_server = HttpServer(self._answer, listener, tls=tls, loopback=loopback)
        self._http_server.start()
        self._logs.start()

    def close(self) -> None:
        """Answer every open request with the end, and stop; the port is free afterwards."""
        if self._http_server is not None:
            self.end("the driver has closed")
            self._http_server.close()
            self._logs.close()

    def __enter__(self) -> RendezvousServer:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def certificate(self) -> str | None:
        """What clients must see, PEM; None where the server speaks plain HTTP."""
        return self._bind.certificate.public if self._bind.certificate else None

    @property
    def url(self) -> str:
        return f"{'https' if self._bind.certificate else 'http'}://{self.address}"

    def publish(self, world: World) -> None:
        """Answer the requests of its members for it, now and later, and open its exchange."""
        self._submit(lambda: self._state.publish(world))

    def abort(self, fence: Fence, reason: str) -> None:
        """That generation is over: wake its watchers and close its exchange."""
        self._submit(lambda: self._state.abort(fence, reason))

    def announce(self, version: MembershipVersion) -> None:
        """Tell every watcher the newest membership version."""
        self._submit(lambda: self._state.announce(version))

    def stop_worker(self, worker: WorkerId, reason: str, kill: bool = False) -> None:
        self._submit(lambda: self._state.stop_worker(worker, reason, kill))

    def release_slot(self, slot: SlotId, reason: str) -> None:
        self._submit(lambda: self._state.release_slot(slot, reason))

    def end(self, reason: str) -> None:
        """The job is over: every open and later request is answered with the end."""
        self._submit(lambda: self._state.end(reason))

    def _answer(self, request: HttpRequest) -> Response | AnswerBody:
        if self.status_app is not None and self.status_app.handles(request):
            return self.status_app.answer(request)
        return self._dispatcher(request)

    def _submit(self, call: Callable[[], None]) -> None:
        if self._http_server is None:
            raise RuntimeError("start() the rendezvous server first")
        self._http_server.submit(call)


def _is_wildcard(host: str) -> bool:
    try:
        return not host or ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False
