"""Commits in the memory of hosts, outside of worker processes: R23 (kept commits).

A training process shares anonymous memory with its keeper, which outlives it. The keeper's socket is in the abstract
namespace of the host's network, `@spark-elastic/<hash of the key>/<attempt>/<process id>`: no death leaves a file.
Each commit has a memory of its own, and two take turns: a header, the arrays at `ARRAYS`, and behind them the pickled
values. The header comes last, is signed with the run's key and has a checksum of the arrays, so that what a process
left half written, or another run's, is not read.

`CommitKeeper` belongs to a training process: its training thread asks for memory, and whichever thread has completed
a commit keeps it. `KeptCommits` is what a slot or worker of the run finds on its host; any thread.
"""

from __future__ import annotations

import hashlib
import hmac
import inspect
import logging
import mmap
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spark_elastic.data.available_memory import measure_available_memory
from spark_elastic.errors import StoreError
from spark_elastic.protocol.types import KEPT, START, Checkpoint, Fence, Position
from spark_elastic.rendezvous import codec
from spark_elastic.runs import keeper
from spark_elastic.runs.snapshot import Bytes, Snapshot, pickle_value

log = logging.getLogger("spark_elastic.state")

VERSION = 2  # of the layout of a kept commit
HEADER = 4096  # bytes of the header at most
ARRAYS = 1 << 16  # where the arrays begin: a multiple of every page size
SHARE = 0.5  # of the host's free memory, that the two memories of a process take at most
TRIES = 3  # to read a commit while its process still writes
SPAWN_SECONDS = 10.0  # for the keeper to leave its parent
ANSWER_SECONDS = 2.0  # for a keeper's answer
COMMIT_KEEPER = "commit_keeper"  # key of `WorkerSession.process_values`: the CommitKeeper of this process


class _Segment:
    """Memory of one commit, shared with the keeper."""

    def __init__(self, nbytes: int) -> None:
        self.fd = os.memfd_create("spark-elastic-commit")
        os.ftruncate(self.fd, ARRAYS + max(1, nbytes))
        self._map = mmap.mmap(self.fd, max(1, nbytes), offset=ARRAYS)
        self.memory: Bytes = np.frombuffer(self._map, np.uint8)[:nbytes]

    def close(self) -> None:
        os.close(self.fd)


