"""What must always hold of the driver machine, checked after every step, and of the steps that workers applied.

Judges simulations and tests; pure. The rules that a journal shows are judged by `tests.specification`. Each violation's
message ends with the event_log: the last events and commands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import fields, replace

from spark_elastic.protocol import commands as do
from spark_elastic.protocol import events as on
from spark_elastic.protocol.driver.state import DriverState, JobStage
from spark_elastic.protocol.messages import DriverMessage
from spark_elastic.protocol.types import Checkpoint, Fence, Position, WorkerId, WorkerStatus, World

EVENTS_IN_LOG = 80  # lines kept
LARGE = 100  # slots or workers; with so many or fewer the records are looked at after every event


class Violation(AssertionError):
    """A promise of the protocol is broken."""


def stamp_event(played: on.DriverEvent | DriverMessage, now: float) -> on.DriverEvent:
    """The event at time `now`; a message is received then."""
    return replace(played, now=now) if isinstance(played, on.Event) else on.Received(now, played)


class EventLog:
    """The last events and commands, one line each."""

    def __init__(self, most: int = EVENTS_IN_LOG) -> None:
        self._lines: deque[tuple[str, object]] = deque(maxlen=most)  # formatted once they are read

    def event(self, event: on.DriverEvent) -> None:
        if not isinstance(event, on.Tick) and not on.is_heartbeat(event):
            what = event.message if isinstance(event, on.Received) else event
            self._lines.append((f"{event.now:9.3f}", what))

    def command(self, command: do.DriverCommand) -> None:
        self._lines.append((f"{'':9} ->", command))

    def note(self, now: float, text: str) -> None:
        self._lines.append((f"{now:9.3f} #", text))

    def text(self) -> str:
        lines = ((head, value if isinstance(value, str) else _line(value)) for head, value in self._lines)
        return "\n".join(map(" ".join, lines))


def _line(value: object) -> str:
    shown = ((f.name, getattr(value, f.name)) for f in fields(value) if f.name != "now")  # type: ignore[arg-type]
    return f"{type(value).__name__} " + " ".join(
        f"{name}={_shorten(item)}" for name, item in shown if item not in (None, "")
    )


def _shorten(item: object) -> str:
    if isinstance(item, World):
        return f"[{item.fence.generation}: {' '.join(m.worker for m in item.members)}; source {item.source}]"
    return str(item)


class DriverInvariants:
    """Follows one driver machine."""

    def __init__(self, successor: Callable[[Position], Position], event_log: EventLog | None = None) -> None:
        self.event_log = event_log or EventLog()
        self._successor = successor  # the position after one step, to compare survivors' positions by
        self._named: set[str] = set()  # workers and slots that an event spoke of
        self._aborted: set[int] = set()
        self._launches: set[int] = set()
        self._unchecked = 0  # events since the state was looked at

    def check(
        self,
        before: DriverState,
        event: on.DriverEvent | None,
        after: DriverState,
        commands: Sequence[do.DriverCommand],
    ) -> None:
        """Raises Violation. The records of a small state are checked after every event; those of a large one at each
        world and now and then. event: None for the machine's first commands."""
        if event is not None:
            self.event_log.event(event)
            self._record_names(event)
        for command in commands:
            self.event_log.command(command)
            self._require(bool(command.reason), "a command without a reason")
            self._check_command(command, before, after)
            if isinstance(command, do.PublishWorld) and event is not None:
                self._check_newcomers(command.world, before.world, after, event.now)
        is_news = event is not None and not isinstance(event, on.Tick) and not on.is_heartbeat(event)
        self._unchecked += bool(commands) or is_news
        grave = any(isinstance(command, do.PublishWorld | do.AbortWorld | do.End) for command in commands)
        size = max(len(after.slots), len(after.workers), len(before.workers))
        due = 1 if size <= LARGE else size // 4
        if self._unchecked >= due or (grave and self._unchecked):
            self._unchecked = 0
            self._check_state(after)

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            raise Violation(f"{what}\n{self.event_log.text()}")

    def _record_names(self, event: on.DriverEvent) -> None:
        for name in ("worker", "slot"):
            value = getattr(event.message if isinstance(event, on.Received) else event, name, None)
            if value is not None:
                self._named.add(value)
        if isinstance(event, on.LaunchEnded):
            self._launches.discard(event.launch)

    def _check_command(self, command: do.DriverCommand, before: DriverState, after: DriverState) -> None:
        match command:
            case do.PublishWorld(_, world):
                self._check_world(world, before, after)
            case do.AbortWorld(_, fence):
                self._aborted.add(fence.generation)
            case do.StopWorker(_, worker):
                self._require(worker in self._named, "a command to a worker that no event named")
            case do.ReleaseSlot(_, slot):
                self._require(slot in self._named, "a command to a slot that no event named")
            case do.LaunchSlot(_, launch):
                self._require(launch not in self._launches, "a launch number used twice")
                self._launches.add(launch)
                few = len(self._launches) <= after.limits.max_workers
                self._require(few, "more slot launches than max_workers")

    def _check_world(self, world: World, before: DriverState, after: DriverState) -> None:
        self._require(all(m.worker in after.workers for m in world.members), "a member that is not alive")
        self._check_source(world)
        if before.world is not None:
            self._check_old_is_over(before.world, before)

    def _check_newcomers(self, world: World, old: World | None, after: DriverState, now: float) -> None:
        listed = None if after.hosts.discovered is None else dict(after.hosts.discovered)
        for m in world.members:
            if (old is not None and old.member(m.worker) is not None) or m.worker not in after.workers:
                continue
            cools = after.blacklist.find_slot_return(m.slot, m.host, now)
            self._require(cools is None, f"{m.worker} comes into a world while its slot or host cools down")
            slot = after.slots[m.slot]
            known = listed is None or bool({slot.host, slot.node} & set(listed))
            self._require(known, f"{m.worker} comes into a world from a host that is not listed")

    def _check_source(self, world: World) -> None:
        positions = sorted({m.position for m in world.members if m.position is not None})
        if not positions:
            from_host = bool(world.resume) and world.resume[0].is_kept  # a rank of that host reads it
            sources = range(world.size) if from_host else [0 if world.resume else None]
            self._require(world.source in sources, "a source where no member has state")
            return
        self._require(world.position == positions[-1], "the source is not at the highest position")
        if len(positions) > 1:
            near = len(positions) == 2 and self._successor(positions[0]) == positions[1]
            self._require(near, f"survivors more than one step apart: {positions}")

    def _check_old_is_over(self, old: World, before: DriverState) -> None:
        if old.fence.generation in self._aborted:
            return
        lost = [m.worker for m in old.members if m.worker not in before.workers]
        self._require(not lost, f"world {old.fence.generation} lost {lost} and was never aborted")
        inside = [m.worker for m in old.members if not before.workers[m.worker].has_left]
        # The last of them came with this very event.
        self._require(len(inside) <= 1, f"two worlds open: {inside} have not left {old.fence.generation}")

    def _check_state(self, state: DriverState) -> None:
        """The counters agree with the records, and the records with each other."""
        alive, counted = state.workers.values(), state.workers
        members = [w for w in alive if w.rank is not None]
        counts = {
            "draining": (counted.draining, sum(bool(w.draining) for w in alive)),
            "starting": (counted.starting, sum(w.status is WorkerStatus.STARTING for w in alive)),
        }
        if state.stage in (JobStage.RUNNING, JobStage.REGROUPING):
            counts["not_left"] = counted.not_left, sum(not w.has_left for w in members)
            counts["unformed"] = counted.unformed, sum(not w.formed for w in members)
        for what, (count, true) in counts.items():
            self._require(count == true, f"{what} is miscounted")
        for index, key in ((state.slots._by_host, "host"), (state.slots._by_launch, "launch")):
            listed = {name: value for value, names in index.items() for name in names}
            true = {slot.slot: getattr(slot, key) for slot in state.slots.values()}
            self._require(listed == true, f"slots are listed under another {key}")
        gone = [w for w in state.workers if w in state.workers.departed]
        self._require(not gone, f"both living and gone: {gone}")
        waiting = [w for w in state.workers.waiting if state.workers[w].rank is not None]
        self._require(not waiting, f"waiting members: {waiting}")
        homeless = [w.worker for w in state.workers.values() if w.slot not in state.slots]
        self._require(not homeless, f"workers without a slot: {homeless}")


