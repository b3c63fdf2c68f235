"""The client of slots and workers: sends requests to the driver, proves the job's key, and checks the proof of replies.

Any number of threads may share one. All requests are idempotent, so it dials again after a broken connection until its
time is over. Proxies of the environment are not used.
"""

from __future__ import annotations

import json
import select
import socket
import ssl
import threading
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from spark_elastic.clock import LONGEST_PAUSE, Clock
from spark_elastic.errors import (
    ConnectionClosed,
    DriverUnreachable,
    InvalidInput,
    StaleGeneration,
    Unauthorized,
)
from spark_elastic.protocol.messages import DriverRequest
from spark_elastic.rendezvous import auth, codec, http1
from spark_elastic.rendezvous.addresses import split_address
from spark_elastic.rendezvous.messages import (
    MAX_ANSWER_BYTES,
    MAX_BODY_BYTES,
    MAX_POLL_SECONDS,
    VERSION,
    path_of,
    reply_of,
)

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 10.0  # how long one try waits for an answer, beyond the hold of a long poll
MIN_TRY_SECONDS = 0.05  # a try that begins gets at least so long
KEEP_SECONDS = 300.0  # for which an idle connection is used again
RETRY_DELAYS = (0.01, 0.05, 0.2, 0.5)  # seconds before dialling again; the last one repeats
POLL_SHARE = 2 / 3  # of the time that is left, the most that a long poll may be held

R = TypeVar("R")


class TransportError(Exception):
    """No answer: connecting failed, the connection broke, or the time was over."""


