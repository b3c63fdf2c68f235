"""HTTP server on one thread with an event loop, which other threads pass calls by `submit`: it never blocks.

The connections themselves are in `connections.py`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import ssl
import threading
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


CLOSE_TIMEOUT = 10.0
GRACE = 1.0  # seconds for open requests to be answered, once the server closes
ACCEPT_PAUSE = 0.5  # seconds without accepting, once the process can open no more files


@dataclass(eq=False, repr=False)
class HttpServer:
    """Serves `app` on `listener` and, if given, on a `loopback` socket. It owns both."""

    app: App
    listener: socket.socket
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    tls: ssl.SSLContext | None = None
    loopback: socket.socket | None = None

    def __post_init__(self) -> None:
        self._listeners = [self.listener] if self.loopback is None else [self.listener, self.loopback]
        self._loop: asyncio.AbstractEventLoop | None = None  # after `start`
        self._connections: Connections | None = None  # of that loop
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="spark-elastic-rendezvous", daemon=True)

    def start(self) -> None:
        self._loop = asyncio.SelectorEventLoop()
        self._loop.call_soon(self._begin)
        self._thread.start()

    def submit(self, call: Callable[[], None]) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # it is closed
                self._loop.call_soon_threadsafe(call)

    def close(self) -> None:
        """Let open requests end, then stop the thread and free the port."""
        self.submit(self._finish)
        if self._thread.ident is not None:
            self._thread.join(CLOSE_TIMEOUT)
        for listener in self._listeners:
            listener.close()

    # ---- the thread

    def _run(self) -> None:
        assert self._loop is not None
        try:
            self._loop.run_forever()
            if self._connections is not None:
                self._loop.run_until_complete(self._connections.abandon())
        finally:
            self._loop.close()

    def _begin(self) -> None:
        self._connections = Connections(self.app, self.limits, self.tls, self._on_empty)
        for listener in self._listeners:
            self._watch(listener)

    def _watch(self, listener: socket.socket) -> None:
        if self._loop is not None and not self._is_closing:
            self._loop.add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        assert self._loop is not None
        assert self._connections is not None
        try:
            self._connections.accept(listener)
        except OSError as error:
            log.warning("the rendezvous server cannot accept a connection now (%s)", error)
            self._loop.remove_reader(listener)
            self._loop.call_later(ACCEPT_PAUSE, self._watch, listener)

    def _finish(self) -> None:
        assert self._loop is not None
        self._is_closing = True
        self._loop.call_later(GRACE, self._loop.stop)
        for listener in self._listeners:
            self._loop.remove_reader(listener)
        if self._connections is not None:
            self._connections.finish()
        self._on_empty()

    def _on_empty(self) -> None:
        if self._is_closing and self._loop is not None and not self._connections:
            self._loop.stop()


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
