"""Checkpoints of a run in the store: written by workers, published by the driver alone (R18).

    runs/RUN/checkpoints/ATTEMPT-GENERATION-EPOCH-PHASE-STEP/{parts, manifest.json}    objects that nobody knows yet
    runs/RUN/checkpoints/published-ATTEMPT.json                                        which of them count

Each attempt has a list of its own and the highest one's counts, so that a driver that lost the run changes nothing.
Knows no framework: what a part holds is its writer's. Any thread; no state.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from spark_elastic.clock import Clock
from spark_elastic.data.store import Store
from spark_elastic.errors import ElasticError, StoreError
from spark_elastic.protocol.types import Checkpoint, Fence, Phase, Position

log = logging.getLogger("spark_elastic.state")

MANIFEST = "manifest.json"


class CheckpointStore:
    """Those of one run."""

    def __init__(self, store: Store, run_id: str) -> None:
        self._store = store
        self._folder = f"runs/{run_id}/checkpoints"

    def write(self, fence: Fence, position: Position, parts: Mapping[str, bytes]) -> Checkpoint:
        """Write the parts and, last, what they are. It counts once the driver has published it.

        Raises:
            StoreError: the store cannot be written, or does not give back what was.
        """
        name = name_of(fence, position)
        for part, data in parts.items():
            self._store.write_verified(f"{self._folder}/{name}/{part}", data)
        held = {part: {"bytes": len(data), "sha256": _sha256(data)} for part, data in parts.items()}
        manifest = json.dumps({"parts": held}, sort_keys=True).encode()
        self._store.write_verified(f"{self._folder}/{name}/{MANIFEST}", manifest)
        return Checkpoint(fence, position, name, _sha256(manifest))

    def read(self, checkpoint: Checkpoint) -> dict[str, bytes]:
        """Its parts.

        Raises:
            StoreError: something is missing or is not what was written.
        """
        manifest = self._store.read_bytes(f"{self._folder}/{checkpoint.name}/{MANIFEST}")
        _check(manifest, checkpoint.digest, f"{checkpoint.name}/{MANIFEST}")
        parts = {}
        for part, held in json.loads(manifest)["parts"].items():
            data = self._store.read_bytes(f"{self._folder}/{checkpoint.name}/{part}")
            _check(data, held["sha256"], f"{checkpoint.name}/{part}")
            parts[part] = data
        return parts

    def read_newest(self, candidates: Sequence[Checkpoint]) -> tuple[Checkpoint, dict[str, bytes]]:
        """The first of the candidates that is whole; each damaged one is named in a warning.

        Raises:
            StoreError: none of them is.
        """
        for checkpoint in candidates:
            try:
                return checkpoint, self.read(checkpoint)
            except StoreError as error:
                log.warning(
                    "checkpoint %s is damaged, the one before it is taken: %s", checkpoint.name, error
                )
        names = ", ".join(checkpoint.name for checkpoint in candidates)
        raise StoreError(f"No checkpoint of {self._store.join(self._folder)} is whole: {names}.")

    # ---- the driver's part

    def publish(self, attempt: int, kept: Iterable[Checkpoint]) -> None:
        """From now on these count, newest first."""
        listed = [_to_json(checkpoint) for checkpoint in kept]
        self._store.write_bytes(f"{self._folder}/published-{attempt:06d}.json", json.dumps(listed).encode())

    def published(self) -> tuple[Checkpoint, ...]:
        """What counts, newest first: as the highest attempt that published anything has it."""
        names = [name for name in self._store.list(self._folder) if "/published-" in name]
        for name in reversed(names):
            try:
                return tuple(_from_json(item) for item in json.loads(self._store.read_bytes(name)))
            except (StoreError, ValueError, TypeError, KeyError) as error:
                log.warning("%s cannot be read, the list before it is taken: %s", name, error)
        return ()

    def sweep(self, attempt: int, kept: Sequence[Checkpoint]) -> None:
        """Delete what the published list of `attempt` has no use for: what it superseded, and what dead attempts left.

        The manifest first, so that what is half deleted is never taken for whole. What is further than the newest of
        `kept` may be about to be told, and stays.
        """
        names = {checkpoint.name for checkpoint in kept}
        newest = max(names, default="")
        for path in self._store.list(self._folder):
            name = path.rpartition("/")[2]
            if name in names or not name[:1].isdigit():
                continue
            if name < newest or int(name.partition("-")[0]) < attempt:
                self._store.delete(f"{path}/{MANIFEST}")
                self._store.remove_tree(path)


def name_of(fence: Fence, position: Position) -> str:
    """The folder of a checkpoint that a member of that world writes of that position."""
    place = f"{position.epoch:05d}-{position.phase.value}-{position.step:08d}"
    return f"{fence.attempt:06d}-{fence.generation:06d}-{place}"


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _check(data: bytes, digest: str, name: str) -> None:
    if _sha256(data) != digest:
        raise StoreError(f"{name} is not what was written: its SHA-256 differs.")


def _to_json(checkpoint: Checkpoint) -> dict[str, object]:
    return asdict(checkpoint)


def _from_json(item: Mapping[str, dict[str, int]]) -> Checkpoint:
    position = item["position"]
    return Checkpoint(
        Fence(**item["fence"]),
        Position(position["epoch"], Phase(position["phase"]), position["step"]),
        str(item["name"]),
        str(item["digest"]),
    )


# Writes checkpoints beside the training: one thread, one in flight, and a newer one replaces one that waits.
#
# `offer` is called by the training thread and returns at once; the thread is `offer`'s to start. A store that fails
# costs a warning and that checkpoint, never the training.


END_WAIT = 60.0  # seconds that closing waits for the one in flight
LAST_WAIT = 3600.0  # seconds that the end of a training waits for its last checkpoint
TELL_EVERY = 60.0  # seconds


class CheckpointWriter:
    """tell: hands a written checkpoint to the driver, which decides whether it counts."""

    def __init__(self, checkpoints: CheckpointStore, tell: Callable[[Checkpoint], object]) -> None:
        self._checkpoints = checkpoints
        self._tell = tell
        self._changed = threading.Condition()
        self._waiting: tuple[Fence, Position, Callable[[], Mapping[str, bytes]]] | None = None
        self._writing = False
        self._closing = False
        self._thread: threading.Thread | None = None

    def offer(self, fence: Fence, position: Position, parts: Callable[[], Mapping[str, bytes]]) -> None:
        """Write what `parts` gives, which is called in the writer's thread."""
        with self._changed:
            self._waiting = (fence, position, parts)
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="spark-elastic-checkpoints", daemon=True)
            self._thread.start()

    def flush(self) -> None:
        """Wait until all that was offered is written and told, or could not be; a store that is slow is waited for."""
        for minute in range(1, int(LAST_WAIT / TELL_EVERY) + 1):
            with self._changed:
                if self._changed.wait_for(lambda: self._waiting is None and not self._writing, TELL_EVERY):
                    return
            log.warning("the last checkpoint is still being written, after %g s.", minute * TELL_EVERY)
        log.error(
            "the last checkpoint is given up: the store does not answer. The newest one before it stays."
        )

    def close(self) -> None:
        """Write what waits, and end."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(END_WAIT)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._waiting is not None)
                job, self._waiting = self._waiting, None
                self._writing = job is not None
            if job is None:
                return
            fence, position, parts = job
            try:
                self._tell(self._checkpoints.write(fence, position, parts()))
            except ElasticError as error:
                log.warning("checkpoint at %s not written: %s", position, error)
            except Exception:  # of whatever made the bytes; the next checkpoint may fare better
                log.exception("checkpoint at %s not written", position)
            with self._changed:
                self._writing = False
                self._changed.notify_all()


# When a checkpoint is due: by steps, by seconds, or by whichever comes first. One thread.


@dataclass(frozen=True)
class CheckpointPolicy:
    """Of run `run_id`: every `steps` steps, or `seconds` after the last one, whichever comes first; None: not by it."""

    run_id: str
    steps: int | None = None
    seconds: float | None = 60.0


class Schedule:
    """Counts steps and seconds since the last checkpoint."""

    def __init__(self, policy: CheckpointPolicy, clock: Clock) -> None:
        self._policy = policy
        self._clock = clock
        self._last = clock.now()
        self._steps = 0

    def step(self) -> bool:
        """A step was taken; whether a checkpoint is due, from which the next one counts."""
        self._steps += 1
        steps, seconds = self._policy.steps, self._policy.seconds
        by_steps = steps is not None and self._steps >= steps
        by_time = seconds is not None and self._clock.now() - self._last >= seconds
        if by_steps or by_time:
            self._last, self._steps = self._clock.now(), 0
        return by_steps or by_time
