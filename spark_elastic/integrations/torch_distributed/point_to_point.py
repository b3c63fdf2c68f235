"""send and recv between two ranks of a process group, over one engine group for each pair and direction.

A message is a frame with its tag and size, which holds a short tensor itself; a longer one follows the frame. A sender
waits until its receiver takes the message. A receiver reads from a rank only while a receive is posted that this rank
could serve; messages with another tag wait in memory. Each direction of a pair has a thread. Who waits for a message
runs what that thread has not begun. Any thread may call.
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
from elastic_collectives.operands import Array
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.host_memory import Operand
from spark_elastic.worker.context import CollectiveThread

FRAME = 8192  # bytes
HEADING = struct.Struct("<qq")  # at its beginning: tag and size of the message
SHORT = FRAME - HEADING.size  # bytes of a message that fits into its frame


@dataclass(eq=False)
class _Receive:
    """A posted receive."""

    tag: int  # that of the messages that it takes
    source: int | None  # the rank that it takes a message from; None: any
    target: Operand  # receives the message, which must have its size
    future: Future[int] = field(default_factory=Future)  # completed with the sender's rank

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
    def __init__(
        self,
        rank: int,
        connect: Callable[[int, int], Group],
        timeout: float,
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._rank = rank
        self._connect = connect  # makes the engine group of sender and receiver; called once for each pair
        self._timeout = timeout  # seconds that a message may wait for its other end
        self._on_error = on_error  # called with what broke a message, in the thread of its direction
        self._lock = threading.Lock()  # owns the following
        self._senders: dict[int, tuple[Group, CollectiveThread]] = {}
        self._readers: dict[int, tuple[Group, CollectiveThread]] = {}
        self._posted: list[_Receive] = []  # in the order of the calls
        self._arrived: list[tuple[int, int, Array]] = []  # source, tag, message: no receive fitted yet

    def set_timeout(self, timeout: float) -> None:
        """Of messages from now on."""
        with self._lock:
            self._timeout = timeout
            for group, _ in self._senders.values():
                group.set_timeout(timeout)

    def send(self, tensor: torch.Tensor, target: int, tag: int) -> tuple[Future[None], CollectiveThread]:
        """The message's future, and the thread that completes it."""
        self._check_peer(target)
        message = as_bytes(Operand(tensor))
        with self._lock:
            if target not in self._senders:
                group = self._connect(self._rank, target)
                group.set_timeout(self._timeout)
                self._senders[target] = group, CollectiveThread()
            group, thread = self._senders[target]
        return thread.submit(lambda: self._send(group, message, tag)), thread

    def receive(
        self, tensor: torch.Tensor, source: int | None, tag: int, size: int
    ) -> tuple[Future[int], CollectiveThread | None]:
        """The message's future, and the thread that completes it; None: one of several, or it is complete. source:
        None takes any rank. size: number of ranks of the process group."""
        if source is not None:
            self._check_peer(source)
        receive = _Receive(tag, source, Operand(tensor))
        with self._lock:
            for place, (origin, arrived_tag, message) in enumerate(self._arrived):
                if receive.fits(origin, arrived_tag):
                    del self._arrived[place]
                    receive.complete(origin, message)
                    return receive.future, None
            self._posted.append(receive)
            peers = [peer for peer in range(size) if peer != self._rank] if source is None else [source]
            threads = [self._start_reading(peer, receive) for peer in peers]
        return receive.future, None if source is None else threads[0]

    def close(self) -> None:
        """End all threads. Messages under way fail."""
        with self._lock:
            directions = [*self._senders.values(), *self._readers.values()]
        for group, _ in directions:
            group.close()
        for _, thread in directions:
            thread.close()

    def _check_peer(self, peer: int) -> None:
        if peer == self._rank:
            raise InvalidInput(f"rank {peer} cannot exchange messages with itself: copy the tensor.")

    def _send(self, group: Group, message: Array, tag: int) -> None:
        frame = np.zeros(FRAME, np.uint8)
        HEADING.pack_into(frame.data, 0, tag, message.nbytes)
        if message.nbytes <= SHORT:
            frame[HEADING.size : HEADING.size + message.nbytes] = message
        root = group.rank
        try:
            group.broadcast(frame, root)
            if message.nbytes > SHORT:
                group.broadcast(message, root)
        except CollectiveError as error:
            self._on_error(error.to_world_ranks(group.members))
            raise

    def _start_reading(self, source: int, receive: _Receive) -> CollectiveThread:
        """With the lock: let the thread of that source read until the receive is complete."""
        if source not in self._readers:
            self._readers[source] = self._connect(source, self._rank), CollectiveThread()
        group, thread = self._readers[source]
        group.set_timeout(self._timeout)  # counts from now on
        thread.submit(lambda: self._read(group, source, receive))
        return thread

    def _read(self, group: Group, source: int, receive: _Receive) -> None:
        try:
            while self._is_posted(receive):
                self._read_message(group, source)
        except CollectiveError as error:
            self._fail(source, error.to_world_ranks(group.members))

    def _is_posted(self, receive: _Receive) -> bool:
        with self._lock:
            return receive in self._posted

    def _read_message(self, group: Group, source: int) -> None:
        frame, root = np.empty(FRAME, np.uint8), 1 - group.rank
        group.broadcast(frame, root)
        tag, size = HEADING.unpack_from(frame.data)
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
        for source, (group, _) in self._readers.items():
            if not any(receive.source in (None, source) for receive in self._posted):
                group.set_timeout(None)

    def _fail(self, source: int, error: CollectiveError) -> None:
        with self._lock:
            failed = [receive for receive in self._posted if receive.source in (None, source)]
            self._posted = [receive for receive in self._posted if receive not in failed]
        if failed:  # else that rank may have ended its group in order
            self._on_error(error)
        for receive in failed:
            receive.future.set_exception(error)


def as_bytes(operand: Operand) -> Array:
    return operand.array.view(np.uint8)
