"""One accepted connection: uvicorn's HTTP/1.1 protocol with a deadline for request heads, TCP keep-alive, answers
that leave in one piece, and a bound on strangers.

uvicorn itself waits for ever for a head that does not come, on any number of connections; a stranger could hold all
descriptors with them. Runs in the server's event loop thread.
"""

from __future__ import annotations

import asyncio
import resource
import socket
from contextlib import suppress
from typing import Any, ClassVar, cast

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

# Seconds until a host that vanished without a word is noticed: 10 + 3 × 5. Leases are quicker; this frees descriptors.
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}

PROVEN = "spark_elastic.proven"  # in a request's scope: to be called by the door that knows its sender
FAILED = "spark_elastic.failed"  # too: whether its connection ended by an error of the network, not by its sender's end
MOST_STRANGERS = 2048


def most_strangers() -> int:
    """Connections that have not proven anything yet: a quarter of the files that this process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_STRANGERS if soft == resource.RLIM_INFINITY else max(16, min(MOST_STRANGERS, soft // 4))


def proven(scope: Scope) -> None:
    """The sender of this request is no stranger."""
    if PROVEN in scope:
        scope[PROVEN]()


def failed(scope: Scope) -> bool:
    """Whether the connection of this request, which has ended, was reset or timed out. One whose sender died was closed
    by that machine's kernel."""
    return FAILED in scope and bool(scope[FAILED]())


def keep_alive(connection: socket.socket) -> None:
    """Let the kernel probe a silent peer, as far as the system can."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class _Whole:
    """A transport that sends head and body of an answer by one system call: the call is a third of its cost."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._held: list[bytes] = []

    def write(self, data: bytes) -> None:
        if not self._held:
            self._loop.call_soon(self._send)
        self._held.append(data)

    def close(self) -> None:
        self._send()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _send(self) -> None:
        if self._held:
            held, self._held = self._held, []
            self._transport.write(b"".join(held))


class Connection(H11Protocol):
    """Closes itself when the head of a request is not there `head_seconds` after its first byte (or the connect).

    With one stranger more than `most_strangers` the one that came first is hung up on: each counts from `accepted` on,
    before anything was read and, with TLS, before anything was agreed on.
    """

    head_seconds: ClassVar[float] = 10.0
    most_strangers = staticmethod(most_strangers)

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._head_deadline: asyncio.TimerHandle | None = None
        self._stands = False  # it has a transport; of a TLS connection, since the handshake
        self._failed = False  # it ended by an error
        self._strangers: dict[Connection, socket.socket] = vars(self.server_state).setdefault("strangers", {})
        self._served, self.app = self.app, self._introduced

    def accepted(self, connection: socket.socket) -> None:
        """The event loop has it from the listening socket."""
        self._strangers[self] = connection
        if len(self._strangers) > self.most_strangers():
            first = next(iter(self._strangers))
            first._hang_up(self._strangers.pop(first))

    def begun(self) -> None:
        """Its transport stands, or never will: no `connection_lost` follows a TLS handshake that failed."""
        if not self._stands:
            self._strangers.pop(self, None)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._stands = True
        super().connection_made(cast(asyncio.Transport, _Whole(transport, self.loop)))
        keep_alive(transport.get_extra_info("socket"))
        self._await_head()

    def data_received(self, data: bytes) -> None:
        if self._idle() and self._head_deadline is None:
            self._await_head()
        super().data_received(data)
        if not self._idle():
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._strangers.pop(self, None)
        self._failed = exc is not None
        super().connection_lost(exc)

    async def _introduced(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[PROVEN] = lambda: self._strangers.pop(self, None)
        scope[FAILED] = lambda: self._failed
        await self._served(scope, receive, send)

    def _hang_up(self, connection: socket.socket) -> None:
        if self._stands:
            self.transport.abort()
            return
        with suppress(OSError):  # it has hung up itself
            connection.shutdown(socket.SHUT_RDWR)

    def _idle(self) -> bool:
        """No request of this connection is being answered."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is None or cycle.response_complete

    def _await_head(self) -> None:
        self._head_deadline = self.loop.call_later(self.head_seconds, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None
