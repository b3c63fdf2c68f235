"""What somebody between two ranks sees and can do: in the clear, and where the mesh is inside TLS."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

from elastic_collectives import CollectiveError, Endpoint, Group, connect

PATTERN = b"a gradient that nobody else should see; "
KEY = b"key"


class TamperingProxy:
    """Passes one connection on to `address`, remembers what went by, and changes it once told to."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._far = socket.create_connection((host, int(port)))
        self._ends = [self._listener, self._far]
        self._threads = [
            threading.Thread(target=self._forward_to_server),
            threading.Thread(target=self._forward_to_client),
        ]
        self._accepted = threading.Event()
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.heard = bytearray()
        self.changes = threading.Event()

    def __enter__(self) -> TamperingProxy:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for end in self._ends:
            try:
                end.shutdown(socket.SHUT_RDWR)  # wakes whoever reads
            except OSError:
                pass  # it has ended already
        for thread in self._threads:
            thread.join()
        for end in self._ends:
            end.close()

    def _forward_to_server(self) -> None:
        try:
            near, _ = self._listener.accept()
            self._ends.append(near)
        except OSError:
            return  # nobody came until the end
        finally:
            self._accepted.set()
        self._pass(near, self._far)

    def _forward_to_client(self) -> None:
        self._accepted.wait()
        for near in self._ends[2:]:
            self._pass(self._far, near)

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                self.heard += data
                spoilt = bytes([*data[:-1], data[-1] ^ 1]) if self.changes.is_set() else data
                target.sendall(spoilt)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # one of the ends has hung up


@contextmanager
def _ranks(encrypted: bool) -> Iterator[tuple[TamperingProxy, Group, Group]]:
    with Endpoint(KEY, encrypted=encrypted) as first, Endpoint(KEY, encrypted=encrypted) as second:
        with TamperingProxy(second.address) as between:
            blobs = [first.address.encode(), between.address.encode()]
            with connect(first, 0, 2, (1, 1), lambda own: blobs, 20.0) as low:
                with connect(second, 1, 2, (1, 1), lambda own: blobs, 20.0) as high:
                    yield between, low, high


def _share(group: Group) -> bytes:
    data = np.frombuffer(bytearray(PATTERN * 1000 if group.rank == 0 else len(PATTERN) * 1000), np.uint8)
    group.broadcast(data, 0)
    return data.tobytes()


@pytest.mark.parametrize("encrypted", [False, True])
def test_p6_an_eavesdropper_reads_no_data(encrypted: bool) -> None:
    with _ranks(encrypted) as (between, low, high), ThreadPoolExecutor(2) as threads:
        assert list(threads.map(_share, (low, high))) == [PATTERN * 1000] * 2
        assert (PATTERN in between.heard) is not encrypted


def test_p6_data_that_is_changed_in_transit_breaks_the_group() -> None:
    with _ranks(encrypted=True) as (between, low, high), ThreadPoolExecutor(2) as threads:
        list(threads.map(_share, (low, high)))
        between.changes.set()
        ends = [threads.submit(_share, group) for group in (low, high)]
        errors = [end.exception() for end in ends]
        assert isinstance(errors[1], CollectiveError)
        assert "changed on the way" in str(errors[1])


def test_another_key_gets_no_connection() -> None:
    with Endpoint(KEY, encrypted=True) as first, Endpoint(b"another", encrypted=True) as second:
        blobs = [first.address.encode(), second.address.encode()]
        with connect(first, 0, 2, (1, 1), lambda own: blobs, 10.0) as low:
            with connect(second, 1, 2, (1, 1), lambda own: blobs, 10.0) as high:
                with ThreadPoolExecutor(1) as threads:
                    waiting = threads.submit(high.barrier)
                    with pytest.raises(CollectiveError, match="does not hold the job's key"):
                        low.barrier()
                    high.abort("the test is over")
                    assert isinstance(waiting.exception(), CollectiveError)