class StepHistory:
    """Which steps were applied in which world from which rows; checked at the end (P1)."""

    def __init__(self) -> None:
        self._applied: dict[Position, dict[Fence, tuple[int, ...]]] = {}

    def record_applied(self, fence: Fence, position: Position, rows: tuple[int, ...]) -> None:
        """A rank applied a step whose exchange summed over `rows`. All ranks of a world must agree on them."""
        known = self._applied.setdefault(position, {}).setdefault(fence, rows)
        if known is not rows and known != rows:
            raise Violation(f"two ranks of world {fence.generation} applied different rows at {position}")

    def compute_final_rows(self) -> dict[Position, tuple[int, ...]]:
        """Rows by step, of the highest fence that applied it: what the final weights contain."""
        return {position: by[max(by)] for position, by in self._applied.items()}

    def check(self, expected: dict[Position, tuple[int, ...]]) -> None:
        """Every step applied, and each with exactly its rows. Raises Violation."""
        final = self.compute_final_rows()
        missing = sorted(set(expected) - set(final))
        if missing:
            raise Violation(f"{len(missing)} steps were never applied, the first at {missing[0]}")
        wrong = sorted(p for p, rows in final.items() if sorted(rows) != sorted(expected.get(p, ())))
        if wrong:
            first = wrong[0]
            raise Violation(f"at {first} the rows {final[first]} were trained, not {expected.get(first)}")


