"""A run in the store: the driver that owns it, and its checkpoints. Rank 0 writes them in the background, the driver
publishes them (R18, publication).

    runs/RUN/checkpoints/ATTEMPT-GENERATION-EPOCH-PHASE-STEP/{parts, manifest.json}    one checkpoint
    runs/RUN/checkpoints/published-ATTEMPT-NUMBER.json                                 the list of published ones

A checkpoint has the two parts of a `Snapshot`: `values`, encoded by the framework's codec, and `memory`, the bytes of
all arrays. A run resumes from it once the driver has put it on the published list. Only the last list of the highest
attempt is read, so a driver that lost the run changes nothing. A list is a new object, since not every store replaces
one at once, and the lists before it are deleted once it is there.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np

from spark_elastic.clock import Clock
from spark_elastic.data.store import ENDED, Store, StoreFull, parse_document
from spark_elastic.errors import ElasticError, InvalidInput, JobCancelled, StoreError
from spark_elastic.protocol.messages import TAKEN_OVER
from spark_elastic.protocol.types import Checkpoint, Fence, Position, format_position
from spark_elastic.rendezvous import codec
from spark_elastic.runs.kept_commits import KeptCommits
from spark_elastic.runs.snapshot import Codec, Snapshot

log = logging.getLogger("spark_elastic.state")

MANIFEST = "manifest.json"
LIST = "published-"  # prefix of the lists of published checkpoints
# Names that this module gives, each with the number of an attempt; others may keep something beside them.
_LIST = re.compile(LIST + r"([0-9]{6,18})-[0-9]{8,18}\.json")
_CHECKPOINT = re.compile(r"([0-9]{6,18})-[0-9]{6,18}-[0-9]{5,18}-[0-9]-[0-9]{8,18}")
VERSION = 5  # of the format of a checkpoint
VALUES, MEMORY = "values", "memory"  # the parts of a snapshot
CHECKPOINTER, SNAPSHOT_READER = "checkpointer", "snapshot_reader"  # keys of `process_values`
FLUSH_TIMEOUT = 3600.0  # seconds that the end of a training waits for its last checkpoint
WARN_INTERVAL = 60.0  # seconds between two warnings about it
CLOSE_TIMEOUT = 60.0  # seconds that `close` waits for the checkpoint in flight


class CheckpointStore:
    """The checkpoints of one run. Holds no state; any thread."""

    def __init__(self, store: Store, run_id: str) -> None:
        self._store = store
        self._folder = f"runs/{run_id}/checkpoints"

    def write(self, fence: Fence, position: Position, parts: Mapping[str, bytes]) -> Checkpoint:
        """Write the parts and, at last, a manifest of them. No run resumes from it before the driver has published it.
        If the store has no room (StoreFull), what was written of the checkpoint is removed."""
        name = format_checkpoint_name(fence, position)
        checksums = {part: {"bytes": len(data), "sha256": _sha256(data)} for part, data in parts.items()}
        manifest = json.dumps({"version": VERSION, "parts": checksums}, sort_keys=True).encode()
        try:
            for part, data in {**parts, MANIFEST: manifest}.items():
                self._store.write_verified(f"{self._folder}/{name}/{part}", data)
        except StoreFull:
            self._store.remove_tree(f"{self._folder}/{name}")
            raise
        return Checkpoint(fence, position, name, _sha256(manifest))

    def read(self, checkpoint: Checkpoint) -> dict[str, bytes]:
        """The parts; StoreError if one is missing, differs from what was written, or has another version's format."""
        manifest = self._store.read_bytes(f"{self._folder}/{checkpoint.name}/{MANIFEST}")
        _check(manifest, checkpoint.digest, f"{checkpoint.name}/{MANIFEST}")

        def read(content: Any) -> dict[str, str]:
            if content.get("version") != VERSION:
                raise StoreError(f"{checkpoint.name} was written by another version of spark_elastic.")
            return {part: checksum["sha256"] for part, checksum in content["parts"].items()}

        parts = {}
        for part, digest in parse_document(manifest, f"{checkpoint.name}/{MANIFEST}", read).items():
            data = self._store.read_bytes(f"{self._folder}/{checkpoint.name}/{part}")
            _check(data, digest, f"{checkpoint.name}/{part}")
            parts[part] = data
        return parts

    def read_first_undamaged(self, candidates: Sequence[Checkpoint]) -> tuple[Checkpoint, dict[str, bytes]]:
        """The first undamaged candidate; StoreError if there is none. A warning names each damaged one."""
        for checkpoint in candidates:
            try:
                return checkpoint, self.read(checkpoint)
            except ElasticError as error:  # also a name outside of the store
                log.warning("checkpoint %s is damaged, and is not used: %s", checkpoint.name, error)
        names = ", ".join(checkpoint.name for checkpoint in candidates)
        raise StoreError(f"No checkpoint of {self._store.join(self._folder)} is whole: {names}.")

    def publish(self, attempt: int, checkpoints: Iterable[Checkpoint]) -> None:
        """Write the list of published checkpoints, newest first, of this attempt. `sweep` deletes the one before."""
        listed = [asdict(checkpoint) for checkpoint in checkpoints]
        before = _select_lists(self._store.list(self._folder), attempt)
        number = int(before[-1].rpartition("-")[2].removesuffix(".json")) + 1 if before else 1
        name = f"{self._folder}/{LIST}{attempt:06d}-{number:08d}.json"
        self._store.write_bytes(name, json.dumps(listed).encode())

    def find_highest_attempt(self) -> int:
        """The newest attempt that has written or published a checkpoint; 0: none has."""
        names = (path.rpartition("/")[2] for path in self._store.list(self._folder))
        own = (_CHECKPOINT.fullmatch(name) or _LIST.fullmatch(name) for name in names)
        return max((int(each[1]) for each in own if each), default=0)

    def read_published(self) -> tuple[Checkpoint, ...]:
        """The published checkpoints, newest first: the last list of the highest attempt that has one."""

        def read(items: Any) -> tuple[Checkpoint, ...]:
            return tuple(codec.read(Checkpoint, each) for each in items)

        names = _select_lists(self._store.list(self._folder))
        while names:
            name = names.pop()
            try:
                return parse_document(self._store.read_bytes(name), name, read)
            except StoreError as error:
                there = _select_lists(self._store.list(self._folder))
                if name in there:
                    log.warning("%s cannot be read, so the list before it is used: %s", name, error)
                else:  # the driver has published another one meanwhile
                    names = there
        return ()

    def sweep(self, attempt: int, published: Sequence[Checkpoint]) -> None:
        """Delete the lists of `attempt` before its last one, and the checkpoints that the last one does not name: older
        ones, and those of dead attempts, the manifest first. Newer ones stay: a worker may be about to report them."""
        paths = self._store.list(self._folder)
        for path in _select_lists(paths, attempt)[:-1]:
            self._store.delete(path)
        names = {checkpoint.name for checkpoint in published}
        newest = max(names, default="")
        for path in paths:
            name = path.rpartition("/")[2]
            own = _CHECKPOINT.fullmatch(name)
            if own and name not in names and (name < newest or int(own[1]) < attempt):
                self._store.delete(f"{path}/{MANIFEST}")
                self._store.remove_tree(path)


