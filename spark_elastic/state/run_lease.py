"""A run that this driver holds: its attempt, the checkpoints that count, and the thread that publishes them.

`publish` is called by the driver's loop and returns at once; the thread starts with `start` and ends with `close`. A
driver that finds that another took the run over publishes nothing any more and says so.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import socket
import threading
from collections.abc import Callable
from typing import TypeAlias

from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidInput, JobCancelled, StoreError
from spark_elastic.protocol.types import Checkpoint
from spark_elastic.state.checkpoint import CheckpointStore

# Which driver holds a run: each that opens it takes the next attempt, and the highest is the holder (R10).
#
# An attempt is an object of the store that exactly one driver could create. Any thread; no state.


TRIES = 100  # drivers that open the run at the same moment


def check_name(run_id: object) -> None:
    """Raises InvalidInput where a run cannot be called so."""
    if not isinstance(run_id, str) or run_id in ("", ".", "..") or "/" in run_id:
        raise InvalidInput(f"run_id must be a name without slashes, other than '.' and '..'; got {run_id!r}.")


def acquire_attempt(store: Store, run_id: str) -> int:
    """The attempt that is this driver's alone.

    Raises:
        StoreError: the store cannot be read or written.
    """
    content = json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode()
    attempt = highest_attempt(store, run_id)
    for _ in range(TRIES):
        attempt += 1
        if store.create_exclusive(f"{attempts_folder(run_id)}/{attempt:06d}", content):
            return attempt
    raise StoreError(f"Run {run_id!r}: {TRIES} other drivers opened it at the same moment; try again.")


def highest_attempt(store: Store, run_id: str) -> int:
    """The attempt that holds the run; 0 where nobody has opened it."""
    names = [name.rpartition("/")[2] for name in store.list(attempts_folder(run_id))]
    return max((int(name) for name in names if name.isdigit()), default=0)


def describe_holder(store: Store, run_id: str, attempt: int) -> str:
    """For sentences: which driver took it."""
    try:
        driver = json.loads(store.read_bytes(f"{attempts_folder(run_id)}/{attempt:06d}"))
        return f"attempt {attempt}, process {driver['pid']} on {driver['host']}"
    except (StoreError, ValueError, TypeError, KeyError):
        return f"attempt {attempt}"


def attempts_folder(run_id: str) -> str:
    """Where a run's attempts are."""
    return f"runs/{run_id}/attempts"


log = logging.getLogger("spark_elastic.state")

END_WAIT = 30.0  # seconds that closing waits for the store
CheckpointList: TypeAlias = tuple[Checkpoint, ...]


class RunLease:
    """run_id: a folder of the store. attempt: this driver's (R10). checkpoints: what it goes on from, newest first."""

    def __init__(self, store: Store, run_id: str, attempt: int, checkpoints: CheckpointList) -> None:
        self.store, self.run_id, self.attempt, self.checkpoints = store, run_id, attempt, checkpoints
        self._folder = CheckpointStore(store, run_id)
        self._orders: queue.SimpleQueue[CheckpointList | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @classmethod
    def acquire(cls, store: Store, run_id: str) -> RunLease:
        """From here on no other driver holds it.

        Raises:
            StoreError: the store cannot be read or written.
        """
        attempt = acquire_attempt(store, run_id)
        return cls(store, run_id, attempt, CheckpointStore(store, run_id).published())

    def check(self) -> None:
        """Raises JobCancelled where another driver holds the run."""
        holder = self._holder()
        if holder != self.attempt:
            taken_by = describe_holder(self.store, self.run_id, holder)
            raise JobCancelled(
                f"run {self.run_id!r} was taken over by another driver ({taken_by}; this one is attempt {self.attempt})"
            )

    def release(self, *names: str) -> None:
        """Remove what the run needs no more, one after the other ("": nothing): as long as this driver holds the run.

        What the store does not let go stays, with all that comes after it, and a warning says so.
        """
        for place, name in enumerate(names):
            try:
                if self._holder() != self.attempt:
                    return
                if name:
                    self.store.remove_tree(name)
            except StoreError as error:
                log.warning("%s Remove %s by hand.", error, " and ".join(filter(None, names[place:])))
                return

    def delete(self, *names: str) -> None:
        """Let go of a run that came to nothing: its record, then `names`, then who held it.

        In this order: a record without the rows that it tells of could not be gone on with.
        """
        self.release(f"runs/{self.run_id}/run.json", *names, attempts_folder(self.run_id))

    def _holder(self) -> int:
        return highest_attempt(self.store, self.run_id)

    def start(self, lost: Callable[[str], None]) -> None:
        """lost: called with a sentence, once, when another driver holds the run."""
        self._thread = threading.Thread(
            target=self._run, args=(lost,), name="spark-elastic-publisher", daemon=True
        )
        self._thread.start()

    def publish(self, kept: CheckpointList) -> None:
        self._orders.put(kept)

    def close(self) -> None:
        """Publish what was ordered, and end."""
        self._orders.put(None)
        if self._thread is not None:
            self._thread.join(END_WAIT)

    def _run(self, lost: Callable[[str], None]) -> None:
        while (order := self._orders.get()) is not None:
            try:
                self.publish_now(order)
            except JobCancelled as taken:
                lost(str(taken))
                return
            except Exception as error:  # of whatever file system; the next order may fare better
                log.warning("a checkpoint could not be published: %s", error)

    def publish_now(self, kept: CheckpointList) -> None:
        """Publish `kept`, then delete what they leave without use. Blocks.

        Raises:
            JobCancelled: another driver holds the run; StoreError: the store failed.
        """
        self.check()
        self._folder.publish(self.attempt, kept)
        self.check()  # the one that took it over meanwhile may go on from one of these
        self._folder.sweep(self.attempt, kept)
