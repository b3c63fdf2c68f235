"""The driver's decisions as the server answers them, the key-value store, and the long polls that wait for changes.

Owned by the server's event loop thread, to which the driver's calls are passed. It decides nothing.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Container, Sequence
from dataclasses import dataclass

from spark_elastic.errors import InvalidInput, StaleGeneration
from spark_elastic.protocol.messages import NextWorld
from spark_elastic.protocol.types import Fence, MembershipVersion, SlotId, WorkerId, World
from spark_elastic.rendezvous.http_server import Subject, Waiters
from spark_elastic.rendezvous.messages import (
    CompareAndSet,
    Comparison,
    SlotCommands,
    WorkerToStop,
    WorkerUpdate,
)

# Members of a world that are told the addresses of all of them with their place in it; those of a larger one ask for
# each that they need and did not know.
SMALL_WORLD = 64
MAX_RUNS = 16  # of a large world's members that were in the one before, as `NextWorld.runs` has them
GENERATION = "generation/"  # begins the scopes that only `open` makes


def name_generation_scope(generation: int) -> str:
    return f"{GENERATION}{generation}"


@dataclass(eq=False)
class KeyValueStore:
    """Values by scope and key. A generation's scope is open while its world is, so that a late writer does not reach
    the next one: else StaleGeneration. Others are opened by their first write. InvalidInput: a limit would be
    exceeded."""

    most_scopes: int = 256  # a generation's is counted, but never refused
    most_keys: int = 65536  # of one scope
    key_bytes: int = 512  # characters of one key
    value_bytes: int = 4 << 20  # of one value
    total_bytes: int = 256 << 20  # of all values together

    def __post_init__(self) -> None:
        self._scopes: dict[str, dict[str, bytes]] = {}
        self._comparisons: dict[str, dict[str, bool]] = {}  # by scope and token: whether it changed
        self._bytes = 0

    def open(self, scope: str) -> None:
        self._scopes.setdefault(scope, {})

    def close(self, scope: str) -> None:
        self._bytes -= sum(map(len, self._scopes.pop(scope, {}).values()))
        self._comparisons.pop(scope, None)

    def close_generations(self) -> None:
        for name in [name for name in self._scopes if name.startswith(GENERATION)]:
            self.close(name)

    def set(self, scope: str, key: str, value: bytes) -> None:
        entries = self._scope(scope, create=True)
        grown = self._bytes + len(value) - len(entries.get(key, b""))
        if len(value) > self.value_bytes or len(key) > self.key_bytes:
            most = self.value_bytes
            raise InvalidInput(f"The value of {key[:80]!r} has {len(value)} bytes; {most} is the most.")
        if grown > self.total_bytes or (key not in entries and len(entries) >= self.most_keys):
            raise InvalidInput(f"The key-value store is full; scope {scope[:80]!r} cannot take {key[:80]!r}.")
        entries[key] = value
        self._bytes = grown

    def get(self, scope: str, keys: Sequence[str]) -> tuple[bytes | None, ...]:
        entries = self._scope(scope)
        return tuple(entries.get(key) for key in keys)

    def list_keys(self, scope: str, prefix: str) -> tuple[str, ...]:
        return tuple(key for key in self._scope(scope) if key.startswith(prefix))

    def compare_and_set(self, request: CompareAndSet) -> Comparison:
        """A request that is sent again changes nothing again; one that failed gets the value of now."""
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
        if len(comparisons) >= self.most_keys:
            del comparisons[next(iter(comparisons))]  # the oldest, which no client sends again
        comparisons[request.token] = changed
        return Comparison(changed, entries.get(request.key))

    def _scope(self, name: str, create: bool = False) -> dict[str, bytes]:
        if name not in self._scopes:
            if name.startswith(GENERATION):
                raise StaleGeneration(f"{name} is not open.")
            if not create:
                return {}
            if len(self._scopes) >= self.most_scopes:
                raise InvalidInput(f"The key-value store has {len(self._scopes)} scopes, its most.")
        return self._scopes.setdefault(name, {})


def find_runs(before: World, world: World, moved: Container[WorkerId]) -> tuple[tuple[int, int], ...]:
    """Who of a world's members was in the one before, as `NextWorld.runs` tells it. moved: those at another address."""
    runs: list[tuple[int, int]] = []
    for member in world.members:
        old = None if member.worker in moved else before.member(member.worker)
        rank = -1 if old is None else old.rank
        first, count = runs[-1] if runs else (-2, 0)
        if rank == (first if first == -1 else first + count):
            runs[-1] = first, count + 1
        else:
            runs.append((rank, 1))
    return tuple(runs) if len(runs) <= MAX_RUNS else ()