class CommitKeeper:
    """Keeps the newest commit of this process on its host. Of the workers of a machine, the first one does."""

    def __init__(self, key: bytes, attempt: int, orphan_timeout: float) -> None:
        """key: the run's. orphan_timeout: for so long commits stay without this process, in seconds."""
        self.kept = KeptCommits(key)
        self._key, self._attempt, self._orphan_timeout = key, attempt, orphan_timeout
        self._segments: list[_Segment] = []  # the older one first
        self._fence: Fence | None = None  # of the world whose commits are kept; None: none are
        self._name = ""  # of the keeper's socket; "": it was not started
        self.allocations = 0  # how often memory was allocated, which costs more than a commit
        self._is_first, self._gave_up = True, False  # no commit was kept yet; none will be

    def begin_world(self, fence: Fence, *, keeps: bool) -> None:
        """keeps: this worker is the first on its machine."""
        self._fence = fence if keeps and not self._gave_up else None

    @property
    def keeps(self) -> bool:
        return self._fence is not None

    def allocate(self, nbytes: int) -> Bytes | None:
        """Memory of exactly `nbytes` bytes for the next commit, in place of the one before the newest; None: no
        room."""
        if self._fence is None:
            return None
        self.allocations += 1
        is_larger = nbytes > max((each.memory.nbytes for each in self._segments), default=-1)
        room = measure_available_memory() if is_larger else None
        if room is not None and 2 * nbytes > SHARE * room[0]:
            size = f"{nbytes / 2**20:.0f} MiB"
            self._give_up(f"two copies of its {size} do not fit into half of the free memory")
            return None
        try:
            self._start_keeper()
            segment = _Segment(nbytes)
            for old in self._segments[:-1]:
                old.close()
            self._segments = [*self._segments[-1:], segment]
            self._ask(b"k", [each.fd for each in self._segments])
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            # A newer attempt has ended the keeper, or the host lacks descriptors or processes
            self._give_up(str(error))
            return None
        return segment.memory

    def owns(self, memory: Bytes) -> bool:
        """Whether a commit in this memory is kept, or, while nothing is kept, need not be."""
        return self._fence is None or any(memory is each.memory for each in self._segments)

    def begin(self, memory: Bytes) -> None:
        for segment in self._segments:
            if segment.memory is memory:
                os.pwrite(segment.fd, bytes(HEADER), 0)
                self._segments.sort(key=lambda each: each is segment)

    def keep(self, snapshot: Snapshot) -> None:
        """The snapshot, in memory from `allocate`, is complete."""
        fence = self._fence
        segment = next((each for each in self._segments if each.memory is snapshot.memory), None)
        if fence is None or segment is None or snapshot.position == START:
            return
        try:
            self._write(segment, snapshot, fence)
        except Exception as error:  # objects raise anything when they are asked for their state
            self._give_up(f"{type(error).__name__}: {error}")
            return
        if self._is_first:
            self._is_first = False
            self.kept.drop(self._attempt)

    def _write(self, segment: _Segment, snapshot: Snapshot, fence: Fence) -> None:
        values, memory = pickle_value(snapshot.values), snapshot.memory
        sums = _sum(memory), hashlib.sha256(values).hexdigest()
        header = codec.dumps(_Header(VERSION, fence, snapshot.position, memory.nbytes, len(values), *sums))
        os.pwrite(segment.fd, values, ARRAYS + max(1, memory.nbytes))
        os.pwrite(segment.fd, _sign(self._key, header) + b"\n" + header + b"\n", 0)

    def close(self) -> None:
        """Keep nothing from now on. What is kept stays with the keeper."""
        for segment in self._segments:
            segment.close()
        self._segments, self._fence = [], None

    def _start_keeper(self) -> None:
        if self._name:
            return
        name = f"{self.kept.prefix}{self._attempt}/{os.getpid()}"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"\0{name}")
            listener.listen()
            command = [sys.executable, "-I", "-S", "-c", inspect.getsource(keeper), str(self._attempt)]
            command += [str(os.getpid()), keeper.read_start(os.getpid()), str(self._orphan_timeout)]
            null = subprocess.DEVNULL
            subprocess.run(
                command, stdin=listener.fileno(), stdout=null, stderr=null, timeout=SPAWN_SECONDS, check=True
            )
        self._name = name

    def _ask(self, message: bytes, descriptors: list[int]) -> None:
        with _connect(self._name) as connection:
            socket.send_fds(connection, [message], descriptors)
            connection.recv(1)

    def _give_up(self, why: str) -> None:
        self._fence, self._gave_up = None, True
        sys.stderr.write(
            f"the state of each step is not kept in this host's memory, so after a loss of the driver the run "
            f"continues at its newest checkpoint: {why}\n"
        )


