"""The client of slots and workers: sends requests to the driver, proves the job's key, and checks the proof of replies.

Synchronous. Any number of threads may share a client; `close` releases the threads that wait. All requests are
idempotent, so after a broken connection the client dials again until its time is over.
"""

from __future__ import annotations

import json
import socket
import ssl
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import httpx

from spark_elastic.clock import Clock
from spark_elastic.errors import (
    ConnectionClosed,
    DriverUnreachable,
    InvalidInput,
    PeersMissing,
    StaleGeneration,
    Unauthorized,
)
from spark_elastic.protocol.messages import Request
from spark_elastic.rendezvous import auth, codec
from spark_elastic.rendezvous.messages import (
    MAX_POLL_SECONDS,
    VERSION,
    DriverClient,
    ExchangeAddresses,
    path_of,
    reply_of,
)

CONNECT_SECONDS = 5.0


class TransportClosed(Exception):
    """`close` was called."""


class TransportError(Exception):
    """No answer: connecting failed, the connection broke, or the time was over."""


class CertificateMismatch(Exception):
    """The server showed another certificate than the expected one."""


class HttpTransport:
    """HTTP/1.1 POSTs to one address. Any number of threads may share it and its connections, and `close` ends them all.

    It uses httpx's transport without its client, which would read proxies from the environment and log each request.
    """

    def __init__(self, address: str, certificate: str | None = None) -> None:
        """
        Args:
            address: "host:port".
            certificate: the only one to accept, PEM; None: plain HTTP.
        """
        self._url = httpx.URL(f"{'https' if certificate else 'http'}://{address}")
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._active = 0  # requests under way; the last one to end after `close` frees the connections
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._transport = httpx.HTTPTransport(
            trust_env=False,
            verify=auth.create_pinned_context(certificate) if certificate else False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=300),
        )

    def post(self, path: str, headers: Mapping[str, str], body: bytes, seconds: float) -> httpx.Response:
        """The response, read whole. seconds: how long the server may be silent.

        Raises:
            TransportError: there was none.
            CertificateMismatch: another certificate was shown.
            TransportClosed: `close` was called before or meanwhile.
        """
        timeout = {
            "connect": min(seconds, CONNECT_SECONDS),
            "read": seconds,
            "write": seconds,
            "pool": seconds,
        }
        request = httpx.Request(
            "POST",
            self._url.copy_with(path=path),
            headers=headers,
            content=body,
            extensions={"timeout": timeout, "trace": self._trace},
        )
        with self._count_request():
            try:
                response = self._transport.handle_request(request)
                response.read()
                return response
            except (httpx.HTTPError, OSError) as error:
                if self._closed.is_set():
                    raise TransportClosed from None
                if _is_certificate_mismatch(error):
                    raise CertificateMismatch from error
                raise TransportError(str(error) or type(error).__name__) from error

    def close(self) -> None:
        """Free every thread that waits in `post`, at once; any thread, any number of times."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            for connection in self._sockets:
                _shut_down(connection)
            idle = self._active == 0
        if idle:
            self._transport.close()

    @contextmanager
    def _count_request(self) -> Iterator[None]:
        with self._lock:
            if self._closed.is_set():
                raise TransportClosed
            self._active += 1
        try:
            yield
        finally:
            with self._lock:
                self._active -= 1
                last = self._closed.is_set() and self._active == 0
            if last:
                self._transport.close()

    def _trace(self, name: str, info: dict[str, Any]) -> None:
        """Learn of each new connection: closing a descriptor does not wake who reads it, a shutdown does."""
        if name not in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            return
        connection = info["return_value"].get_extra_info("socket")
        with self._lock:
            self._sockets.add(connection)
            if self._closed.is_set():
                _shut_down(connection)


def _is_certificate_mismatch(error: BaseException | None) -> bool:
    """What OpenSSL said lies below the errors of two libraries."""
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error is not None


def _shut_down(connection: socket.socket) -> None:
    try:
        # Not an SSLSocket's own shutdown: that forgets its TLS while another thread reads through it.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
    except OSError:
        pass  # the peer or another thread was first


R = TypeVar("R")

POLL_SHARE = 2 / 3  # of the time that is left, the most that a long poll may be held
MIN_TRY_SECONDS = 0.05  # a try that begins gets at least so long
ANSWER_SECONDS = 10.0  # how long one try waits for an answer, beyond the hold of a long poll
RETRY_DELAYS = (0.01, 0.05, 0.2, 0.5)  # seconds before dialling again; the last one repeats


class _Session:
    """Counts the requests of one session; each count is used once."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._count = 0

    def next(self) -> int:
        with self._lock:
            self._count += 1
            return self._count


@dataclass
class _Retries:
    """The attempts of one request."""

    deadline: float  # on the client's clock
    tries: int = 0  # those that failed so far
    renewed: bool = False  # a new session was opened since the request began


