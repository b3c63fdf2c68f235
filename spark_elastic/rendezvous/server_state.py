"""The driver's decisions as the server answers them, the key-value store, and the long polls that wait for changes.

Owned by the server's event loop thread, to which the driver's calls are passed. It decides nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spark_elastic.errors import InvalidInput, StaleGeneration
from spark_elastic.protocol.messages import NextWorld
from spark_elastic.protocol.types import INITIAL_VERSION, Fence, MembershipVersion, SlotId, WorkerId, World
from spark_elastic.rendezvous.long_polls import Waiters
from spark_elastic.rendezvous.messages import (
    Blobs,
    CompareAndSet,
    Comparison,
    SlotCommands,
    WorkerToStop,
    WorkerUpdate,
)

GENERATION = "generation/"  # begins the scopes that only `open` makes


@dataclass(frozen=True)
class KeyValueLimits:
    """Upper bounds of the key-value store."""

    scopes: int = 256  # of the store; a generation's is counted, but never refused
    keys: int = 65536  # of one scope
    key_bytes: int = 512  # characters of one key
    value_bytes: int = 4 << 20  # of one value
    total_bytes: int = 256 << 20  # of all values together


def name_generation_scope(generation: int) -> str:
    return f"{GENERATION}{generation}"


class KeyValueStore:
    """Values by scope and key.

    A generation's scope is opened and closed with its world, so that a late writer does not reach the next one; other
    scopes are opened by their first write. Methods raise `StaleGeneration` for a generation's scope that is not open,
    and `InvalidInput` if a limit would be exceeded.
    """

    def __init__(self, bounds: KeyValueLimits | None = None) -> None:
        self._bounds = bounds or KeyValueLimits()
        self._scopes: dict[str, dict[str, bytes]] = {}
        # Whether each comparison changed its key, by scope and token; no values, since `_bytes` does not count these.
        self._comparisons: dict[str, dict[str, bool]] = {}
        self._bytes = 0

    def open(self, scope: str) -> None:
        self._scopes.setdefault(scope, {})

    def close(self, scope: str) -> None:
        """Forget a scope and what is in it."""
        self._bytes -= sum(map(len, self._scopes.pop(scope, {}).values()))
        self._comparisons.pop(scope, None)

    def close_generations(self) -> list[str]:
        """Close every generation's scope; their names."""
        names = [name for name in self._scopes if name.startswith(GENERATION)]
        for name in names:
            self.close(name)
        return names

    def set(self, scope: str, key: str, value: bytes) -> None:
        entries = self._scope(scope, create=True)
        grown = self._bytes + len(value) - len(entries.get(key, b""))
        bounds = self._bounds
        if len(value) > bounds.value_bytes or len(key) > bounds.key_bytes:
            raise InvalidInput(
                f"The value of {key[:80]!r} has {len(value)} bytes; {bounds.value_bytes} is the most."
            )
        if grown > bounds.total_bytes or (key not in entries and len(entries) >= bounds.keys):
            raise InvalidInput(f"The key-value store is full; scope {scope[:80]!r} cannot take {key[:80]!r}.")
        entries[key] = value
        self._bytes = grown

    def get(self, scope: str, keys: Sequence[str]) -> tuple[bytes | None, ...]:
        entries = self._scope(scope)
        return tuple(entries.get(key) for key in keys)

    def list_keys(self, scope: str, prefix: str) -> tuple[str, ...]:
        return tuple(key for key in self._scope(scope) if key.startswith(prefix))

    def compare_and_set(self, request: CompareAndSet) -> Comparison:
        """A request that is sent again changes nothing again. If the first one changed nothing either, the answer has
        the value of now."""
        entries = self._scope(request.scope, create=True)
        comparisons = self._comparisons.setdefault(request.scope, {})
        if request.token in comparisons:
            changed = comparisons[request.token]
            return Comparison(changed, request.desired if changed else entries.get(request.key))
        changed = entries.get(request.key) == request.expected
        if changed and request.desired is not None:
            self.set(request.scope, request.key, request.desired)
        elif changed:
            self._bytes -= len(entries.pop(request.key, b""))
        if len(comparisons) >= self._bounds.keys:
            del comparisons[next(iter(comparisons))]  # the oldest, which no client sends again
        comparisons[request.token] = changed
        return Comparison(changed, entries.get(request.key))

    def find_missing(self, scope: str, keys: Iterable[str]) -> list[str]:
        entries = self._scope(scope)
        return [key for key in keys if key not in entries]

    def _scope(self, name: str, create: bool = False) -> dict[str, bytes]:
        entries = self._scopes.get(name)
        if entries is None:
            if name.startswith(GENERATION):
                raise StaleGeneration(f"{name} is not open.")
            entries = {}
            if create:
                if len(self._scopes) >= self._bounds.scopes:
                    raise InvalidInput(f"The key-value store has {len(self._scopes)} scopes, its most.")
                self._scopes[name] = entries
        return entries


