"""Plain connections behind one epoll: what is sent arrives whole, ends differ, and one that fails ends alone."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Iterator

import pytest

from spark_elastic.rendezvous.sockets import Sockets

MUCH = b"0123456789abcdef" * (1 << 18)  # more than the kernel takes at once
RESET = struct.pack("ii", 1, 0)  # of SO_LINGER: closing sends a reset


class Peer(asyncio.Protocol):
    """Notes what it hears."""

    def __init__(self) -> None:
        self.received = b""
        self.ends: list[Exception | None] = []
        self.transport: asyncio.Transport | None = None
        self.on_data: Callable[[], None] = lambda: None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received += data
        self.on_data()

    def connection_lost(self, exc: Exception | None) -> None:
        self.ends.append(exc)


class Cluster:
    def __init__(self) -> None:
        self.loop = asyncio.SelectorEventLoop()
        self.sockets = Sockets(self.loop)
        self._peers: list[Peer] = []
        self._clients: list[socket.socket] = []

    def connect(self) -> tuple[Peer, socket.socket]:
        """The server's side and the client's."""
        listener = socket.create_server(("127.0.0.1", 0))
        client = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
        listener.close()
        accepted.setblocking(False)
        client.setblocking(False)
        peer = Peer()
        self.sockets.add(accepted, peer)
        self._peers.append(peer)
        self._clients.append(client)
        return peer, client

    def close(self) -> None:
        for client, peer in zip(self._clients, self._peers, strict=True):
            client.close()
            assert peer.transport is not None
            peer.transport.abort()
        self.run_until(lambda: all(peer.ends for peer in self._peers))
        assert [len(peer.ends) for peer in self._peers] == [1] * len(self._peers)
        self.sockets.close()
        self.loop.close()

    def run_until(self, is_done: Callable[[], bool]) -> None:
        until = self.loop.time() + 10.0
        while not is_done():
            assert self.loop.time() < until
            self.loop.run_until_complete(asyncio.sleep(0.001))


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.close()


def _read(client: socket.socket, into: bytearray) -> bool:
    """True at the end."""
    try:
        data = client.recv(1 << 20)
    except BlockingIOError:
        return False
    into += data
    return not data


@pytest.mark.parametrize("parts", [1, 3])
def test_what_a_slow_client_reads_is_whole_and_ends_behind_it(cluster: Cluster, parts: int) -> None:
    peer, client = cluster.connect()
    assert peer.transport is not None
    for _ in range(parts):
        peer.transport.write(MUCH)
    assert 0 < peer.transport.get_write_buffer_size() < parts * len(MUCH)
    peer.transport.close()
    assert peer.transport.is_closing()
    read = bytearray()
    cluster.run_until(lambda: _read(client, read))
    assert read == MUCH * parts
    assert peer.ends == [None]


def test_a_connection_that_has_sent_all_is_read_again(cluster: Cluster) -> None:
    peer, client = cluster.connect()
    assert peer.transport is not None
    peer.transport.write(MUCH)
    read = bytearray()
    cluster.run_until(lambda: _read(client, read) or len(read) == len(MUCH))
    client.send(b"next")
    cluster.run_until(lambda: peer.received == b"next")
    assert not peer.ends


def test_an_end_is_no_break_and_a_reset_is_one(cluster: Cluster) -> None:
    (ended, client), (broken, other) = cluster.connect(), cluster.connect()
    client.close()
    other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    other.close()
    cluster.run_until(lambda: bool(ended.ends and broken.ends))
    assert ended.ends == [None]
    assert [type(end) for end in broken.ends] == [ConnectionResetError]


def test_a_request_that_fails_ends_its_own_connection_alone(cluster: Cluster) -> None:
    (bad, client), (good, other) = cluster.connect(), cluster.connect()

    def fail() -> None:
        raise RuntimeError("a defect")

    bad.on_data = fail
    client.send(b"x")
    other.send(b"y")
    cluster.run_until(lambda: bool(bad.ends) and good.received == b"y")
    assert bad.ends == [None]
    assert not good.ends


def test_one_that_another_request_aborts_hears_nothing_more(cluster: Cluster) -> None:
    (first, client), (second, other) = cluster.connect(), cluster.connect()
    for peer, rival in ((first, second), (second, first)):
        assert rival.transport is not None
        peer.on_data = rival.transport.abort
    client.send(b"x")
    other.send(b"x")
    cluster.run_until(lambda: bool(first.ends or second.ends))
    assert sorted([first.received, second.received]) == [b"", b"x"]