class CheckpointInvariants:
    """What must always hold of a run's checkpoints, whatever dies: P7, R10 (fence) and R18 (publication)."""

    def __init__(self, event_log: EventLog) -> None:
        self._event_log = event_log
        self._holder = 0
        self._acknowledged: dict[str, Checkpoint] = {}
        self.damaged: set[str] = set()  # names of those whose bytes in the store are not what was written

    def record_opened(self, attempt: int) -> None:
        """A driver acquired the run."""
        told = f"attempt {attempt} was taken after attempt {self._holder} (R10)"
        self._require(attempt > self._holder, told)
        self._holder = attempt

    def record_acknowledged(self, attempt: int, kept: Sequence[Checkpoint]) -> None:
        """The store has that driver's list: from now on its newest checkpoint is durable."""
        told = f"attempt {attempt} published, {self._holder} holds the run (R10)"
        self._require(attempt == self._holder, told)
        self._acknowledged.update({checkpoint.name: checkpoint for checkpoint in kept})

    def check_begin(self, world: World, still_training: Sequence[WorkerId]) -> None:
        """A world to which no member brings state begins. still_training: members of older worlds of its driver."""
        told = f"world {world.fence.generation} begins while {', '.join(still_training)} train on (R18)"
        self._require(not still_training, told)
        lost = not world.resume and world.fence.attempt == self._holder and self._find_newest()
        self._require(not lost, f"training begins from nothing although {lost} was acknowledged (P7)")

    def check_resumed(self, world: World, checkpoint: Checkpoint) -> None:
        """The world begins from the checkpoint. A driver that lost the run may begin from an old one."""
        self._require(checkpoint.name not in self.damaged, f"damaged checkpoint {checkpoint.name} was taken")
        newest = self._find_newest()
        of_holder = world.fence.attempt == self._holder
        older = of_holder and newest is not None and checkpoint.progress < newest.progress
        self._require(not older, f"{checkpoint.name} was taken although {newest} was acknowledged (P7)")

    def _find_newest(self) -> Checkpoint | None:
        whole = (each for name, each in self._acknowledged.items() if name not in self.damaged)
        return max(whole, key=lambda each: each.progress, default=None)

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            raise Violation(f"{what}\n{self._event_log.text()}")