class Connection:
    """A connection to the driver: one request at a time, each signed within the session that a hello has opened."""

    def __init__(self, address: str, key: bytes, sock: socket.socket) -> None:
        self.socket = sock
        self.idle_since = 0.0
        self._address = address
        self._key = key
        self.session = auth.create_id()  # at first the nonce of the hello
        self._count = 0
        self._is_last = False  # the driver closes it

    def send_hello(self, seconds: float) -> None:
        self.session = str(self.post(auth.HELLO, b"", seconds)["session"])

    def post(self, path: str, body: bytes, seconds: float) -> Any:
        """The driver's answer (JSON), proven to be its own. seconds: how long it may be silent."""
        credentials = auth.sign_request(self._key, path, self.session, self._count, body)
        self._count += 1
        self.socket.settimeout(seconds)
        signed = (("authorization", credentials.header()),)
        self.socket.sendall(http1.encode_request(path, self._address, signed, body))
        status, fields, text = self._receive_answer()
        signature = fields.get(auth.REPLY_HEADER)
        if status == 401 and path == auth.HELLO:
            raise Unauthorized(f"The driver at {self._address} does not accept this job's key.")
        if status not in (200, 400) and signature is None:
            raise TransportError(f"HTTP status {status}")
        if not auth.reply_is_genuine(self._key, credentials, status, text, signature or ""):
            raise Unauthorized(f"Whatever answers at {self._address} does not hold this job's key.")
        return json.loads(text)

    def is_usable(self) -> bool:
        """Nothing has come since the last answer, neither an end nor what nobody asked for."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN)
        return not self._is_last and not poll.poll(0)

    def _receive_answer(self) -> tuple[int, http1.Fields, bytes]:
        received = bytearray()
        while (end := received.find(http1.END_OF_HEAD)) < 0:
            if len(received) > http1.MAX_HEAD_BYTES:
                raise TransportError("what came is not HTTP")
            self._receive_into(received)
        try:
            status, fields, length = http1.parse_response(bytes(received[:end]))
        except http1.MalformedHead as error:
            raise TransportError(f"what came is not HTTP: {error}") from None
        if length > MAX_ANSWER_BYTES:  # whoever answers has proved nothing yet
            raise TransportError(f"an answer of {length} bytes was announced")
        del received[: end + len(http1.END_OF_HEAD)]
        while len(received) < length:
            self._receive_into(received)
        self._is_last = fields.get("connection") == "close"
        return status, fields, bytes(received)

    def _receive_into(self, received: bytearray) -> None:
        part = self.socket.recv(65536)
        if not part:
            raise TransportError("the connection was closed before the answer")
        received += part


@dataclass(eq=False, repr=False)
class RendezvousClient(AbstractContextManager["RendezvousClient"]):
    """Sends requests to one driver, over connections that it keeps for later ones."""

    address: str  # "host:port"
    key: bytes
    attempt: int
    clock: Clock
    timeout: float = 30.0
    certificate: str | None = None  # the only one to accept, PEM; None: plain HTTP

    def __post_init__(self) -> None:
        self._context = auth.create_pinned_context(self.certificate) if self.certificate else None
        self._last_answered = float("-inf")
        self._closing = threading.Event()
        self._lock = threading.Lock()  # guards the three below
        self._idle: list[Connection] = []
        self._sockets: set[socket.socket] = set()  # of all connections
        self._broken: frozenset[str] = frozenset()  # of which the driver has not been told

    def ask(
        self,
        request: DriverRequest[R],
        hold: float = 0.0,
        within: float | None = None,
        patience: float = ANSWER_SECONDS,
    ) -> R:
        """Sends the request and returns the reply; dials again until the time is over.

        Args:
            hold: seconds for which the server may hold a long poll. It is reduced to MAX_POLL_SECONDS and to 2/3 of
                the remaining time.
            within: seconds until the request must be answered. Without it, `timeout` begins when the first hold is
                over.
            patience: seconds that the first try waits for an answer beyond the hold, and each later one twice as long
                as the one before, up to ANSWER_SECONDS. A firewall that has forgotten a connection answers nothing.

        Raises:
            DriverUnreachable: no answer in that time; names host:port.
            Unauthorized: one side does not prove the job's key, or another certificate was shown.
            StaleGeneration: the request belongs to a driver's attempt or a generation that is over.
            InvalidInput: the driver refuses the request's form or size.
            ConnectionClosed: `close` was called.
        """
        hold = min(hold, MAX_POLL_SECONDS, self.timeout * POLL_SHARE)
        deadline = self.clock.now() + (self.timeout + hold if within is None else within)
        tries = 0  # those that failed so far
        while True:
            sent = self.clock.now()
            left = deadline - sent
            hold_seconds = max(0.0, min(hold, left * POLL_SHARE))  # a silent driver is noticed in time
            broken = self._broken
            body = self._build_envelope(request, hold_seconds, broken)
            seconds = max(MIN_TRY_SECONDS, min(hold_seconds + min(ANSWER_SECONDS, patience * 2**tries), left))
            failure, answer = None, None
            try:
                answer = self._post(path_of(type(request)), body, seconds)
            except TransportError as error:
                failure = error
            # A try that took longer was stopped together with its process: no silence of the driver.
            took = self.clock.now() - sent
            if took > seconds + LONGEST_PAUSE:
                sent, deadline = sent + took - seconds, deadline + took
                self._last_answered = max(self._last_answered, sent)
            if failure is not None:
                self._pause(tries, deadline, failure)
                tries += 1
                continue
            with self._lock:
                self._broken -= broken
            if isinstance(answer, dict):
                if "stale" in answer:
                    raise StaleGeneration(str(answer["stale"]))
                raise InvalidInput(str(answer["error"]))
            self._last_answered = max(self._last_answered, sent)
            return codec.read(reply_of(type(request)), answer)

    def close(self) -> None:
        """Free every waiting thread at once; later requests raise `ConnectionClosed`. Any thread, repeatedly."""
        self._closing.set()
        with self._lock:
            idle, self._idle = self._idle, []
            for sock in self._sockets:
                with suppress(OSError):  # the peer was first
                    # Closing a descriptor would not wake who reads it, and an SSLSocket's own shutdown forgets its TLS
                    # while another thread reads through it.
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)
        for connection in idle:
            self._drop(connection.socket)

    def __exit__(self, *exception: object) -> None:
        self.close()

    def now(self) -> float:
        return self.clock.now()

    def last_answered_at(self) -> float:
        """When the newest answered request was sent, by when the driver is sure to have lived: R18 (publication)."""
        return self._last_answered

    def _build_envelope(self, request: DriverRequest[Any], hold: float, broken: frozenset[str]) -> bytes:
        envelope = {"v": VERSION, "attempt": self.attempt, "hold": hold, "message": request}
        body = codec.dumps({**envelope, "broken": sorted(broken)} if broken else envelope)
        if len(body) > MAX_BODY_BYTES:  # the driver would hang up while it is still being sent
            raise InvalidInput(f"The driver refuses a request of {len(body)} bytes as too large.")
        return body

    def _pause(self, tries: int, deadline: float, error: TransportError) -> None:
        """Before the next try; raises when there is no time for one."""
        pause = RETRY_DELAYS[min(tries, len(RETRY_DELAYS) - 1)]
        if self.clock.now() + pause > deadline:
            raise DriverUnreachable(
                f"The driver's rendezvous server at {self.address} does not answer ({error}): let executors reach "
                "that host and port, or set advertise_address and driver_port to what they reach."
            ) from error
        if self._closing.wait(pause):
            raise _closed()

    # ---- connections

    def _post(self, path: str, body: bytes, seconds: float) -> Any:
        """The driver's answer (JSON); raises `TransportError` if there was none. seconds: how long it may be silent."""
        deadline = self.clock.now() + seconds
        try:
            connection = self._take_idle() or self._dial(seconds)
            try:
                answer = connection.post(path, body, max(MIN_TRY_SECONDS, deadline - self.clock.now()))
            except BaseException:
                with self._lock:
                    self._broken |= {connection.session}
                self._drop(connection.socket)
                raise
        except ssl.SSLCertVerificationError:
            message = f"Whatever answers at {self.address} does not show this job's certificate."
            raise Unauthorized(message) from None
        except (OSError, TransportError) as error:
            if self._closing.is_set():
                raise _closed() from None
            raise TransportError(str(error) or type(error).__name__) from error
        connection.idle_since = self.clock.now()
        with self._lock:
            self._idle.append(connection)
        if self._closing.is_set():
            self.close()  # which did not see this one
        return answer

    def _take_idle(self) -> Connection | None:
        while True:
            with self._lock:
                if self._closing.is_set():
                    raise _closed()
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if self.clock.now() < connection.idle_since + KEEP_SECONDS and connection.is_usable():
                return connection
            self._drop(connection.socket)

    def _dial(self, seconds: float) -> Connection:
        host, port = split_address(self.address)
        sock = socket.create_connection((host, port), min(seconds, CONNECT_SECONDS))
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._context is not None:
                sock = self._context.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
            with self._lock:
                if self._closing.is_set():
                    raise _closed()
                self._sockets.add(sock)
            if isinstance(sock, ssl.SSLSocket):
                sock.do_handshake()
            connection = Connection(self.address, self.key, sock)
            connection.send_hello(min(seconds, ANSWER_SECONDS))
        except BaseException:
            self._drop(sock)
            raise
        return connection

    def _drop(self, sock: socket.socket) -> None:
        with self._lock:
            self._sockets.discard(sock)
        sock.close()


def _closed() -> ConnectionClosed:
    return ConnectionClosed("The connection to the driver was closed on this side.")