class KeptCommits:
    """The commits of a run that this host keeps."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self.prefix = f"spark-elastic/{hashlib.sha256(b'run' + key).hexdigest()[:32]}/"

    def find_newest(self) -> Checkpoint | None:
        """The newest one: of the highest fence, then at the highest position."""
        found = []
        for name in self.list_keepers():
            with suppress(OSError, StoreError), self._open(name) as commits:
                found += [header.describe(name) for header in commits.values()]
        return max(found, key=lambda each: (each.fence, each.position), default=None)

    def read(self, commit: Checkpoint) -> Snapshot:
        """That commit, or a newer one of its process; StoreError if it is gone, or is not what was kept."""
        name = commit.name.removeprefix(KEPT)
        try:
            for _ in range(TRIES):  # a process that has not ended may write over what is read here
                with self._open(name) as commits:
                    newest_first = sorted(commits.items(), key=lambda each: each[1].position, reverse=True)
                    for descriptor, header in newest_first:
                        if (snapshot := header.read(descriptor)) is not None:
                            return snapshot
        except OSError as error:
            raise StoreError(f"The commit that {name} kept is gone: {error}.") from error
        raise StoreError(f"The commit that {name} keeps is not what was kept: its checksum differs.")

    def drop(self, attempt: int) -> None:
        """End the keepers of earlier attempts, and those of this attempt whose processes have ended."""
        for name in self.list_keepers():
            with suppress(OSError), _connect(name) as connection:
                connection.sendall(f"d{attempt}".encode())
                connection.recv(1)

    def list_keepers(self) -> list[str]:
        """Names of the sockets of all that keep something of the run on this host."""
        try:
            lines = Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return []
        names = (line.rpartition(" ")[2].removeprefix("@") for line in lines)
        return sorted({name for name in names if name.startswith(self.prefix)})

    @contextmanager
    def _open(self, name: str) -> Iterator[dict[int, _Header]]:
        """The headers of a keeper's commits, by descriptor."""
        with _connect(name) as connection:
            connection.sendall(b"f")
            _, descriptors, _, _ = socket.recv_fds(connection, 1, keeper.MOST)
        try:
            read = {each: _Header.read_from(each, self._key) for each in descriptors}
            yield {descriptor: header for descriptor, header in read.items() if header is not None}
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


@dataclass(frozen=True)
class _Header:
    """What a kept commit is, as its header says."""

    version: int  # of the layout
    fence: Fence  # of the world that made it
    position: Position  # of its state
    nbytes: int  # of its arrays
    values_bytes: int  # of its values, pickled
    sum: int  # checksum of the arrays
    digest: str  # of the pickled values

    @classmethod
    def read_from(cls, descriptor: int, key: bytes) -> _Header | None:
        """None: there is no complete commit of this run."""
        signature, text, _ = (os.pread(descriptor, HEADER, 0) + b"\n\n").split(b"\n", 2)
        if not hmac.compare_digest(signature, _sign(key, text)):
            return None
        fields = codec.loads(text)
        return codec.read(cls, fields) if fields["version"] == VERSION else None

    def describe(self, name: str) -> Checkpoint:
        return Checkpoint(self.fence, self.position, f"{KEPT}{name}", "")

    def read(self, descriptor: int) -> Snapshot | None:
        """The commit; None: it is not what was kept."""
        memory: Bytes = np.empty(self.nbytes, np.uint8)
        read = 0
        while read < self.nbytes and (more := os.preadv(descriptor, [memory.data[read:]], ARRAYS + read)):
            read += more
        values = os.pread(descriptor, self.values_bytes, ARRAYS + max(1, self.nbytes))
        sums = _sum(memory), hashlib.sha256(values).hexdigest()
        is_whole = read == self.nbytes and sums == (self.sum, self.digest)
        return Snapshot(self.position, pickle.loads(values), memory) if is_whole else None


@contextmanager
def _connect(name: str) -> Iterator[socket.socket]:
    """Raises OSError if nobody of this user answers under that name."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_SECONDS)
        connection.connect(f"\0{name}")
        if keeper.find_peer(connection)[1] != os.getuid():
            raise PermissionError(f"@{name} belongs to another user")
        yield connection


def _sum(memory: Bytes) -> int:
    """A checksum as quick as a copy, which finds what memory does to a bit; the signature is against people."""
    whole = memory.nbytes & ~7
    rest = int(memory[whole:].sum(dtype=np.uint64))
    return int(memory[:whole].view(np.uint64).sum(dtype=np.uint64)) + rest & (1 << 64) - 1


def _sign(key: bytes, text: bytes) -> bytes:
    return hmac.new(key, text, "sha256").hexdigest().encode()