class RendezvousClient:
    """Sends requests to one driver."""

    def __init__(
        self,
        address: str,
        key: bytes,
        attempt: int,
        clock: Clock,
        timeout: float = 30.0,
        certificate: str | None = None,
    ) -> None:
        self._address = address
        self._key = key
        self._attempt = attempt
        self._clock = clock
        self._timeout = timeout
        self._transport = HttpTransport(address, certificate)
        self._closing = threading.Event()
        self._session_lock = threading.Lock()
        self._session: _Session | None = None
        self._last_answered = float("-inf")

    def ask(
        self,
        request: Request[R],
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
            Unauthorized: one side does not prove the job's key.
            StaleGeneration: the request belongs to a driver's attempt or a generation that is over.
            InvalidInput: the driver refuses the request's form or size.
            ConnectionClosed: `close` was called.
        """
        path = path_of(type(request))
        hold = min(hold, MAX_POLL_SECONDS, self._timeout * POLL_SHARE)
        retries = _Retries(self._clock.now() + (self._timeout + hold if within is None else within))
        while True:
            sent = self._clock.now()
            left = retries.deadline - sent
            # Short enough for a driver that went silent to be noticed in time, at a second try too.
            hold_seconds = max(0.0, min(hold, left * POLL_SHARE))
            body = self._build_envelope(request, hold_seconds)
            try:
                session = self._session or self._open_session(retries)
                credentials = auth.sign_request(self._key, path, session.name, session.next(), body)
                patient = min(ANSWER_SECONDS, patience * 2**retries.tries)
                response = self._post(path, credentials, body, min(hold_seconds + patient, left))
            except TransportClosed:
                raise ConnectionClosed("The connection to the driver was closed on this side.") from None
            except CertificateMismatch:
                raise Unauthorized(
                    f"Whatever answers at {self._address} does not show this job's certificate."
                ) from None
            except TransportError as error:
                self._pause(retries, error)
                continue
            if response.status_code == 401 and not retries.renewed:
                # The server forgot the session (a new one in its place): prove the key anew, once.
                retries.renewed = True
                self._drop_session(session)
            elif response.status_code in (200, 400) or auth.REPLY_HEADER in response.headers:
                reply = self._reply(request, credentials, response)
                self._last_answered = max(self._last_answered, sent)
                return reply
            elif response.status_code in (401, 413):
                self._raise_refusal(response.status_code, len(body))
            else:
                self._pause(retries, TransportError(f"HTTP status {response.status_code}"))

    def close(self) -> None:
        """Free every waiting thread at once; later requests raise `ConnectionClosed`."""
        self._closing.set()
        self._transport.close()

    def __enter__(self) -> RendezvousClient:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def now(self) -> float:
        return self._clock.now()

    def last_answered_at(self) -> float:
        """When the newest request was sent that the driver of this attempt has answered. The answer's time
        would not show when the driver last received something (R18, publication)."""
        return self._last_answered

    def _build_envelope(self, request: Request[Any], hold: float) -> bytes:
        return codec.dumps({"v": VERSION, "attempt": self._attempt, "hold": hold, "message": request})

    def _open_session(self, retries: _Retries) -> _Session:
        """The session of this client, opened by one of its threads."""
        with self._session_lock:
            if self._session is not None:
                return self._session
            credentials = auth.sign_request(self._key, auth.HELLO, auth.create_id(), 0, b"")
            left = retries.deadline - self._clock.now()
            response = self._post(auth.HELLO, credentials, b"", min(ANSWER_SECONDS, left))
            if response.status_code == 401:
                self._raise_refusal(401, 0)
            if response.status_code != 200:
                raise TransportError(f"HTTP status {response.status_code}")
            self._session = _Session(str(self._verify(credentials, response)["session"]))
            return self._session

    def _post(self, path: str, credentials: auth.Credentials, body: bytes, seconds: float) -> httpx.Response:
        headers = {"authorization": credentials.header()}
        return self._transport.post(path, headers, body, max(MIN_TRY_SECONDS, seconds))

    def _drop_session(self, session: _Session) -> None:
        with self._session_lock:
            if self._session is session:
                self._session = None

    def _pause(self, retries: _Retries, error: TransportError) -> None:
        """Before the next try; raises when there is no time for one."""
        pause = RETRY_DELAYS[min(retries.tries, len(RETRY_DELAYS) - 1)]
        retries.tries += 1
        if self._clock.now() + pause > retries.deadline:
            raise DriverUnreachable(
                f"The driver's rendezvous server at {self._address} does not answer ({error}): let executors reach "
                "that host and port, or set advertise_address and driver_port to what they reach."
            ) from error
        if self._closing.wait(pause):
            raise ConnectionClosed("The connection to the driver was closed on this side.")

    def _reply(self, request: Request[R], credentials: auth.Credentials, response: httpx.Response) -> R:
        answer = self._verify(credentials, response)
        if "stale" in answer:
            raise StaleGeneration(str(answer["stale"]))
        if "error" in answer:
            raise InvalidInput(str(answer["error"]))
        return codec.read(reply_of(type(request)), answer.get("reply"))

    def _verify(self, credentials: auth.Credentials, response: httpx.Response) -> dict[str, Any]:
        signature = response.headers.get(auth.REPLY_HEADER, "")
        status, body = response.status_code, response.content
        if not auth.reply_is_genuine(self._key, credentials, status, body, signature):
            raise Unauthorized(f"Whatever answers at {self._address} does not hold this job's key.")
        answer: dict[str, Any] = json.loads(codec.decompress(body))
        return answer

    def _raise_refusal(self, status: int, size: int) -> NoReturn:
        if status == 413:
            raise InvalidInput(f"The driver refuses a request of {size} bytes as too large.")
        raise Unauthorized(f"The driver at {self._address} does not accept this job's key.")


def exchange_blobs(driver: DriverClient, request: ExchangeAddresses, timeout: float) -> tuple[bytes, ...]:
    """Hand in a blob and wait for those of all ranks, in rank order.

    Raises:
        StaleGeneration: the generation is over.
        PeersMissing: some did not come within `timeout` seconds; names them.
    """
    deadline = driver.now() + timeout
    while True:
        reply = driver.ask(request, min(MAX_POLL_SECONDS, max(0.0, deadline - driver.now())))
        if reply.blobs is not None:
            return reply.blobs
        if driver.now() >= deadline:
            raise PeersMissing(
                f"Generation {request.fence.generation} was not formed within {timeout:g} s: "
                f"no address came from {', '.join(reply.missing)}."
            )
