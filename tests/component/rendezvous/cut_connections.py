"""A network between clients and the server that cuts or resets a connection, or holds a request back."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress
from enum import Enum

from tests.component.rendezvous.driver_side import PATIENCE


class Way(Enum):
    """In which direction bytes travel."""

    REQUEST = "to the driver"
    ANSWER = "to the client"


class CuttableNetwork:
    """Listens for clients, and passes on what they and the server say. Each connection has two threads."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()  # owns the three below
        self._passed = dict.fromkeys(Way, 0)  # bytes since `cut`
        self._cut: tuple[Way, int] | None = None
        self._held: list[tuple[socket.socket, bytes]] | None = None  # what is held back; None: nothing is
        self.recorded = bytearray()  # all that clients have said
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._resets = False
        self._start(self._accept)

    def cut(self, way: Way, byte: int) -> None:
        """Cut the connection that passes so many bytes from now on, once; the next ones are whole."""
        with self._lock:
            self._passed, self._cut = dict.fromkeys(Way, 0), (way, byte)

    def count(self) -> dict[Way, int]:
        """Bytes that passed since `cut`."""
        with self._lock:
            return dict(self._passed)

    def hold(self) -> None:
        """Keep the next request; later ones pass."""
        with self._lock:
            self._held = []

    def release(self) -> None:
        """Deliver what was kept, though its sender has hung up."""
        with self._lock:
            held, self._held = self._held or [], None
        for target, part in held:
            target.sendall(part)

    def reset(self) -> None:
        """Both ends of every connection hear that it is unknown here; there are no new ones."""
        self._resets = True
        for each in self._sockets:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self) -> None:
        sockets = [self._listener, *self._sockets]
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RD if self._resets else socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(PATIENCE)
        for each in sockets:
            each.close()

    def _start(self, run: object, *arguments: object) -> None:
        thread = threading.Thread(target=run, args=arguments, name="network")  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._port))
                self._sockets += [client, server]
                self._start(self._pass_on, client, server, Way.REQUEST)
                self._start(self._pass_on, server, client, Way.ANSWER)

    def _pass_on(self, source: socket.socket, target: socket.socket, way: Way) -> None:
        is_held = False
        with suppress(OSError):
            while part := source.recv(65536):
                left, holds = self._take(way, part, target)
                is_held |= holds
                if not holds:
                    target.sendall(left)
                if len(left) < len(part):
                    break
            if is_held or self._resets:
                return  # the server does not see that the client has hung up
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _take(self, way: Way, part: bytes, target: socket.socket) -> tuple[bytes, bool]:
        """What passes of a part, and whether it is held back instead."""
        with self._lock:
            if way is Way.REQUEST and self._held == []:
                self._held.append((target, part))
                return part, True
            self.recorded += part if way is Way.REQUEST else b""
            passed = self._passed[way]
            self._passed[way] += len(part)
            if self._cut is None or self._cut[0] is not way or self._passed[way] < self._cut[1]:
                return part, False
            keep = self._cut[1] - passed
            self._cut = None
            return part[:keep], False
