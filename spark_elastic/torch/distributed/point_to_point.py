"""send and recv between two ranks of a process group, over one engine group for each pair and direction.

A message is a frame with its tag and size, which holds a short tensor itself; a longer one follows the frame. A sender
waits until its receiver takes the message. A receiver reads from a rank only while a receive is posted that this rank
could serve; messages with another tag wait in memory. Each direction of a pair has a thread; any thread may call.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch

from elastic_collectives import CollectiveError, Group, MismatchError
from elastic_collectives.group import Array
from spark_elastic.errors import InvalidInput
from spark_elastic.torch.distributed.operands import Operand
from spark_elastic.worker.context import EngineThread

FRAME = 1024  # bytes
HEADING = struct.Struct("<qq")  # at its beginning: tag and size of the message
SHORT = FRAME - HEADING.size  # bytes of a message that fits into its frame


@dataclass(eq=False)
class _Receive:
    """A posted receive."""

    tag: int
    # The rank that it takes a message from; None: any.
    source: int | None
    target: Operand
    # Completed with the sender's rank.
    future: Future[int] = field(default_factory=Future)

    def fits(self, source: int, tag: int) -> bool:
        return self.tag == tag and self.source in (None, source)

    def complete(self, source: int, message: Array) -> None:
        """Take the message, or fail if it has another size."""
        memory = as_bytes(self.target)
        if message.nbytes != memory.nbytes:
            reason = (
                f"rank {source} sent {message.nbytes} bytes with tag {self.tag} where the receiver's tensor has "
                f"{memory.nbytes}: both tensors must have the same size"
            )
            self.future.set_exception(MismatchError((source,), reason))
            return
        if message.ctypes.data != memory.ctypes.data:
            memory[...] = message
        self.target.write_back()
        self.future.set_result(source)


class PointToPoint:
    """The messages that this rank of a process group sends and receives."""

    def __init__(
        self,
        rank: int,
        connect: Callable[[int, int], Group],
        timeout: float,
        on_error: Callable[[BaseException], None],
    ) -> None:
        """
        Args:
            connect: the engine group of sender and receiver; called once for each pair.
            timeout: seconds that a message may wait for its other end.
            on_error: called with what broke a message, in the thread of its direction.
        """
        self._rank = rank
        self._connect = connect
        self._timeout = timeout
        self._on_error = on_error
        self._lock = threading.Lock()  # owns the following
        self._senders: dict[int, tuple[Group, EngineThread]] = {}
        self._readers: dict[int, Group] = {}
        self._reading: dict[int, threading.Thread] = {}  # by source
        self._posted: list[_Receive] = []  # in the order of the calls
        self._arrived: list[tuple[int, int, Array]] = []  # source, tag, message: no receive fitted yet
        self._closed = False

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> Future[None]:
        self._check_peer(target)
        message = as_bytes(Operand(tensor))
        with self._lock:
            if target not in self._senders:
                group = self._connect(self._rank, target)
                group.limit(self._timeout)
                self._senders[target] = group, EngineThread()
            group, thread = self._senders[target]
        return thread.submit(lambda: self._send(group, message, tag))

    def receive(self, tensor: torch.Tensor, source: int | None, tag: int, size: int) -> Future[int]:
        """
        Args:
            source: None: any rank.
            size: number of ranks of the process group.
        """
        if source is not None:
            self._check_peer(source)
        receive = _Receive(tag, source, Operand(tensor))
        with self._lock:
            for place, (origin, arrived_tag, message) in enumerate(self._arrived):
                if receive.fits(origin, arrived_tag):
                    del self._arrived[place]
                    receive.complete(origin, message)
                    return receive.future
            self._posted.append(receive)
            for peer in range(size) if source is None else [source]:
                if peer != self._rank:
                    self._start_reading(peer)
        return receive.future

    def close(self) -> None:
        """End all threads. Messages under way fail."""
        with self._lock:
            self._closed = True
            senders, readers = list(self._senders.values()), list(self._readers.values())
            reading = list(self._reading.values())
        for group in [*(group for group, _ in senders), *readers]:
            group.close()
        for _, thread in senders:
            thread.close()
        for reader in reading:
            reader.join()

    def _check_peer(self, peer: int) -> None:
        if peer == self._rank:
            raise InvalidInput(f"rank {peer} cannot exchange messages with itself: copy the tensor.")

    def _send(self, group: Group, message: Array, tag: int) -> None:
        heading = np.frombuffer(HEADING.pack(tag, message.nbytes), np.uint8)
        frame = np.concatenate([heading, np.zeros(SHORT, np.uint8)])
        if message.nbytes <= SHORT:
            frame[HEADING.size : HEADING.size + message.nbytes] = message
        root = group.rank
        try:
            group.broadcast(frame, root)
            if message.nbytes > SHORT:
                group.broadcast(message, root)
        except CollectiveError as error:
            self._on_error(error.among(group.members))
            raise

    def _start_reading(self, source: int) -> None:
        """With the lock: let the thread of that source read until no posted receive needs it."""
        if source not in self._readers:
            self._readers[source] = self._connect(source, self._rank)
        self._readers[source].limit(self._timeout)  # counts from now on
        if source not in self._reading:
            thread = threading.Thread(
                target=self._read, args=(source,), name=f"spark-elastic-receive-{source}", daemon=True
            )
            self._reading[source] = thread
            thread.start()

    def _read(self, source: int) -> None:
        group = self._readers[source]
        try:
            while self._is_needed(source):
                self._read_message(group, source)
        except CollectiveError as error:
            self._fail(source, error.among(group.members))

    def _is_needed(self, source: int) -> bool:
        with self._lock:
            if any(receive.source in (None, source) for receive in self._posted):
                return True
            del self._reading[source]
            return False

    def _read_message(self, group: Group, source: int) -> None:
        frame, root = np.empty(FRAME, np.uint8), 1 - group.rank
        group.broadcast(frame, root)
        tag, size = HEADING.unpack(frame[: HEADING.size].tobytes())
        with self._lock:
            receive = self._take_posted(source, tag)
        if size <= SHORT:
            message = frame[HEADING.size : HEADING.size + size]
        else:
            memory = None if receive is None else as_bytes(receive.target)
            message = memory if memory is not None and memory.nbytes == size else np.empty(size, np.uint8)
            try:
                group.broadcast(message, root)
            except CollectiveError:
                with self._lock:
                    self._posted += [] if receive is None else [receive]  # `_fail` completes it
                raise
        with self._lock:
            receive = receive or self._take_posted(source, tag)  # posted meanwhile
            self._let_idle()
            if receive is None:
                self._arrived.append((source, tag, message))
                return
        receive.complete(source, message)
        failure = receive.future.exception()
        if failure is not None:
            self._on_error(failure)

    def _take_posted(self, source: int, tag: int) -> _Receive | None:
        """With the lock: the receive that a message is for, which is not posted any more."""
        found = next((receive for receive in self._posted if receive.fits(source, tag)), None)
        if found is not None:
            self._posted.remove(found)
        return found

    def _let_idle(self) -> None:
        """With the lock: sources that no posted receive names are silent for as long as they like."""
        for source, group in self._readers.items():
            if not any(receive.source in (None, source) for receive in self._posted):
                group.limit(None)

    def _fail(self, source: int, error: CollectiveError) -> None:
        with self._lock:
            del self._reading[source]
            failed = [receive for receive in self._posted if receive.source in (None, source)]
            self._posted = [receive for receive in self._posted if receive not in failed]
            closed = self._closed
        if failed or not closed:
            self._on_error(error)
        for receive in failed:
            receive.future.set_exception(error)


def as_bytes(operand: Operand) -> Array:
    """The elements of an operand as bytes."""
    return operand.array.view(np.uint8)
