"""HTTP server on one thread that outlives crashes of its event loop; its connections are in `connections.py`.

When a loop dies, the next one takes over the bound socket, so clients only wait; a socket that no longer listens is
replaced on the same port. A second socket may listen on localhost; it is dropped when it breaks.
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
from dataclasses import dataclass, field

from spark_elastic.errors import InvalidInput
from spark_elastic.rendezvous.auth import Certificate
from spark_elastic.rendezvous.connections import App, ConnectionLimits, Connections

log = logging.getLogger("spark_elastic.rendezvous")

LOOPBACK = "127.0.0.1"
BACKLOG = 2048  # connections that the kernel holds until they are accepted


@dataclass(frozen=True)
class Bind:
    host: str = LOOPBACK  # a name or an IPv4 or IPv6 address of this machine; brackets around it do not count
    port: int = 0  # 0: any free one
    advertise: str | None = None  # what clients dial instead of `host`
    certificate: Certificate | None = None  # None: plain HTTP


def listen(bind: Bind) -> socket.socket:
    """A listening socket; `InvalidInput`: the address is not one of this machine, or the port is taken."""
    try:
        host, passive = bind.host.strip("[]"), socket.AI_PASSIVE
        answers = socket.getaddrinfo(host, bind.port, type=socket.SOCK_STREAM, flags=passive)
        family, kind, protocol, _, address = answers[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
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
    """On the same port of localhost, where proxies of notebooks connect; None if it is taken, as by `listener`."""
    try:
        return listen(Bind(LOOPBACK, listener.getsockname()[1]))
    except InvalidInput:
        return None


def format_address(bind: Bind, listener: socket.socket) -> str:
    """What clients of `listener` dial: "host:port", or "[host]:port" for IPv6."""
    host, port = (bind.advertise or bind.host).strip("[]"), listener.getsockname()[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


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
        self._call_in_loop(self._drain)  # a loop that is not there yet begins by draining

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

    def _drain(self) -> None:
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
        self._drain()
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