class ServerState:
    """The current world, aborts, versions, commands to slots and the job's end. Changes wake the polls they concern."""

    def __init__(self) -> None:
        self.values = KeyValueStore()
        self.waiters = Waiters()
        self.ended: str | None = None
        self.addresses: dict[WorkerId, str] = {}  # of workers that have asked for a world
        self._addresses_of_all: tuple[str, ...] = ()  # in the current world, if it is small
        self._moved: set[WorkerId] = set()  # whose address has changed since the current world
        self._world: World | None = None
        self._before: Fence | None = None  # of the world before the current one, of which `_runs` tells
        self._runs: tuple[tuple[int, int], ...] = ()
        self._abort_reason: str | None = None  # why the current world is over
        self._update = WorkerUpdate()  # what all must know that continue
        self._stops: dict[WorkerId, WorkerToStop] = {}
        self._commands: defaultdict[SlotId, list[WorkerToStop]] = defaultdict(list)
        self._released: dict[SlotId, str] = {}

    # ---- the driver's calls

    def publish(self, world: World) -> None:
        before, is_large = self._world, world.size > SMALL_WORLD
        if before is not None and self._abort_reason is None:
            self._end_world(before, world.reason)
            # Its members have left it, and those who are in the new one learn of that one.
            left_out = [member.worker for member in before.members if world.member(member.worker) is None]
            self.waiters.wake(*((Subject.UPDATE, worker) for worker in left_out))
        self._before = None if before is None else before.fence
        self._runs = find_runs(before, world, self._moved) if before is not None and is_large else ()
        self._moved.clear()
        self._world, self._abort_reason = world, None
        self.values.open(name_generation_scope(world.fence.generation))
        addresses = () if is_large else self.find_addresses(range(world.size))
        self._addresses_of_all = addresses if all(addresses) else ()
        self.waiters.wake(*((Subject.WORLD, member.worker) for member in world.members))

    def abort(self, fence: Fence, reason: str) -> None:
        """Ignores a fence other than the current world's: that world is over."""
        world = self._world
        if world is not None and world.fence == fence and self._abort_reason is None:
            self._abort_reason = reason
            self._end_world(world, reason)
            # Also those who are no members: they may watch a world before it.
            self.waiters.wake_all(Subject.UPDATE)

    def announce(self, version: MembershipVersion) -> None:
        self._update = dataclasses.replace(self._update, version=version)
        self.waiters.wake_all(Subject.UPDATE)

    def stop_worker(self, worker: WorkerId, reason: str, kill: bool) -> None:
        slot = worker.slot
        self._stops[worker] = stop = WorkerToStop(worker, reason, kill)
        self._commands[slot].append(stop)
        self.addresses.pop(worker, None)
        self.waiters.wake((Subject.WORLD, worker), (Subject.UPDATE, worker), (Subject.COMMANDS, slot))

    def release_slot(self, slot: SlotId, reason: str) -> None:
        self._released.setdefault(slot, reason)
        self.waiters.wake((Subject.COMMANDS, slot))

    def end(self, reason: str) -> None:
        if self.ended is None:
            self.ended = reason
            self.values.close_generations()
            self.waiters.wake_all(*Subject)

    def _end_world(self, world: World, reason: str) -> None:
        self.values.close_generations()
        self.waiters.wake_all(Subject.VALUES)
        told = reason if world.size <= SMALL_WORLD else ""
        self._update = dataclasses.replace(self._update, ended_fence=world.fence, end_reason=told)

    def set_address(self, worker: WorkerId, address: str) -> None:
        """address: "" if it is not known yet, since another process will take the worker's place."""
        if self.addresses.get(worker, "") != address:
            self.addresses[worker] = address
            self._moved.add(worker)
            if self._world is not None and self._world.member(worker) is not None:
                self.waiters.wake((Subject.VALUES, name_generation_scope(self._world.fence.generation)))

    def find_addresses(self, ranks: Sequence[int]) -> tuple[str, ...]:
        members = self._world.members if self._world is not None else ()
        return tuple(self.addresses.get(members[rank].worker, "") for rank in ranks)

    # ---- replies to slots and workers

    def get_stop_reason(self, worker: WorkerId) -> str | None:
        """Why a worker has to end; None: it continues."""
        stop = self._stops.get(worker)
        return self.ended if stop is None else stop.reason

    def find_next_world(self, worker: WorkerId, left: Fence | None) -> NextWorld | None:
        """The newest world, if it has `worker` as a member and is newer than the one it left; also one that is over by
        now: the driver waits until each member has left it."""
        world = self._world
        if world is None or (left is not None and left >= world.fence):
            return None
        view = world.view_of(worker)
        runs = self._runs if left == self._before else ()
        return None if view is None else NextWorld(view, addresses=self._addresses_of_all, runs=runs)

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
        stop = self.get_stop_reason(worker)
        return self._update if stop is None else dataclasses.replace(self._update, stop=stop)

    def get_commands(self, slot: SlotId, seen: int) -> SlotCommands:
        commands = self._commands.get(slot, [])
        release = self._released.get(slot) or self.ended
        return SlotCommands(len(commands), tuple(commands[max(0, seen) :]), release)
