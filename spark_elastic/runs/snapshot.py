"""Snapshots of a training state: how they are built, copied in the background, and broadcast to other workers.

A snapshot consists of a small tree of values and one flat memory that holds the large arrays; the tree refers to the
memory by `Extent` or `ArrayRef`. The training thread owns everything here, except for the copies that `SnapshotBuffer`
makes in a thread of its own."""

from __future__ import annotations

import _thread
import pickle
import threading
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import cloudpickle
import numpy as np
import numpy.typing as npt

from elastic_collectives import Group
from spark_elastic.clock import SystemClock
from spark_elastic.errors import InvalidInput, StoreError
from spark_elastic.protocol.types import Phase, Position

if TYPE_CHECKING:
    from spark_elastic.runs.kept_commits import CommitKeeper

Bytes = npt.NDArray[np.uint8]
_NOTHING: Bytes = np.empty(0, np.uint8)
SMALL = 1 << 18  # bytes that are copied more quickly than a thread is started
ALIGNMENT = 64  # in a snapshot's memory each array begins at a multiple of so many bytes


class Extent(NamedTuple):
    """A part of a snapshot's memory."""

    offset: int  # bytes from the beginning of the memory; a multiple of ALIGNMENT
    nbytes: int  # length in bytes

    def of(self, memory: Bytes) -> Bytes:
        """This part of `memory`, as a view."""
        return memory[self.offset : self.offset + self.nbytes]


class ArrayRef(NamedTuple):
    """A numpy array in a snapshot's memory."""

    extent: Extent  # its bytes
    dtype: str  # as numpy writes it, with the byte order
    shape: tuple[int, ...]  # () for a scalar

    def of(self, memory: Bytes) -> npt.NDArray[Any]:
        """The array, as a view of `memory`."""
        return self.extent.of(memory).view(self.dtype).reshape(self.shape)


class Kept:
    """An array that many snapshots share, as it does not change; pickled without bytes where each process makes it."""

    def __init__(self, key: tuple[str, int, int], memory: Bytes | None, is_made: bool) -> None:
        self.key = key  # its name, length and checksum
        self.memory = memory  # None: they did not come with it
        self.is_made = is_made  # whether the program makes it in each process

    def __reduce__(self) -> tuple[Any, ...]:
        return Kept, (self.key, None if self.is_made else self.memory, self.is_made)

    def of(self, memory: Bytes) -> Bytes:
        """Its bytes, which are not in the snapshot's memory; InvalidInput if this process has made others."""
        if self.memory is None:
            raise InvalidInput(
                f"the frozen parameter {self.key[0]!r} is not the one with which this run began, and checkpoints hold "
                "what is trained: load the same values as then, or use another run_id."
            )
        return self.memory

    def take_from(self, own: Mapping[tuple[str, int, int], Kept]) -> None:
        """Have the bytes of an equal one, if it came without."""
        if self.memory is None and self.key in own:
            self.memory = own[self.key].memory


def find_kept(values: Any) -> Iterator[Kept]:
    """All in a tree of values."""
    if isinstance(values, Kept):
        yield values
    elif isinstance(values, dict | list | tuple):
        for value in values.values() if isinstance(values, dict) else values:
            yield from find_kept(value)


