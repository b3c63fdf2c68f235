"""Plain connections of an event loop, behind one epoll of their own.

asyncio keeps ten objects for each of its transports, through which Python's garbage collector goes again and again, and
runs a callback for each that is ready. Here thousands of connections are one reader of the loop, and two objects each.
Those of TLS have asyncio's transports. All of it belongs to the loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import select
import socket

log = logging.getLogger("spark_elastic.rendezvous")

RECEIVE_BYTES = 1 << 16  # at most, at once; for more, each call would map and unmap memory
PASSES = 8  # at most, before other callbacks of the loop have their turn


class Sockets:
    """The plain connections of one event loop, by descriptor."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._epoll = select.epoll()
        self._transports: dict[int, SocketTransport] = {}
        loop.add_reader(self._epoll.fileno(), self._take_ready)

    def add(self, accepted: socket.socket, protocol: asyncio.Protocol) -> None:
        """Serve an accepted connection; `protocol` hears of it as it would of asyncio's transport."""
        transport = SocketTransport(self, accepted, protocol)
        self._transports[accepted.fileno()] = transport
        self._epoll.register(accepted, select.EPOLLIN)
        protocol.connection_made(transport)

    def watch(self, descriptor: int, events: int) -> None:
        self._epoll.modify(descriptor, events)

    def remove(self, descriptor: int) -> bool:
        """Whether it was there."""
        if self._transports.pop(descriptor, None) is None:
            return False
        self._epoll.unregister(descriptor)
        return True

    def close(self) -> None:
        """No connection is served any longer; they are closed already."""
        self.loop.remove_reader(self._epoll.fileno())
        self._epoll.close()

    def _take_ready(self) -> None:
        for _ in range(PASSES):
            ready = self._epoll.poll(0)
            if not ready:
                return
            self._take(ready)

    def _take(self, ready: list[tuple[int, int]]) -> None:
        for descriptor, events in ready:
            transport = self._transports.get(descriptor)
            if transport is None:
                continue  # another one's request has closed it
            try:
                transport.on_ready(events)
            except Exception:  # the others are served all the same
                log.exception("a connection to the rendezvous server failed")
                transport.abort()


class SocketTransport(asyncio.Transport):
    """What `asyncio.Transport` offers, as far as the server uses it, over a socket that does not block."""

    __slots__ = ("_closing", "_protocol", "_socket", "_sockets", "_unsent")

    def __init__(self, sockets: Sockets, accepted: socket.socket, protocol: asyncio.Protocol) -> None:
        self._sockets, self._socket, self._protocol = sockets, accepted, protocol
        self._unsent = b""
        self._closing = False

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default

    def is_closing(self) -> bool:
        return self._closing

    def get_write_buffer_size(self) -> int:
        return len(self._unsent)

    def on_ready(self, events: int) -> None:
        """The socket can be written, read, or is broken."""
        if self._unsent and events & ~select.EPOLLIN:
            self._send(b"")
        if events & ~select.EPOLLOUT and not self._closing:
            try:
                data = self._socket.recv(RECEIVE_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._end(error)
                return
            if data:
                self._protocol.data_received(data)
            else:
                self.close()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._unsent:
            self._unsent += data
        elif not self._closing:
            self._send(bytes(data))

    def close(self) -> None:
        """Once all is sent."""
        if self._closing:
            return
        if self._unsent:
            self._closing = True
            self._sockets.watch(self._socket.fileno(), select.EPOLLOUT)
        else:
            self._end(None)

    def abort(self) -> None:
        self._end(None)

    def _send(self, more: bytes) -> None:
        had, data = len(self._unsent), self._unsent + more
        try:
            self._unsent = data[self._socket.send(data) :]
        except (BlockingIOError, InterruptedError):
            self._unsent = data
        except OSError as error:
            self._end(error)
            return
        if self._closing and not self._unsent:
            self._end(None)
        elif bool(had) != bool(self._unsent) and not self._closing:
            events = select.EPOLLIN | (select.EPOLLOUT if self._unsent else 0)
            self._sockets.watch(self._socket.fileno(), events)

    def _end(self, error: Exception | None) -> None:
        """Tell the protocol, after what runs now, that the connection is gone. error: None, if it was not broken."""
        if self._sockets.remove(self._socket.fileno()):
            self._closing, self._unsent = True, b""
            self._sockets.loop.call_soon(self._lose, error)

    def _lose(self, error: Exception | None) -> None:
        try:
            self._protocol.connection_lost(error)
        finally:
            self._socket.close()