def format_checkpoint_name(fence: Fence, position: Position) -> str:
    """The folder of a checkpoint that a member of the world `fence` writes at `position`."""
    numbers = f"{position.epoch:05d}-{position.phase.value}-{position.step:08d}"
    return f"{fence.attempt:06d}-{fence.generation:06d}-{numbers}"


def _select_lists(names: Iterable[str], attempt: int | None = None) -> list[str]:
    """The lists of published checkpoints among objects, the last one last. attempt: whose; None: all."""
    lists = ((name, _LIST.fullmatch(name.rpartition("/")[2])) for name in names)
    return [name for name, own in lists if own and attempt in (None, int(own[1]))]


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _check(data: bytes, digest: str, name: str) -> None:
    if _sha256(data) != digest:
        raise StoreError(f"{name} is not what was written: its SHA-256 differs.")


@dataclass(frozen=True)
class CheckpointPolicy:
    """When a checkpoint is due: after so many steps or seconds, whichever comes first."""

    run_id: str  # whose checkpoints they are
    steps: int | None = None  # steps between two checkpoints; None: their number does not matter
    seconds: float | None = 60.0  # seconds between two checkpoints; None: time does not matter


class SnapshotReader:
    """Reads snapshots back from checkpoints, each only once until `forget`: ranks that wait may give up the world, and
    a checkpoint that takes longer than `collective_timeout` to read would never be used. Training thread."""

    def __init__(self, store: Store, run_id: str, codec: Codec, kept: KeptCommits | None = None) -> None:
        """kept: what this host keeps of the run, of which the first candidate may be; None: nothing."""
        self._store = CheckpointStore(store, run_id)
        self._codec, self._kept = codec, kept
        self._cached: tuple[tuple[Checkpoint, ...], Snapshot] | None = None

    def read(self, candidates: Sequence[Checkpoint]) -> Snapshot | None:
        """The snapshot in the first undamaged candidate; StoreError: there is none. None: it was kept, and is gone."""
        wanted = tuple(candidates)
        if self._kept is not None and wanted[0].is_kept:
            try:
                return self._kept.read(wanted[0])
            except StoreError as error:
                log.warning("the run continues from an older state, if there is one: %s", error)
                wanted = wanted[1:]
                if not wanted:
                    return None
        if self._cached is None or self._cached[0] != wanted:
            checkpoint, parts = self._store.read_first_undamaged(wanted)
            try:
                values = self._codec.loads(parts[VALUES], trusted=False)
                memory = np.frombuffer(parts[MEMORY], np.uint8).copy()
            except ElasticError:
                raise
            except Exception as error:  # of torch, pickle, or the program's classes
                reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
                raise StoreError(f"checkpoint {checkpoint.name} cannot be loaded ({reason}).") from error
            self._cached = wanted, Snapshot(checkpoint.position, values, memory)
        return self._cached[1]

    def read_published(self) -> tuple[Checkpoint, ...]:
        return self._store.read_published()

    def forget(self) -> None:
        """Free the memory, once the world that began from the checkpoint has its state."""
        self._cached = None


