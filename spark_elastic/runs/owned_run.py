"""A run that this driver owns: its attempts and its published checkpoints. Any thread.

Each driver that opens a run takes the next attempt, by creating an object in the store that only one driver can create.
The highest attempt owns the run (R10, fence). A driver that finds a higher attempt publishes nothing more.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import socket
from typing import TypeAlias

from spark_elastic.data.store import ENDED, Store, StoreFull
from spark_elastic.errors import InvalidInput, JobCancelled, StoreError
from spark_elastic.protocol.messages import TAKEN_OVER
from spark_elastic.protocol.types import Checkpoint
from spark_elastic.runs.checkpoint import CheckpointStore

log = logging.getLogger("spark_elastic.state")

MAX_TRIES = 100  # drivers that may open the run at the same moment
_ATTEMPT = re.compile("[0-9]{6,18}")
_COMMIT_KEY = re.compile(rb"[0-9a-f]{64}")

CheckpointList: TypeAlias = tuple[Checkpoint, ...]


class OwnedRun:
    """A run, as its driver uses it until another driver takes the run over."""

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
