"""A rendezvous server whose driver is the test: what it posts is waited for, what it says is said by hand."""

from __future__ import annotations

import json
import queue
import socket
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from spark_elastic.clock import SystemClock
from spark_elastic.monitoring.job_history import JobHistory, build_status_pages
from spark_elastic.protocol.events import DriverEvent, Received
from spark_elastic.protocol.messages import DriverMessage
from spark_elastic.protocol.types import Fence, Member, Position, World
from spark_elastic.rendezvous import auth
from spark_elastic.rendezvous.addresses import Bind
from spark_elastic.rendezvous.client import RendezvousClient
from spark_elastic.rendezvous.messages import LogLines, Report
from spark_elastic.rendezvous.server import RendezvousServer, ServerCallbacks
from spark_elastic.rendezvous.status_app import StatusApp
from tests.patience import until

KEY = b"0123456789abcdef0123456789abcdef"
ATTEMPT = 7
PATIENCE = 20.0  # seconds that a test waits for what must come
BEAT_EVERY = 0.25  # seconds

E = TypeVar("E", bound=DriverEvent | DriverMessage)
R = TypeVar("R")


def world(
    generation: int, *workers: str, reason: str = "start", positions: tuple[Position | None, ...] = ()
) -> World:
    """A world of `workers` in rank order, each on a host of its own."""
    brought = positions or (None,) * len(workers)
    members = tuple(
        Member(
            worker, worker.rpartition(".")[0], f"host-{rank}", rank, 0, 1, rank, len(workers), brought[rank]
        )
        for rank, worker in enumerate(workers)
    )
    return World(Fence(ATTEMPT, generation), members, None, reason)


@dataclass
class Driver:
    """The server, and everything that it handed on."""

    server: RendezvousServer
    events: queue.Queue[DriverEvent]
    logs: queue.Queue[LogLines]
    reports: queue.Queue[Report]
    _clients: list[RendezvousClient] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)

    @property
    def port(self) -> int:
        return int(self.server.address.rpartition(":")[2])

    def await_event(self, kind: type[E]) -> E:
        """The next event or message of that kind; earlier ones of other kinds are dropped."""
        while True:
            event = self.events.get(timeout=PATIENCE)
            heard = event.message if isinstance(event, Received) else event
            if isinstance(heard, kind):
                return heard

    def client(self, **options: Any) -> RendezvousClient:
        contact = {"address": self.server.address, "key": KEY, "attempt": ATTEMPT}
        options = {**contact, "certificate": self.server.certificate, **options}
        self._clients.append(RendezvousClient(clock=SystemClock(), **options))
        return self._clients[-1]

    def call_in_thread(self, call: Callable[[], R]) -> Future[R]:
        """`call` in a thread of its own."""
        future: Future[R] = Future()

        def run() -> None:
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

        thread = threading.Thread(target=run, name="aside")
        self._threads.append(thread)
        thread.start()
        return future

    def call_in_loop(self, look: Callable[[], R]) -> R:
        """What `look` sees in the server's event loop thread."""
        seen: queue.Queue[R] = queue.Queue()
        self.server._submit(lambda: seen.put(look()))
        return seen.get(timeout=PATIENCE)

    def until_polls(self, number: int) -> None:
        """Returns when the server holds that many long polls open."""
        waiters = self.server._state.waiters
        until(lambda: self.call_in_loop(lambda: len(waiters)) == number)

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self.server.close()
        for thread in self._threads:
            thread.join(PATIENCE)


def start_driver(
    bind: Bind | None = None,
    admit: Callable[[dict[str, Any]], str | None] = lambda facts: None,
    status_app: StatusApp | None = None,
) -> Driver:
    events: queue.Queue[DriverEvent] = queue.Queue()
    logs: queue.Queue[LogLines] = queue.Queue()
    reports: queue.Queue[Report] = queue.Queue()
    recipients = ServerCallbacks(events.put, logs.put, admit, reports.put, lambda slots: BEAT_EVERY)
    server = RendezvousServer(KEY, ATTEMPT, recipients, SystemClock(), bind, status_app)
    server.start()
    return Driver(server, events, logs, reports)


def make_status_app(history: JobHistory | None = None, name: str = "job") -> StatusApp:
    clock = SystemClock()
    return StatusApp(build_status_pages(history or JobHistory(clock), name), clock)


@contextmanager
def serve_pages(
    history: JobHistory | None = None, bind: Bind | None = None, pages: bool = True
) -> Iterator[tuple[RendezvousServer, StatusApp]]:
    """A server without a driver. pages: it shows the status page."""
    status_app = make_status_app(history)
    callbacks = ServerCallbacks(lambda event: None, lambda lines: None)
    shown = status_app if pages else None
    with RendezvousServer(KEY, ATTEMPT, callbacks, SystemClock(), bind, shown) as server:
        yield server, status_app


@dataclass(frozen=True)
class Page:
    """An answer to a GET."""

    status: int
    url: str  # where it came from in the end
    headers: Mapping[str, str]
    text: str


class Visitor:
    """Fetches pages as a browser does: it follows redirects and keeps cookies."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        handlers = [urllib.request.HTTPSHandler(context=context)] if context else []
        self._opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(), *handlers)

    def get(self, url: str, headers: Mapping[str, str] | None = None, method: str = "GET") -> Page:
        request = urllib.request.Request(url, headers=dict(headers or {}), method=method)
        try:
            with self._opener.open(request, timeout=PATIENCE) as answer:
                return Page(answer.status, answer.url, answer.headers, answer.read().decode())
        except urllib.error.HTTPError as error:
            with error:
                return Page(error.code, error.url or url, error.headers, error.read().decode())


def get(url: str, headers: Mapping[str, str] | None = None, method: str = "GET") -> Page:
    """By a visitor that comes for the first time."""
    return Visitor().get(url, headers, method)


def read_all(connection: socket.socket) -> bytes:
    """Everything until the peer closes."""
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


class RawClient:
    """Speaks raw HTTP to the server; with `key` it can sign."""

    def __init__(self, port: int, key: bytes = KEY) -> None:
        self._port = port
        self._key = key
        self._count = 0

    def send(self, text: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", self._port), timeout=PATIENCE) as connection:
            try:
                connection.sendall(text)
                return read_all(connection)
            except (ConnectionResetError, BrokenPipeError):
                return b""  # refused without reading what we sent

    def request(
        self,
        path: str,
        body: bytes,
        header: str | None,
        method: str = "POST",
        more: Mapping[str, str] | None = None,
    ) -> tuple[int, bytes]:
        """Status and body."""
        headers = {"host": "x", "content-length": str(len(body)), "connection": "close", **(more or {})}
        if header is not None:
            headers["authorization"] = header
        head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in headers.items())
        return parse(self.send(head.encode("latin-1") + b"\r\n" + body))

    def session(self) -> str:
        credentials = auth.sign_request(self._key, auth.HELLO, auth.create_id(), 0, b"")
        status, body = self.request(auth.HELLO, b"", credentials.header())
        assert status == 200
        return str(json.loads(body)["session"])

    def sign(self, path: str, body: bytes, session: str | None = None, count: int | None = None) -> str:
        self._count += 1
        number = self._count if count is None else count
        return auth.sign_request(self._key, path, session or self.session(), number, body).header()


def parse(answer: bytes) -> tuple[int, bytes]:
    """Status and body; (0, nothing) where no answer came."""
    if not answer:
        return 0, b""
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), body