Report = Callable[[Checkpoint | None], object]
"""Passes a written checkpoint to the driver, which publishes it unless it is too late; None: the store has no room."""


class Checkpointer:
    """Writes snapshots of one training process, on rank 0 alone, as checkpoints. The training thread calls it.

    A snapshot that `build_pending` has built waits until its step is final (R1, finalized steps): from then on the step
    is part of the history of every survivor, and `write_pending` offers the snapshot to a thread that writes it. One
    checkpoint is in flight at a time, and a newer one replaces one that still waits. A store that fails costs that
    checkpoint, never the training; of a row of failures only the first is a warning."""

    def __init__(
        self, store: Store, due: CheckpointPolicy, clock: Clock, codec: Codec, report: Report
    ) -> None:
        """report: called in the thread."""
        self.stall_seconds = 0.0  # for which checkpoints have held up the training thread
        self._due, self._clock, self._codec = due, clock, codec
        self._store, self._report = CheckpointStore(store, due.run_id), report
        self._last, self._steps = clock.now(), 0  # when the last checkpoint was due, and steps since then
        self._pending: Snapshot | None = None  # a snapshot whose step is not finalized yet
        self._changed = threading.Condition()  # guards the five fields below
        self._waiting: tuple[Fence, Snapshot] | None = None  # the checkpoint to write next
        self._offered: tuple[Fence, Position] | None = None  # the last one; None: it failed, or there is none
        # Whether it was offered again while it was not known to fail: at the end of a job nothing offers it once more.
        self._offered_again = False
        self._writing = self._closing = False
        self._thread: threading.Thread | None = None  # `offer` starts it
        self._failures = 0  # since the last checkpoint that was written; the thread's own

    def count_step(self) -> bool:
        """Count a step. True if a checkpoint is due; the counts then begin again."""
        self._steps += 1
        steps, seconds = self._due.steps, self._due.seconds
        by_steps = steps is not None and self._steps >= steps
        by_time = seconds is not None and self._clock.now() - self._last >= seconds
        if by_steps or by_time:
            self._last, self._steps = self._clock.now(), 0
        return by_steps or by_time

    def build_pending(self, build: Callable[[], Snapshot]) -> None:
        """Build a snapshot now. It is pending until `write_pending` or `discard_pending`."""
        with self.measure_stall():
            self._pending = build()

    @contextmanager
    def measure_stall(self) -> Iterator[None]:
        began = self._clock.now()
        try:
            yield
        finally:
            self.stall_seconds += self._clock.now() - began

    def write_pending(self, fence: Fence) -> None:
        snapshot, self._pending = self._pending, None
        if snapshot is not None:
            self.offer(fence, snapshot)

    def discard_pending(self) -> None:
        """Drop the pending snapshot: the world broke before its step was finalized."""
        self._pending = None

    def offer(self, fence: Fence, snapshot: Snapshot) -> None:
        """Have the thread write a snapshot, which must not change any more, unless one of that position was offered
        before and does not fail. Returns at once."""
        place = fence, snapshot.position
        with self._changed:
            self._offered_again = self._offered == place
            if self._offered_again:
                return
            self._offered, self._waiting = place, (fence, snapshot)
            self._changed.notify_all()
        if self._thread is None:
            self._start_thread()

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._run, name="spark-elastic-checkpoints", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            # The process has as many threads as it may: the next checkpoint tries again
            log.warning("checkpoint not written: %s", error)
            with self._changed:
                self._offered = self._waiting = None
            return
        self._thread = thread

    def flush(self) -> None:
        """Wait until everything offered is written and reported or has failed, up to FLUSH_TIMEOUT for a slow store.
        Called where all ranks stop for good."""
        for number in range(1, int(FLUSH_TIMEOUT / WARN_INTERVAL) + 1):
            with self._changed:
                if self._changed.wait_for(lambda: self._waiting is None and not self._writing, WARN_INTERVAL):
                    return
            log.warning("the last checkpoint is still being written, after %g s.", number * WARN_INTERVAL)
        log.error("the last checkpoint is given up: the store does not answer; the one before it stays.")

    def close(self) -> None:
        """Write the checkpoint that waits, and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(CLOSE_TIMEOUT)

    # ---- the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._waiting is not None)
                task, self._waiting = self._waiting, None
                self._writing = task is not None
            if task is None:
                return
            fence, snapshot = task
            succeeded = self._try_to_write(fence, snapshot)
            with self._changed:
                self._writing = False
                if not succeeded and self._offered == (fence, snapshot.position):  # so none waits
                    again, self._offered_again = self._offered_again, False
                    self._offered, self._waiting = (self._offered, task) if again else (None, None)
                self._changed.notify_all()

    def _try_to_write(self, fence: Fence, snapshot: Snapshot) -> bool:
        where = format_position(snapshot.position)
        try:
            self._write(fence, snapshot)
            return True
        except ElasticError as error:
            self._failures += 1
            level = logging.WARNING if self._failures == 1 else logging.DEBUG
            log.log(level, "checkpoint at %s not written: %s", where, error)
        except Exception:  # raised by whatever made the bytes; the next checkpoint may succeed
            log.exception("checkpoint at %s not written", where)
        return False

    def _write(self, fence: Fence, snapshot: Snapshot) -> None:
        parts = {VALUES: self._codec.dumps(snapshot.values), MEMORY: snapshot.memory.tobytes()}
        try:
            written = self._store.write(fence, snapshot.position, parts)
        except StoreFull as error:
            self._report(None)
            raise StoreFull(
                f"{error} The driver deletes the oldest checkpoint to make room, but never the newest."
            ) from error
        self._report(written)
        if self._failures:
            log.warning("checkpoints are written again, after %d that failed.", self._failures)
            self._failures = 0


# ---- the driver that owns a run

MAX_TRIES = 100  # drivers that may open the run at the same moment
_ATTEMPT = re.compile("[0-9]{6,18}")
_COMMIT_KEY = re.compile(rb"[0-9a-f]{64}")

CheckpointList: TypeAlias = tuple[Checkpoint, ...]


class OwnedRun:
    """A run, as its driver uses it until another driver takes the run over. Any thread.

    Each driver that opens a run takes the next attempt, by creating an object in the store that only one driver can
    create. The highest attempt owns the run (R10, fence). A driver that finds a higher one publishes nothing more."""

    def __init__(self, store: Store, run_id: str, attempt: int, checkpoints: CheckpointList) -> None:
        """checkpoints: those that are published when the driver opens the run, newest first."""
        self.store, self.run_id, self.attempt, self.checkpoints = store, run_id, attempt, checkpoints
        self._checkpoint_store = CheckpointStore(store, run_id)

    @classmethod
    def acquire(cls, store: Store, run_id: str) -> OwnedRun:
        """Take the run's next attempt, which ends the earlier ones, and remove what those left half written."""
        attempt = acquire_attempt(store, run_id)
        run = cls(store, run_id, attempt, CheckpointStore(store, run_id).read_published())
        run.remove_partial()
        return run

    def check(self) -> None:
        """Raises JobCancelled if another driver owns the run, or the run was removed from the store."""
        owner = find_highest_attempt(self.store, self.run_id)
        if owner < self.attempt:
            raise JobCancelled(
                f"run {self.run_id!r} was removed from the store {self.store.url} while this driver trained it: its "
                f"attempt {self.attempt} is not there any more"
            )
        if owner != self.attempt:
            who = f"{describe_owner(self.store, self.run_id, owner)}; this one is attempt {self.attempt}"
            raise JobCancelled(f"run {self.run_id!r} {TAKEN_OVER} ({who})")

    @property
    def commit_key_name(self) -> str:
        return f"runs/{self.run_id}/commit-key"

    def load_commit_key(self) -> bytes:
        """The run's key, with which its hosts keep commits: R23 (kept commits). The first to want it makes it."""
        name = self.commit_key_name
        self.store.create_exclusive(name, secrets.token_hex(32).encode())
        if not _COMMIT_KEY.fullmatch(self.store.read_bytes(name)):
            # Where a mount has no links, a power cut leaves a part of it, which anybody could guess
            self.store.write_bytes(name, secrets.token_hex(32).encode())
        return bytes.fromhex(self.store.read_bytes(name).decode())

    def delete_objects(self, *names: str) -> None:
        """Delete objects that the run no longer needs, in this order ("": none), while this driver owns the run. If the
        store fails to delete one, it stays with all that follow, and a warning names them."""
        for number, name in enumerate(names):
            try:
                if find_highest_attempt(self.store, self.run_id) != self.attempt:
                    return
                if name:
                    self.store.remove_tree(name)
            except StoreError as error:
                log.warning("%s Remove %s by hand.", error, " and ".join(filter(None, names[number:])))
                return

    def remove_partial(self) -> None:
        """Delete files of the run whose writers were killed. No process may write to the run meanwhile."""
        self.delete_objects(*(each.name for each in self.store.find_partial(f"runs/{self.run_id}")))

    def delete_run(self, *names: str) -> None:
        """Delete a run that cannot be resumed: its record first, since one that names rows that are gone could not be
        resumed either, then `names`, then its attempts."""
        own = self.commit_key_name, get_attempts_folder(self.run_id)
        self.delete_objects(f"runs/{self.run_id}/run.json", *names, *own)
        self.store.remove_empty_folder(f"runs/{self.run_id}")

    def mark_ended(self) -> None:
        """Record that this attempt's job has succeeded: the run counts as unfinished no more, until a later attempt."""
        try:
            if find_highest_attempt(self.store, self.run_id) == self.attempt:
                self.store.write_bytes(f"{get_attempts_folder(self.run_id)}/{self.attempt:06d}{ENDED}", b"{}")
        except StoreError as error:
            log.warning("%s The run counts as unfinished.", error)

    def publish_now(self, checkpoints: CheckpointList) -> None:
        """Publish the list, then delete the checkpoints that it does not name. Blocks. Raises as `check`."""
        self.check()
        try:
            self._checkpoint_store.publish(self.attempt, checkpoints)
        except StoreFull:
            # Not even the list has room before a checkpoint is deleted. One that is on both lists must stay.
            if not set(checkpoints) & set(self._checkpoint_store.read_published()):
                raise
            self._checkpoint_store.sweep(self.attempt, checkpoints)
            self._checkpoint_store.publish(self.attempt, checkpoints)
        self.check()  # a driver that took the run over meanwhile may resume from a checkpoint that `sweep` deletes
        self._checkpoint_store.sweep(self.attempt, checkpoints)


