"""HTTP server for an ASGI application, on one thread that outlives crashes of its event loop.

The server owns the listening socket, the thread and the event loop. When an event loop dies, the next one takes over
the bound socket, so the port never changes and clients only wait; a socket that no longer listens is replaced on the
same port. A second socket may listen on localhost; it is dropped when it breaks. Other threads pass calls by `submit`,
which never blocks; the calls run in the loop thread, in order, in the present loop or the next one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import ssl
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from spark_elastic.errors import InvalidInput
from spark_elastic.rendezvous.auth import Certificate

# Seconds until a host that vanished without a word is noticed: 10 + 3 × 5. Leases are quicker; this frees descriptors.
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}

log = logging.getLogger("spark_elastic.rendezvous")

# Keys in a request's scope. The first value is called once the sender has authenticated itself; the second one returns
# whether the network broke the connection, as opposed to the end of the sender's process.
AUTHENTICATED = "spark_elastic.authenticated"
RESET = "spark_elastic.reset"
MAX_UNAUTHENTICATED = 2048
UNSERVED_LOG_INTERVAL = 60.0  # seconds between two log lines about requests that are not served


def max_unauthenticated() -> int:
    """Most connections that have not authenticated themselves: a quarter of the files that this process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        MAX_UNAUTHENTICATED
        if soft == resource.RLIM_INFINITY
        else max(16, min(MAX_UNAUTHENTICATED, soft // 4))
    )


def mark_authenticated(scope: Scope) -> None:
    """The sender of this request has authenticated itself."""
    if AUTHENTICATED in scope:
        scope[AUTHENTICATED]()


def was_reset(scope: Scope) -> bool:
    """Whether the connection of this request, which has ended, was reset or timed out. One whose sender died was closed
    by that machine's kernel."""
    return RESET in scope and bool(scope[RESET]())


def enable_keepalive(connection: socket.socket) -> None:
    """Let the kernel probe a silent peer, as far as the system can."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class _CoalescingTransport:
    """A transport that sends head and body of an answer by one system call: the call is a third of its cost."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._unsent: list[bytes] = []

    def write(self, data: bytes) -> None:
        if not self._unsent:
            self._loop.call_soon(self._send)
        self._unsent.append(data)

    def close(self) -> None:
        self._send()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _send(self) -> None:
        if self._unsent:
            unsent, self._unsent = self._unsent, []
            self._transport.write(b"".join(unsent))


if TYPE_CHECKING:
    _LoggerAdapter = logging.LoggerAdapter[logging.Logger]
else:  # Python 3.10 has it without parameters
    _LoggerAdapter = logging.LoggerAdapter


class _ConnectionLog(_LoggerAdapter):
    """uvicorn's log of all connections of one server. Its warnings are about connections that are no request of the job
    (no HTTP, WebSockets): it counts them and logs their number once per `UNSERVED_LOG_INTERVAL`. Loop thread only."""

    def __init__(self) -> None:
        super().__init__(logging.getLogger("uvicorn.error"), {})
        self._ignored = 0  # requests since the last line
        self._next_line = 0.0

    @property
    def level(self) -> int:
        return self.logger.level

    def warning(self, msg: object, *arguments: object, **named: object) -> None:
        self._ignored += 1
        now = asyncio.get_running_loop().time()
        if now >= self._next_line:
            self._next_line = now + UNSERVED_LOG_INTERVAL
            count, self._ignored = self._ignored, 0
            log.warning(
                "The driver's server refused %d request%s (the last one: %s). A program outside of the job "
                "connects to its port, which does not affect the job. The next such line follows in %g s or later.",
                count, "" if count == 1 else "s", str(msg).partition(". ")[0].rstrip("."), UNSERVED_LOG_INTERVAL,
            )  # fmt: skip


# h11: httptools in its place saved nothing measurable, since only system calls are left.
class Connection(H11Protocol):
    """A connection with a deadline: it closes itself if the head of a request is incomplete `head_seconds` after the
    first byte (or the connect).

    Connections that have not authenticated themselves are counted from `on_accepted` on, before anything is read and
    before any TLS handshake. With more than `max_unauthenticated` of them, the oldest is closed.
    """

    head_seconds: ClassVar[float] = 10.0
    max_unauthenticated = staticmethod(max_unauthenticated)

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._head_deadline: asyncio.TimerHandle | None = None
        self._is_connected = False  # it has a transport; of a TLS connection, since the handshake
        self._was_reset = False  # it ended by an error
        self._unauthenticated: dict[Connection, socket.socket] = vars(self.server_state).setdefault(
            "unauthenticated", {}
        )
        self._served, self.app = self.app, self._serve_request
        self.logger = vars(self.server_state).setdefault("log", _ConnectionLog())

    def on_accepted(self, connection: socket.socket) -> None:
        """The event loop has it from the listening socket."""
        self._unauthenticated[self] = connection
        if len(self._unauthenticated) > self.max_unauthenticated():
            first = next(iter(self._unauthenticated))
            first._abort(self._unauthenticated.pop(first))

    def on_handshake_done(self) -> None:
        """Its transport stands, or never will: no `connection_lost` follows a TLS handshake that failed."""
        if not self._is_connected:
            self._unauthenticated.pop(self, None)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._is_connected = True
        super().connection_made(cast("asyncio.Transport", _CoalescingTransport(transport, self.loop)))
        enable_keepalive(transport.get_extra_info("socket"))
        self._start_head_timer()

    def data_received(self, data: bytes) -> None:
        if self._is_idle() and self._head_deadline is None:
            self._start_head_timer()
        super().data_received(data)
        if not self._is_idle():
            self._cancel_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_head_timer()
        self._unauthenticated.pop(self, None)
        self._was_reset = exc is not None
        super().connection_lost(exc)

    async def _serve_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[AUTHENTICATED] = lambda: self._unauthenticated.pop(self, None)
        scope[RESET] = lambda: self._was_reset
        await self._served(scope, receive, send)

    def _abort(self, connection: socket.socket) -> None:
        if self._is_connected:
            self.transport.abort()
            return
        with suppress(OSError):  # it has hung up itself
            connection.shutdown(socket.SHUT_RDWR)

    def _is_idle(self) -> bool:
        """No request of this connection is being answered."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is None or cycle.response_complete

    def _start_head_timer(self) -> None:
        self._head_deadline = self.loop.call_later(self.head_seconds, self.transport.abort)

    def _cancel_head_timer(self) -> None:
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None


RESTART_DELAY = 0.05  # seconds between the death of a loop and the next, doubled while none comes up
MAX_RESTART_DELAY = 1.0  # seconds
CLOSE_TIMEOUT = 10.0
HANDSHAKE_TIMEOUT = 10.0  # for TLS to be agreed on
ACCEPT_BATCH = 64  # connections
IDLE_SECONDS = 600  # an idle connection is kept so long
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Bind:
    """Where a server listens."""

    host: str = LOOPBACK  # a name or an IPv4 or IPv6 address of this machine; brackets around it do not count
    port: int = 0  # 0: any free one
    advertise: str | None = None  # what clients dial instead of `host`
    certificate: Certificate | None = None  # None: plain HTTP


def listen(bind: Bind) -> socket.socket:
    """A listening socket.

    Raises:
        InvalidInput: the address is not one of this machine, or the port is taken.
    """
    try:
        host = bind.host.strip("[]")
        found = socket.getaddrinfo(host, bind.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(2048)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise InvalidInput(
            f"The driver cannot listen on {bind.host} port {bind.port} ({error}): "
            "set bind_address to an address of this machine and driver_port to a free port or 0."
        ) from error
    listener.setblocking(False)
    return listener


def listen_on_loopback(listener: socket.socket) -> socket.socket | None:
    """Listen on the same port of localhost, where proxies of notebooks connect.

    None if `listener` covers localhost already, or if another process listens on that port.
    """
    try:
        return listen(Bind(LOOPBACK, listener.getsockname()[1]))
    except InvalidInput:
        return None


def format_address(bind: Bind, listener: socket.socket) -> str:
    """What clients of `listener` dial: "host:port", or "[host]:port" for IPv6."""
    host, port = (bind.advertise or bind.host).strip("[]"), listener.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class _UvicornRun(uvicorn.Server):
    """One run of uvicorn. Calls `on_startup` once it serves."""

    def __init__(self, config: uvicorn.Config, on_startup: Callable[[], None]) -> None:
        super().__init__(config)
        self.servers = []
        self._on_startup = on_startup

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_startup()


class _EventLoop(asyncio.SelectorEventLoop):
    """An event loop that limits TLS handshakes to `HANDSHAKE_TIMEOUT`, and calls connections when they are accepted.

    asyncio calls a protocol only after the TLS handshake. The loop accepts a few connections at a time: a
    whole queue at once could use up the process's files before the first ones are closed.
    """

    async def create_server(self, *arguments: Any, **named: Any) -> asyncio.Server:
        if named.get("ssl") is not None:
            named["ssl_handshake_timeout"] = HANDSHAKE_TIMEOUT
        return await super().create_server(*arguments, **named)

    def _accept_connection(
        self, factory: Any, sock: Any, tls: Any = None, server: Any = None, backlog: int = 100, *more: Any
    ) -> None:
        super()._accept_connection(factory, sock, tls, server, min(backlog, ACCEPT_BATCH), *more)  # type: ignore[misc]

    def _make_socket_transport(self, sock: socket.socket, protocol: Any, *more: Any, **named: Any) -> Any:
        _notify_accepted(sock, protocol, named.get("waiter"))
        return super()._make_socket_transport(sock, protocol, *more, **named)  # type: ignore[misc]

    def _make_ssl_transport(self, rawsock: socket.socket, protocol: Any, *more: Any, **named: Any) -> Any:
        _notify_accepted(rawsock, protocol, named.get("waiter"))
        return super()._make_ssl_transport(rawsock, protocol, *more, **named)  # type: ignore[misc]


def _notify_accepted(
    connection: socket.socket, protocol: Any, handshake: asyncio.Future[None] | None
) -> None:
    if isinstance(protocol, Connection):
        protocol.on_accepted(connection)
        if handshake is not None:
            handshake.add_done_callback(lambda _: protocol.on_handshake_done())


class HttpServer:
    """Serves `app` on `listener` and, if given, on a `loopback` socket. It owns both."""

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        connection: type[Connection] = Connection,
        tls: ssl.SSLContext | None = None,
        loopback: socket.socket | None = None,
    ) -> None:
        self._app = app
        self._tls = tls
        self._connection = connection
        self._listener = listener
        self._loopback = loopback
        self._address: tuple[str, int] = listener.getsockname()[:2]
        self._calls: deque[Callable[[], None]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._uvicorn: _UvicornRun | None = None
        self._served = False  # this loop came up
        self._started = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="spark-elastic-rendezvous", daemon=True)

    def start(self) -> None:
        """Returns when requests are answered.

        Raises:
            RuntimeError: the event loop did not come up.
        """
        self._thread.start()
        if not self._started.wait(CLOSE_TIMEOUT):
            self.close()
            raise RuntimeError("the rendezvous server's event loop did not come up")

    def submit(self, call: Callable[[], None]) -> None:
        """Run `call` in the loop thread; any thread, never blocks."""
        self._calls.append(call)
        loop = self._loop
        if loop is not None:
            try:
                loop.call_soon_threadsafe(self._drain)
            except RuntimeError:
                pass  # that loop just died; the next one begins by draining

    def close(self) -> None:
        """Let open requests end, then stop the thread and free the port."""
        self._closing.set()
        server = self._uvicorn
        if server is not None:
            server.should_exit = True
        if self._thread.ident is not None:
            self._thread.join(CLOSE_TIMEOUT)
        self._listener.close()
        if self._loopback is not None:
            self._loopback.close()

    def _drain(self) -> None:
        while self._calls:
            call = self._calls.popleft()
            try:
                call()
            except Exception:  # one bad call must not lose those after it
                log.exception("a call to the rendezvous server failed")

    def _on_started(self) -> None:
        self._drain()
        self._served = True
        self._started.set()
        if self._closing.is_set() and self._uvicorn is not None:
            self._uvicorn.should_exit = True

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

    def _on_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """asyncio would try for ever to accept from a socket that is broken."""
        loop.default_exception_handler(context)
        if isinstance(context.get("exception"), OSError) and not all(map(_is_listening, self._listeners())):
            loop.stop()

    def _listeners(self) -> list[socket.socket]:
        return [self._listener] if self._loopback is None else [self._listener, self._loopback]

    def _run_loop(self) -> None:
        if not _is_listening(self._listener):
            self._listener.close()
            self._listener = listen(Bind(*self._address))
        if self._loopback is not None and not _is_listening(self._loopback):
            self._loopback.close()
            self._loopback = None
        config = uvicorn.Config(
            self._app,
            loop="asyncio",
            http=self._connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=1,
            h11_max_incomplete_event_size=16384,
        )
        config.load()
        config.ssl = self._tls
        server = self._uvicorn = _UvicornRun(config, self._on_started)
        loop = self._loop = _EventLoop()
        loop.set_exception_handler(self._on_error)
        listeners = [listener.dup() for listener in self._listeners()]
        try:
            loop.run_until_complete(server.serve(sockets=listeners))
        finally:
            self._loop = None
            try:
                _dispose(loop, server)
            finally:
                for listener in listeners:
                    listener.close()


def _is_listening(listener: socket.socket) -> bool:
    try:
        return bool(listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    except OSError:
        return False  # it was closed


def _dispose(loop: asyncio.AbstractEventLoop, server: _UvicornRun) -> None:
    """Free the sockets and tasks of a loop that has ended, also after an exception."""
    try:
        loop.run_until_complete(_abort_connections(server))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


async def _abort_connections(server: _UvicornRun) -> None:
    for listening in server.servers:
        listening.close()
    for connection in list(server.server_state.connections):
        connection.transport.abort()
    # In the same breath: a request that saw its transport break before this would take its peer for lost.
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# Connections: two long polls, and heartbeats, log lines, reports and a request for a world at the same time.
FILES_PER_WORKER = 6
RESERVED_FILES = 256  # for what else the driver's process opens


_reserve_lock = threading.Lock()  # owns _reserved
# Workers of each job that runs in this process; not all of them are connected yet.
_reserved: list[int] = []


@contextmanager
def reserve_files(workers: int) -> Iterator[None]:
    """Have room for so many workers' connections beside those of this process's other jobs, while the block runs.

    Raises:
        InvalidInput: as `raise_file_limit`.
    """
    with _reserve_lock:
        raise_file_limit(workers, sum(_reserved))
        _reserved.append(workers)
    try:
        yield
    finally:
        with _reserve_lock:
            _reserved.remove(workers)


def raise_file_limit(workers: int, others: int = 0) -> None:
    """Raise this process's soft limit to what the server needs for so many workers, where it is lower.

    Args:
        others: workers of other jobs. Some are connected already, so their need alone is no error.

    Raises:
        InvalidInput: the hard limit forbids it.
    """
    needed = len(os.listdir("/proc/self/fd")) + RESERVED_FILES + FILES_PER_WORKER * workers
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = needed + FILES_PER_WORKER * others
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        most = max(1, workers - -(-(needed - hard) // FILES_PER_WORKER))
        raise InvalidInput(
            f"The driver may open {hard} files and needs {needed} for {workers} workers' connections: raise its hard "
            f"limit (ulimit -Hn) or set max_workers to {most} or less."
        )
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
    )
