"""The rendezvous server of a job: takes the driver's decisions in, and posts what workers and slots send.

The driver's calls come from its loop thread and return at once; all state belongs to the HTTP server's thread.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import logging
import threading
from collections import deque
from collections.abc import Callable

from spark_elastic.clock import Clock
from spark_elastic.errors import InvalidInput
from spark_elastic.protocol.types import Fence, MembershipVersion, SlotId, WorkerId, World
from spark_elastic.rendezvous.connections import AnswerBody
from spark_elastic.rendezvous.dispatcher import Dispatcher
from spark_elastic.rendezvous.http1 import Request, Response
from spark_elastic.rendezvous.http_server import Bind, HttpServer, format_address, listen, listen_on_loopback
from spark_elastic.rendezvous.messages import LogLines
from spark_elastic.rendezvous.routes import Routes, ServerCallbacks
from spark_elastic.rendezvous.server_state import ServerState
from spark_elastic.rendezvous.status_app import StatusApp

log = logging.getLogger("spark_elastic.rendezvous")

MAX_PENDING = 16 << 20  # characters
CLOSE_TIMEOUT = 2.0


class LogForwarder:
    """Delivers workers' output in order, from a thread of its own, so that a blocked terminal does not delay the
    server.

    It holds `max_pending` characters at most. When the reader is too slow, the newest lines are dropped and counted.
    """

    def __init__(self, deliver: Callable[[LogLines], None], max_pending: int = MAX_PENDING) -> None:
        self._deliver = deliver
        self._max_pending = max_pending
        self._changed = threading.Condition()  # guards the five below
        self._queue: deque[LogLines] = deque()
        self._pending = 0  # characters in `_queue`
        self._dropped = 0  # lines since the last one that was taken
        self._last_dropped: LogLines | None = None  # whose they were last, without lines
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="spark-elastic-logs", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, message: LogLines) -> None:
        """Take a message or drop it; never blocks."""
        size = _size(message)
        with self._changed:
            if self._pending + size > self._max_pending:
                self._dropped += len(message.lines)
                self._last_dropped = dataclasses.replace(message, lines=())
                return
            message = dataclasses.replace(message, lines=(*self._note_dropped(), *message.lines))
            self._queue.append(message)
            self._pending += _size(message)
            self._changed.notify()

    def close(self) -> None:
        """Deliver what waits, for CLOSE_TIMEOUT at most; a reader that blocks longer is left to itself."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_TIMEOUT)

    def _run(self) -> None:
        while (message := self._next()) is not None:
            try:
                self._deliver(message)
            except Exception:  # a reader's defect must not end the stream
                log.exception("handing on the output of %s failed", message.worker)

    def _next(self) -> LogLines | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            if self._queue:
                message = self._queue.popleft()
                self._pending -= _size(message)
                return message
            if self._last_dropped is None or not self._dropped:
                return None
            # None was taken after those
            return dataclasses.replace(self._last_dropped, lines=self._note_dropped())

    def _note_dropped(self) -> tuple[str, ...]:
        """The line that tells of dropped ones, once; under the lock."""
        dropped, self._dropped = self._dropped, 0
        return (f"[{dropped} lines were dropped: they came faster than they were read]",) if dropped else ()


def _size(message: LogLines) -> int:
    return sum(map(len, message.lines))


MIN_KEY_BYTES = 16


class RendezvousServer:
    """The driver's server. Its methods may be called from any thread and return at once."""

    def __init__(
        self,
        key: bytes,
        attempt: int,
        callbacks: ServerCallbacks,
        clock: Clock,
        bind: Bind | None = None,
        status_app: StatusApp | None = None,
    ) -> None:
        """
        Args:
            key: the job's secret.
            attempt: of the run; requests of another attempt are answered as stale (R10, fence).
            status_app: serves the status page, on localhost too; None: no page.
        """
        if len(key) < MIN_KEY_BYTES:
            raise InvalidInput(
                f"The job's key has {len(key)} bytes; it needs {MIN_KEY_BYTES} random ones at least."
            )
        self._bind = bind or Bind()
        if self._bind.advertise is None and _is_wildcard(self._bind.host):
            raise InvalidInput(
                f"The driver binds every interface ({self._bind.host}) and cannot tell which address executors "
                "reach: set advertise_address or spark.driver.host."
            )
        self._state = ServerState(attempt)
        self._logs = LogForwarder(callbacks.on_logs)
        # Workers' output leaves the event loop's thread through `_logs`.
        routes = Routes(self._state, dataclasses.replace(callbacks, on_logs=self._logs.put), clock)
        self._status_app = status_app
        self._dispatcher = Dispatcher(key, attempt, routes.handlers())
        self._http_server: HttpServer | None = None
        self._address = ""

    def start(self) -> None:
        """Bind and serve.

        Raises:
            InvalidInput: the address cannot be bound.
        """
        listener = listen(self._bind)
        self._address = format_address(self._bind, listener)
        certificate = self._bind.certificate
        tls = certificate.context if certificate else None
        loopback = listen_on_loopback(listener) if self._status_app is not None else None
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
    def address(self) -> str:
        """What clients dial: "host:port", or "[host]:port" for IPv6."""
        return self._address

    @property
    def certificate(self) -> str | None:
        """What clients must see, PEM; None where the server speaks plain HTTP."""
        return self._bind.certificate.public if self._bind.certificate else None

    @property
    def url(self) -> str:
        """The server's url, without a path."""
        return f"{'https' if self._bind.certificate else 'http'}://{self._address}"

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
        """Tell the worker and its slot that it shall end."""
        self._submit(lambda: self._state.stop_worker(worker, reason, kill))

    def release_slot(self, slot: SlotId, reason: str) -> None:
        """Tell the slot to end its worker and return."""
        self._submit(lambda: self._state.release_slot(slot, reason))

    def end(self, reason: str) -> None:
        """The job is over: every open and later request is answered with the end."""
        self._submit(lambda: self._state.end(reason))

    def _answer(self, request: Request) -> Response | AnswerBody:
        if self._status_app is not None and self._status_app.handles(request):
            return self._status_app.answer(request)
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