def check_name(run_id: object) -> str:
    """The name of a run. Raises InvalidInput if `run_id` cannot be one."""
    if not isinstance(run_id, str) or run_id in ("", ".", "..") or "/" in run_id:
        raise InvalidInput(f"run_id must be a name without slashes, other than '.' and '..'; got {run_id!r}.")
    return run_id


def acquire_attempt(store: Store, run_id: str) -> int:
    """Create the next attempt of a run and return its number."""
    content = json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode()
    # A power cut may have cost the entry of an attempt, and not the checkpoints of it: those that a lower attempt then
    # writes, or another one's lists, would count for nothing.
    checkpoints = CheckpointStore(store, run_id).find_highest_attempt()
    attempt = max(find_highest_attempt(store, run_id), checkpoints)
    for _ in range(MAX_TRIES):
        attempt += 1
        if store.create_exclusive(f"{get_attempts_folder(run_id)}/{attempt:06d}", content):
            return attempt
    raise StoreError(f"Run {run_id!r}: {MAX_TRIES} other drivers opened it at the same moment; try again.")


def find_highest_attempt(store: Store, run_id: str) -> int:
    """The attempt that owns the run; 0 if no driver has opened it."""
    names = [name.rpartition("/")[2] for name in store.list(get_attempts_folder(run_id))]
    return max((int(name) for name in names if _ATTEMPT.fullmatch(name)), default=0)


def describe_owner(store: Store, run_id: str, attempt: int) -> str:
    """The attempt with the process and host of its driver, for messages."""
    try:
        driver = json.loads(store.read_bytes(f"{get_attempts_folder(run_id)}/{attempt:06d}"))
        return f"attempt {attempt}, process {driver['pid']} on {driver['host']}"
    except (StoreError, ValueError, TypeError, KeyError):
        return f"attempt {attempt}"


def get_attempts_folder(run_id: str) -> str:
    return f"runs/{run_id}/attempts"