class ServerState:
    """The current world, aborts, versions, commands to slots and the job's end. Changes wake the polls they concern."""

    def __init__(self, attempt: int) -> None:
        self.attempt = attempt
        self.values = KeyValueStore()
        self.waiters = Waiters()
        self.ended: str | None = None
        self._blob_counts: Counter[str] = Counter()  # by name of the exchange, in the current world
        self._blobs: dict[str, Blobs] = {}
        self._world: World | None = None
        self._next = NextWorld()  # the reply that tells its members of it
        self._abort_reason: str | None = None  # why the current world is over
        self._newest_ended: tuple[Fence, str] | None = None  # the newest world that is over, and why it is
        self._version = INITIAL_VERSION
        self._stops: dict[WorkerId, WorkerToStop] = {}
        self._commands: defaultdict[SlotId, list[WorkerToStop]] = defaultdict(list)
        self._released: dict[SlotId, str] = {}

    # ---- the driver's calls

    def publish(self, world: World) -> None:
        self._close_exchange()
        if self._world is not None and self._abort_reason is None:
            self._newest_ended = self._world.fence, world.reason
        self._world, self._abort_reason, self._next = world, None, NextWorld(world)
        self.values.open(name_generation_scope(world.fence.generation))
        # Also those that are no members: they may watch the previous world, which is over now.
        self.waiters.wake_all()

    def abort(self, fence: Fence, reason: str) -> None:
        """Ignores a fence other than the current world's: that world is over."""
        if self._world is not None and self._world.fence == fence and self._abort_reason is None:
            self._abort_reason = reason
            self._newest_ended = fence, reason
            self._close_exchange()
            self.waiters.wake_all()

    def announce(self, version: MembershipVersion) -> None:
        self._version = version
        self.waiters.wake_all()

    def stop_worker(self, worker: WorkerId, reason: str, kill: bool) -> None:
        slot = worker.slot
        self._stops[worker] = stop = WorkerToStop(worker, reason, kill)
        self._commands[slot].append(stop)
        self.waiters.wake(worker)
        self.waiters.wake(slot)

    def release_slot(self, slot: SlotId, reason: str) -> None:
        self._released.setdefault(slot, reason)
        self.waiters.wake(slot)

    def end(self, reason: str) -> None:
        if self.ended is None:
            self.ended = reason
            self._close_exchange()
            self.waiters.wake_all()

    def add_blob(self, scope: str, name: str, rank: int, blob: bytes) -> bool:
        """A rank's part in an exchange of the current world; True once all parts are there."""
        if not self.values.find_missing(scope, [f"{name}/{rank}"]):
            return False
        self.values.set(scope, f"{name}/{rank}", blob)
        self._blob_counts[name] += 1
        assert self._world is not None
        if self._blob_counts[name] < self._world.size:
            return False
        keys = [f"{name}/{rank}" for rank in range(self._world.size)]
        self._blobs[name] = Blobs(tuple(blob or b"" for blob in self.values.get(scope, keys)))
        return True

    def get_blobs(self, name: str) -> Blobs | None:
        """One object for all ranks, so that it is encoded once; None while a part is missing."""
        return self._blobs.get(name)

    def find_missing_ranks(self, scope: str, name: str) -> set[int]:
        """Ranks whose part is missing."""
        size = self._world.size if self._world is not None else 0
        return {rank for rank in range(size) if self.values.find_missing(scope, [f"{name}/{rank}"])}

    def _close_exchange(self) -> None:
        self._blob_counts.clear()
        self._blobs.clear()
        for scope in self.values.close_generations():
            self.waiters.wake(scope)

    # ---- replies to slots and workers

    def get_stop_reason(self, worker: WorkerId) -> str | None:
        """Why a worker has to end; None: it continues."""
        stop = self._stops.get(worker)
        return self.ended if stop is None else stop.reason

    def find_next_world(self, worker: WorkerId, left: Fence | None) -> NextWorld | None:
        """The newest world, if it has `worker` as a member and is newer than the one it left.

        Members receive it even if it is over by now: the driver waits until each of them has left it. They share
        one object, so that it is encoded once.
        """
        world = self._world
        if world is None or world.member(worker) is None:
            return None
        return self._next if left is None or left < world.fence else None

    def find_world(self, fence: Fence) -> World | None:
        return self._world if self._world is not None and self._world.fence == fence else None

    def get_end_reason(self, fence: Fence) -> str | None:
        """Why the world of `fence` is over; None while it lives."""
        if self.ended is not None:
            return self.ended
        if self._world is None or fence > self._world.fence:
            return f"generation {fence.generation} is not known here"
        if fence < self._world.fence:
            return f"generation {fence.generation} was followed by {self._world.fence.generation}: {self._world.reason}"
        return self._abort_reason

    def get_update(self, worker: WorkerId) -> WorkerUpdate:
        fence, reason = self._newest_ended or (None, "")
        return WorkerUpdate(self._version, fence, reason, self.get_stop_reason(worker))

    def get_commands(self, slot: SlotId, seen: int) -> SlotCommands:
        """The commands for a slot after the first `seen` ones."""
        commands = self._commands.get(slot, [])
        release = self._released.get(slot) or self.ended
        return SlotCommands(len(commands), tuple(commands[max(0, seen) :]), release)
