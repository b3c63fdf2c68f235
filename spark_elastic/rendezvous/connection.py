"""One accepted connection: uvicorn's HTTP/1.1 protocol with a deadline for request heads, TCP keep-alive, and answers
that leave in one piece.

uvicorn itself waits for ever for a head that does not come; a stranger could hold descriptors with it. Runs in the
server's event loop thread.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any, ClassVar, cast

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

# Seconds until a host that vanished without a word is noticed: 10 + 3 × 5. Leases are quicker; this frees descriptors.
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


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
    """Closes itself when the head of a request is not there `head_seconds` after its first byte (or the connect)."""

    head_seconds: ClassVar[float] = 10.0

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._head_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
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
        super().connection_lost(exc)

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
