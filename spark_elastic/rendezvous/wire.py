"""HTTP/1.1 to one address, over TLS where a certificate is expected; connections are kept, used by any number of
threads and closable under their feet.

It knows nothing of keys and messages. It drives httpx's transport, not its client: that reads no proxy from the
environment, writes no line per request into the user's log, and takes a quarter less time.
"""

from __future__ import annotations

import socket
import ssl
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx

from spark_elastic.rendezvous import tls

CONNECT_SECONDS = 5.0


class WireClosed(Exception):
    """`close` was called."""


class WireBroken(Exception):
    """No answer: could not connect, the connection broke, or time ran out."""


class WireForeign(Exception):
    """Whoever answers has not the expected certificate."""


class Wire:
    """POSTs to `address` ("host:port"). certificate: the only one to be taken, PEM; None: plain HTTP."""

    def __init__(self, address: str, certificate: str | None = None) -> None:
        self._url = httpx.URL(f"{'https' if certificate else 'http'}://{address}")
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._active = 0  # requests under way; the last one to end after `close` frees the connections
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._transport = httpx.HTTPTransport(
            trust_env=False,
            verify=tls.only(certificate) if certificate else False,  # never the machine's certificates
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=300),
        )

    def post(self, path: str, headers: Mapping[str, str], body: bytes, seconds: float) -> httpx.Response:
        """The response, read whole. seconds: how long the server may be silent.

        Raises:
            WireBroken: there was none.
            WireForeign: another certificate was shown.
            WireClosed: `close` was called before or meanwhile.
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
        with self._under_way():
            try:
                response = self._transport.handle_request(request)
                response.read()
                return response
            except (httpx.HTTPError, OSError) as error:
                if self._closed.is_set():
                    raise WireClosed from None
                if _is_foreign(error):
                    raise WireForeign from error
                raise WireBroken(str(error) or type(error).__name__) from error

    def close(self) -> None:
        """Free every thread that waits in `post`, at once; any thread, any number of times."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            for connection in self._sockets:
                _shut(connection)
            idle = self._active == 0
        if idle:
            self._transport.close()

    @contextmanager
    def _under_way(self) -> Iterator[None]:
        with self._lock:
            if self._closed.is_set():
                raise WireClosed
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
                _shut(connection)


def _is_foreign(error: BaseException | None) -> bool:
    """What OpenSSL said lies below the errors of two libraries."""
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error is not None


def _shut(connection: socket.socket) -> None:
    try:
        # Not an SSLSocket's own shutdown: that forgets its TLS while another thread reads through it.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
    except OSError:
        pass  # the peer or another thread was first