def align(nbytes: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Snapshot:
    """One complete version of a training state."""

    position: Position  # how far training had come; hand-written training counts commits as steps of epoch 0
    values: Any  # everything small, with references into `memory`; shares nothing with the live state
    memory: Bytes  # (n,) bytes of all arrays

    def copy(self) -> Snapshot:
        """The same snapshot in a memory of its own."""
        return Snapshot(self.position, self.values, self.memory.copy())


class SnapshotBuilder:
    """Collects the arrays of a snapshot and lays them out one after the other."""

    def __init__(self) -> None:
        # (offset, live memory) of what is copied before the snapshot is returned, and of what may be copied later.
        self.immediate: list[tuple[int, Bytes]] = []
        self.deferred: list[tuple[int, Bytes]] = []
        self.change_counters: list[Callable[[], int]] = []  # one for each deferred one: grows as it changes
        self.remote: list[tuple[Extent, Callable[[Bytes], None]]] = []  # another device's, and what copies it
        self.wait_remote: Callable[[], None] = lambda: None  # waits until these copies are complete
        # Returns memory of so many bytes, to which the other device copies quickly.
        self.allocate: Callable[[int], Bytes] = lambda nbytes: np.empty(nbytes, np.uint8)
        self.size = 0  # bytes that the snapshot needs so far

    def add_remote(self, nbytes: int, copy: Callable[[Bytes], None]) -> Extent:
        """Have memory of another device copied. copy: begins to copy it; `wait_remote` waits for its end."""
        extent = Extent(self.size, nbytes)
        self.remote.append((extent, copy))
        self.size += align(nbytes)
        return extent

    def copy_to(self, memory: Bytes) -> None:
        """Copy everything that is not deferred."""
        for extent, copy in self.remote:
            copy(extent.of(memory))
        _copy(self.immediate, memory)
        self.wait_remote()

    def add(self, memory: Bytes, change_counter: Callable[[], int] | None = None) -> Extent:
        """Have `memory` copied. change_counter: allows a copy in the background. It returns a number that changes with
        each change of the memory; nothing may change the memory before `SnapshotBuffer.wait` has returned."""
        extent = Extent(self.size, memory.nbytes)
        if change_counter is None:
            self.immediate.append((self.size, memory))
        else:
            self.deferred.append((self.size, memory))
            self.change_counters.append(change_counter)
        self.size += align(memory.nbytes)
        return extent

    def add_array(self, array: npt.NDArray[Any]) -> ArrayRef:
        """Have a numpy array copied."""
        flat = np.ascontiguousarray(array).reshape(-1)
        # The types of ml_dtypes, such as bfloat16, are known by their names only.
        dtype = array.dtype.name if array.dtype.kind == "V" else array.dtype.str
        return ArrayRef(self.add(flat.view(np.uint8)), dtype, array.shape)


Capture = Callable[[SnapshotBuilder], Any]
"""Adds the arrays to the builder and returns the tree of values."""


def build_snapshot(position: Position, capture: Capture, builder: SnapshotBuilder | None = None) -> Snapshot:
    """A snapshot whose arrays are all copied when this returns. builder: a new one of a subclass; None: a plain one."""
    builder = SnapshotBuilder() if builder is None else builder
    values = capture(builder)
    memory = builder.allocate(builder.size)
    builder.copy_to(memory)
    _copy(builder.deferred, memory)
    return Snapshot(position, values, memory)


def _sample(source: Bytes) -> tuple[bytes, ...]:
    """Of its begin, middle and end: the first row may be one of zeros, as padding has it, which stay as they are."""
    parts = source[:ALIGNMENT], source[len(source) // 2 :][:ALIGNMENT], source[-ALIGNMENT:]
    return tuple(part.tobytes() for part in parts)


def _copy(sources: list[tuple[int, Bytes]], memory: Bytes) -> None:
    for offset, source in sources:
        np.copyto(memory[offset : offset + source.nbytes], source)


class _BackgroundCopy:
    """Copies what a snapshot defers, and has it kept. It is void if some of that changes before the training thread has
    waited for it: a counter grows when a change is complete, so that the end of the copy may lie within a change."""

    def __init__(self, snapshot: Snapshot, builder: SnapshotBuilder, keeper: CommitKeeper | None) -> None:
        self.snapshot, self._keeper = snapshot, keeper
        self.is_void = True  # until the copy is complete, whatever is raised
        self.seconds, self._clock = 0.0, SystemClock()  # how long its thread took
        self._deferred, self._counters = builder.deferred, builder.change_counters
        self._before = self._look()
        self._done = threading.Lock()

    def start(self) -> None:
        """Start a thread. `threading.Thread` would wait until the thread runs, which costs more than a small copy."""
        self._done.acquire()
        self.seconds = -self._clock.now()
        _thread.start_new_thread(self._run_in_thread, ())

    def run(self) -> None:
        _copy(self._deferred, self.snapshot.memory)
        if self._keeper is not None:
            self._keeper.keep(self.snapshot)
        self.is_void = False
        self._check()

    def _check(self) -> None:
        if not self.is_void and self._look() != self._before:
            self.is_void = True
            if self._keeper is not None:
                self._keeper.begin(self.snapshot.memory)

    def _look(self) -> list[tuple[int, tuple[bytes, ...]]]:
        """Of each array its counter and some bytes, which tell of changes through `.data`: no counter shows them."""
        return [(c(), _sample(source)) for c, (_, source) in zip(self._counters, self._deferred, strict=True)]

    def join(self) -> None:
        """Wait for its end; by the training thread."""
        with self._done:
            self._check()

    def _run_in_thread(self) -> None:
        try:
            self.run()
        finally:
            self.seconds += self._clock.now()
            self._done.release()


class SnapshotBuffer:
    """Double buffer: one memory holds the newest complete snapshot while a thread fills the other (R20, copies)."""

    def __init__(self, keeper: CommitKeeper | None = None, *, warns: bool = True) -> None:
        """keeper: None: snapshots end with this process. warns: of what changed while it was copied."""
        self._newest: Snapshot | None = None
        self._free_memory: Bytes = np.empty(0, np.uint8)
        self._running: _BackgroundCopy | None = None
        self._synchronous = False  # deferred memory changed too early once: no more background copies
        self.copy_seconds = 0.0  # that the thread of the newest copy took which had one
        self.keeper, self._warns = keeper, warns

    def begin(self, position: Position, capture: Capture) -> None:
        self.wait()
        builder = SnapshotBuilder()
        values = capture(builder)
        snapshot = Snapshot(position, values, self.get_free_memory(builder.size))
        builder.copy_to(snapshot.memory)
        copy = _BackgroundCopy(snapshot, builder, self.keeper)
        if self._synchronous or sum(source.nbytes for _, source in builder.deferred) < SMALL:
            copy.run()
            self._swap(snapshot)
        else:
            self._running = copy
            copy.start()

    def wait(self) -> None:
        """Wait until nothing is being copied; the snapshot that was copied is then the newest."""
        copy, self._running = self._running, None
        if copy is None:
            return
        copy.join()
        self.copy_seconds = copy.seconds
        if not copy.is_void:
            self._swap(copy.snapshot)
            return
        self._synchronous = True
        if self._warns:
            warnings.warn(
                "a parameter was changed in place after commit() and outside of optimizer.step(), so that commit does "
                "not count; from now on commits copy everything before they return.",
                RuntimeWarning,
                stacklevel=3,
            )

    def wait_for_newest(self) -> Snapshot | None:
        self.wait()
        return self._newest

    def replace(self, snapshot: Snapshot) -> None:
        """Make a snapshot from elsewhere the newest one."""
        self.wait()
        self._swap(snapshot)

    def get_free_memory(self, nbytes: int) -> Bytes:
        """Memory of exactly `nbytes` bytes that holds no complete snapshot."""
        keeper, free = self.keeper, self._free_memory
        if free.nbytes != nbytes or (keeper is not None and not keeper.owns(free)):
            shared = None if keeper is None else keeper.allocate(nbytes)
            self._free_memory = np.empty(nbytes, np.uint8) if shared is None else shared
        if keeper is not None:
            keeper.begin(self._free_memory)
        return self._free_memory

    def _swap(self, snapshot: Snapshot) -> None:
        former, self._newest = self._newest, snapshot
        self._free_memory = np.empty(0, np.uint8) if former is None else former.memory


class Codec(Protocol):
    """Encodes the tree of values of a snapshot as bytes."""

    def dumps(self, values: Any) -> bytes: ...

    def loads(self, data: bytes, *, trusted: bool) -> Any:
        """The values that `dumps` encoded. trusted: by a peer, which holds the job's key; else from the store."""
        ...


class PickleCodec:
    """For hand-written states. Unpickling runs code: only trusted users may write to the store."""

    def dumps(self, values: Any) -> bytes:
        return pickle_value(values)

    def loads(self, data: bytes, *, trusted: bool) -> Any:
        return pickle.loads(data)


def pickle_value(value: object) -> bytes:
    """Pickle a value; cloudpickle takes what pickle refuses, such as classes of a script."""
    try:
        return pickle.dumps(value, protocol=5)  # which copies arrays once
    except (pickle.PicklingError, AttributeError, TypeError):
        return bytes(cloudpickle.dumps(value))


def broadcast_snapshot(
    group: Group,
    source: int,
    snapshot: Snapshot | None,
    codec: Codec,
    receives: bool = True,
    allocate: Callable[[int], Bytes] = lambda nbytes: np.empty(nbytes, np.uint8),
) -> Snapshot | None:
    """Send the snapshot of rank `source` to the ranks that receive it; collective over the whole group (R5, staging).
    What arrives is verified by checksum and returned, or StoreError; the receiver's state does not change before it
    loads it. snapshot: of rank `source`. receives: this rank takes it; False: it returns None, as `source` does."""
    if group.rank == source:
        assert snapshot is not None
        values, position = np.frombuffer(codec.dumps(snapshot.values), np.uint8), snapshot.position
        header = [values.nbytes, snapshot.memory.nbytes, _compute_crc(values), _compute_crc(snapshot.memory)]
        header += [position.epoch, position.phase.value, position.step]
        for part in (np.array(header, np.int64), values, snapshot.memory):
            group.broadcast(part, source)
        return None
    arrived = np.zeros(7, np.int64)
    group.broadcast(arrived, source)
    values_bytes, memory_bytes, values_crc, memory_crc, epoch, phase, step = arrived.tolist()
    values, memory = np.empty(values_bytes, np.uint8), allocate(memory_bytes)
    group.broadcast(values, source)
    group.broadcast(memory, source)
    if not receives:
        return None
    if (_compute_crc(values), _compute_crc(memory)) != (values_crc, memory_crc):
        raise StoreError("the state that arrived is not the one that was sent; it was not taken over.")
    return Snapshot(Position(epoch, Phase(phase), step), codec.loads(values.tobytes(), trusted=True), memory)


def exchange_kept(group: Group, source: int, values: Any, own: Mapping[tuple[str, int, int], Kept]) -> None:
    """Fill in the kept arrays of the snapshot of rank `source`: by `own`, those that this process has made, by key, or
    else by those of the source. Collective, after `broadcast_snapshot`, and raises as that does."""
    kept = list(find_kept(values))
    if not kept:
        return
    for each in kept:
        each.take_from(own)
    lacking = dict.fromkeys(each.key for each in kept if each.memory is None)
    told = group.allgather_bytes(pickle.dumps(list(lacking)))
    wanted = {key for packed in told for key in pickle.loads(packed)}
    for each in kept:
        if each.key in wanted:
            lacks = each.memory is None and group.rank != source
            memory = np.empty(each.key[1], np.uint8) if lacks else each.of(_NOTHING)
            group.broadcast(memory, source)
            if _compute_crc(memory) != each.key[2]:
                raise StoreError(
                    "a part of the state that arrived is not the one that was sent; it was not taken over."
                )
            # The program makes others in each process.
            each.memory, each.is_made = memory, False
            if each.key in own:
                own[each.key].is_made = False


def _compute_crc(data: Bytes) -> int:
    return zlib.crc32(data.data)
