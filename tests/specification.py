"""The rules of docs/protocol.md as far as a job's journal shows them: what happened, and what was decided.

It knows nothing of the driver's machine, whose decisions it judges. R1 to R3, R5, R7, R9, R11, R19, R20 and R22 are
about what workers hold; ledgers and weights judge those.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from spark_elastic.protocol import commands as do
from spark_elastic.protocol import events as on
from spark_elastic.protocol import messages as said
from spark_elastic.protocol.types import (
    NOT_RUNNING,
    Checkpoint,
    Limits,
    Member,
    Position,
    SlotId,
    WorkerId,
    World,
)
from spark_elastic.testing.replays import Replay, replay_all
from tests.simulator.invariants import Violation

# What a long run with faults of all kinds must have come to; a run that does not says nothing about these rules.
STATES = (
    "a loss aborted a world",
    "a world had fewer members",
    "a newcomer joined survivors",
    "survivors differed by a step",
    "a process was killed",
    "a connection closed",
    "a host was lost",
    "a checkpoint was published",
    "a planned change",
    "all members returned",
)


class RuleBroken(Violation):
    """A real job did what a rule forbids."""


@dataclass
class _Slot:
    host: str
    node: str
    launch: int
    seen: float  # when it or its worker last gave a sign of life
    beat: float  # when it did itself
    reasons: list[str] = field(default_factory=list)  # why its worker may be left out of a world
    gone: str = ""  # how it is known that none of its processes runs
    executor_lost: bool = False
    closed: bool = False  # the kernel closed a connection of it or its worker


@dataclass
class _Worker:
    slot: SlotId
    reasons: list[str] = field(default_factory=list)  # as of a slot
    position: Position | None = None  # of its newest request
    has_left: bool = False  # its world: it has asked for another since
    returned: bool = False  # its function, in its newest world
    exited: bool = False


class Specification:
    """Follows one job."""

    def __init__(self, limits: Limits, attempt: int, checkpoints: Sequence[Checkpoint]) -> None:
        self.reached: set[str] = set()  # of STATES
        self._limits, self._attempt = limits, attempt
        self._begin: float | None = None
        self._slots: dict[SlotId, _Slot] = {}
        self._slots_of_launch: defaultdict[int, list[_Slot]] = defaultdict(list)
        self._slots_on_host: defaultdict[str, list[_Slot]] = defaultdict(list)
        self._workers: dict[WorkerId, _Worker] = {}
        self._workers_of_slot: defaultdict[SlotId, list[_Worker]] = defaultdict(list)
        self._written = {each.name for each in checkpoints}
        self._world: World | None = None
        self._aborted = False
        self._version = 0
        self._anyone: list[str] = []  # reasons that may concern every worker
        self._drained: set[WorkerId] = set()
        self._blamed: set[WorkerId] = set()  # by peers, or who blamed one: R13 leaves out one of two
        self._breaks = 0  # worlds that ended by an abort
        self._room: dict[str, int] | None = None  # slots that discovery lists, by host
        self._failures = 0
        self._cancelled = self._ended = False

    def read(self, event: on.DriverEvent, commands: Sequence[do.DriverCommand]) -> None:
        """Raises RuleBroken by one of the commands, after all that was read before."""
        self._begin = event.now if self._begin is None else self._begin
        self._note(event)
        for command in commands:
            try:
                self._judge(command, event.now)
            except RuleBroken as error:
                raise RuleBroken(f"{error} (at {event.id}: {command})") from None

    # ---- what happened

    def _note(self, event: on.DriverEvent) -> None:
        match event:
            case on.Received(message=message):
                self._note_message(message, event.now)
            case on.LaunchEnded(launch=launch):
                self._failures += not event.executor_lost
                for slot in self._slots_of_launch[launch]:
                    slot.executor_lost |= event.executor_lost
                    slot.gone = slot.gone or ("" if event.executor_lost else "its launch has ended")
                    slot.reasons.append("its launch has ended")
            case on.HostLost(host=host):
                self.reached.add("a host was lost")
                for slot in self._slots_on_host[host]:
                    slot.executor_lost = True
                    slot.reasons.append("its host is lost")
            case on.HostsDiscovered(hosts=hosts):
                self._room = None if hosts is None else dict(hosts)
            case on.ConnectionLost(slot=name) if name in self._slots:
                self._slots[name].reasons.append("a connection broke")
                self._slots[name].closed |= not event.reset
                self.reached.add("a connection closed")
            case on.DrainRequested():
                self._note_drain(event)
            case on.SlotsWanted():
                self._anyone.append("slots are given back to another job")
            case on.CancelRequested():
                self._cancelled = True

    def _note_drain(self, event: on.DrainRequested) -> None:
        if event.rank is not None and self._world is not None and event.rank < self._world.size:
            self._drained.add(self._world.members[event.rank].worker)
        self._drained |= {name for name in self._workers if name == event.worker}
        for slot, record in self._slots.items():
            if event.host in (record.host, record.node):
                self._drained |= {name for name, each in self._workers.items() if each.slot == slot}

    def _note_message(self, message: said.DriverMessage, now: float) -> None:
        if isinstance(message, said.RegisterSlot) and message.slot not in self._slots:
            for other in self._slots_of_launch[message.launch]:
                other.reasons.append("another attempt of its task runs")
            slot = self._slots[message.slot] = _Slot(message.host, message.node, message.launch, now, now)
            self._slots_of_launch[message.launch].append(slot)
            self._slots_on_host[message.host].append(slot)
            return
        slot = self._slots.get(message.slot)
        if slot is not None:
            if not (isinstance(message, said.Heartbeat) and message.state in NOT_RUNNING):
                slot.seen = now  # a stopped process trains nothing
            slot.beat = now if isinstance(message, said.SlotRequest) else slot.beat
        if isinstance(message, said.RegisterSlot):
            return  # it is repeated
        name = message.worker
        if name is not None and name not in self._workers:  # its start may be told later
            for other in self._workers_of_slot[message.slot]:
                other.reasons.append("its slot has another worker")
            self._workers[name] = _Worker(message.slot)
            self._workers_of_slot[message.slot].append(self._workers[name])
        match message:
            case said.WorkerExited():
                worker = self._workers[name]
                worker.exited = True
                worker.reasons.append("its process has ended")
                self._failures += 1
                if message.exit_code < 0:
                    self.reached.add("a process was killed")
                self._blame_host(message.slot)
            case said.WorkerRaised():
                self._workers[name].reasons.append("it raised")
                self._failures += 1
                self._blame_host(message.slot)
            case said.WorkerStraggles():
                self._drained.add(name)
            case said.RequestNextWorld() | said.WorkerDone():
                self._note_request(self._workers[name], message)
            case said.CheckpointWritten(checkpoint=checkpoint):
                self._written.add(checkpoint.name)

    def _note_request(self, worker: _Worker, message: said.RequestNextWorld | said.WorkerDone) -> None:
        if self._world is None or message.fence == self._world.fence:
            worker.position, worker.has_left = message.position, True
            worker.returned = isinstance(message, said.WorkerDone)
        if isinstance(message, said.RequestNextWorld):
            for name in message.suspects:
                if name in self._workers:
                    self._blamed |= {name, message.worker}

    def _blame_host(self, name: SlotId) -> None:
        """R13, R14: a host on which workers fail is blacklisted, with all of its slots."""
        if name in self._slots:
            for slot in self._slots_on_host[self._slots[name].host]:
                slot.reasons.append("a worker failed on its host")

    # ---- what was decided

    def _judge(self, command: do.DriverCommand, now: float) -> None:
        if self._ended:
            frees = isinstance(command, do.StopWorker | do.ReleaseSlot)
            _require(frees, "R15 (end): it decides after its end")
        match command:
            case do.PublishWorld(world=world):
                self._judge_world(world, now)
            case do.AbortWorld(fence=fence):
                newest = self._world is not None and fence == self._world.fence
                _require(newest, "R10: not the newest world ends")
                _require(not self._aborted, "R10: a world ends twice")
                self._aborted = True
                self._breaks += 1
                self.reached.add("a loss aborted a world")
            case do.AnnounceChange(version=version):
                _require(version.number > self._version, "R6: an announced change has no higher number")
                self._version = version.number
                self.reached.add("a planned change")
            case do.PublishCheckpoint(checkpoints=checkpoints):
                self._judge_checkpoints(checkpoints)
            case do.End():
                self._judge_end(command)

    def _judge_world(self, world: World, now: float) -> None:
        old, members = self._world, world.members
        generation = 0 if old is None else old.fence.generation
        _require(world.fence.attempt == self._attempt, "R10 (fence): a world of another attempt")
        _require(world.fence.generation == generation + 1, "R10 (fence): generations that do not grow by one")
        _require([each.rank for each in members] == list(range(world.size)), "R4: ranks are not 0, 1, 2 ...")
        least, most = self._limits.min_workers, self._limits.capacity
        _require(least <= world.size <= most, f"R8, R16: {world.size} members, not {least} to {most}")
        slots = {each.slot for each in members}
        _require(len(slots) == world.size, "R14 (duplicates): two members of one slot")
        living = [each.worker for each in members if self._workers[each.worker].exited]
        _require(not living, f"R4 (survivors): {living} have ended")
        if old is None:
            assert self._begin is not None
            waited = now - self._begin >= self._limits.gather_timeout
            full = world.size >= self._limits.wanted_at_start
            _require(full or waited, "R16 (start): it begins too early with too few")
        else:
            self._judge_survivors(old, world, now)
        self._judge_source(world, old, now)
        self._world, self._aborted, self._anyone = world, False, []
        for member in members:
            worker = self._workers[member.worker]
            worker.has_left = worker.returned = False
            worker.reasons.clear()
            self._slots[member.slot].reasons.clear()

    def _judge_survivors(self, old: World, world: World, now: float) -> None:
        ranks = {each.worker: each.rank for each in old.members}
        survivors = [each.worker for each in world.members if each.worker in ranks]
        in_order = survivors == sorted(survivors, key=ranks.__getitem__)
        _require(in_order, "R4 (survivors): their order has changed")
        last = max((each.rank for each in world.members if each.worker in ranks), default=-1)
        for member in world.members[: last + 1]:
            if member.worker not in ranks:
                told = f"R4 (survivors): {member.worker} is not behind its machine's"
                _require(member.local_rank > 0, told)
        staying = [name for name in survivors if not self._workers[name].has_left]
        _require(not staying, f"R4 (survivors): {staying} have not left world {old.fence.generation}")
        for member in old.members:
            if world.member(member.worker) is None:
                told = f"R12, R13: {member.worker} is left out without a reason"
                _require(self._may_leave(member, now), told)
        if world.size < old.size:
            self.reached.add("a world had fewer members")
        if survivors and len(survivors) < world.size:
            self.reached.add("a newcomer joined survivors")

    def _may_leave(self, member: Member, now: float) -> bool:
        worker, slot = self._workers[member.worker], self._slots[member.slot]
        silent = now - slot.beat >= self._limits.lease
        # It runs, and did not come for as long as the others wait.
        stays_away = not worker.has_left and self._aborted
        drained = member.worker in self._drained | self._blamed or not self._has_room(slot)
        return bool(drained or worker.reasons or slot.reasons or self._anyone or silent or stays_away)

    def _has_room(self, slot: _Slot) -> bool:
        on_host, room = len(self._slots_on_host[slot.host]), self._room
        return room is None or on_host <= max(room.get(name, 0) for name in (slot.host, slot.node))

    def _judge_source(self, world: World, old: World | None, now: float) -> None:
        holders = [each for each in world.members if each.position is not None]
        for each in holders:
            known = old is not None and old.member(each.worker) is not None
            _require(known, f"R4 (survivors): {each.worker} brings a state and was not in the world before")
            told = self._workers[each.worker].position
            _require(each.position == told, f"R4: {each.worker} stands at {told}, not at {each.position}")
        positions = sorted({each.position for each in holders if each.position is not None})
        if positions:
            _require(not world.resume, "R18: a checkpoint is taken although a survivor has the state")
            is_highest = world.position == positions[-1]
            _require(is_highest, "R4: the state comes from a position that is not the highest")
            near = len(positions) == 1 or (len(positions) == 2 and _is_next(*positions))
            _require(near, f"R1 (finalized steps): survivors are more than a step apart: {positions}")
            if len(positions) == 2:
                self.reached.add("survivors differed by a step")
        elif old is not None and not any(self._workers[each.worker].has_left for each in old.members):
            # One that has left would prove that the others are not training on: each step needs all members.
            running = [each.worker for each in old.members if not self._is_over(each, now)]
            _require(not running, f"it begins from no state while {running} may train on (R18)")

    def _is_over(self, member: Member, now: float) -> bool:
        """R18 (publication): it is known not to train in its old world any more."""
        worker, slot = self._workers[member.worker], self._slots[member.slot]
        if worker.exited or worker.has_left or slot.gone or (slot.executor_lost and slot.closed):
            return True
        others = (each.slot for name, each in self._workers.items() if name != member.worker)
        return member.slot in others or now - slot.seen >= self._limits.driver_timeout

    def _judge_checkpoints(self, checkpoints: Sequence[Checkpoint]) -> None:
        order = [(each.fence, each.position) for each in checkpoints]
        _require(order == sorted(order, reverse=True), "R18 (publication): the newest is not the first")
        _require(len(order) <= self._limits.checkpoints_kept, "R18 (publication): more than checkpoints_kept")
        strange = {each.name for each in checkpoints} - self._written
        _require(not strange, f"R18 (publication): nobody has written {strange}")
        self.reached.add("a checkpoint was published")

    def _judge_end(self, end: do.End) -> None:
        self._ended = True
        match end.outcome:
            case do.JobOutcome.SUCCESS:
                assert self._world is not None
                needed = self._world.members if self._limits.all_results else self._world.members[:1]
                missing = [each.worker for each in needed if not self._workers[each.worker].returned]
                _require(not missing, f"R15 (end): a success without the results of {missing}")
                self.reached.add("all members returned")
            case do.JobOutcome.FAILURE_BUDGET:
                most = self._limits.failure_budget
                _require(self._failures > most, f"R13: {self._failures} failures, of {most} that are allowed")
            case do.JobOutcome.USER_ERROR:
                failed = self._failures > 0 or self._breaks > 2
                _require(failed, "R13 (deterministic failures): nothing has failed")
            case do.JobOutcome.CANCELLED:
                _require(self._cancelled, "R15 (end): nobody has cancelled it")
            case do.JobOutcome.DEFECT:
                _require(False, "the driver's machine has a defect")


def check_journal(path: Path) -> set[str]:
    """The states that the jobs of a journal came to. Raises RuleBroken, or ReplayDiffers where the machine decides
    otherwise than it did."""
    return set().union(*map(check_replay, replay_all(path)))


def check_replay(job: Replay) -> set[str]:
    rules = Specification(**job.initial)
    for entry in job.entries:
        rules.read(entry.event, entry.commands)
    return rules.reached


def _is_next(before: Position, after: Position) -> bool:
    """Whether one step leads from the first to the second, as far as positions tell."""
    if (before.epoch, before.phase) == (after.epoch, after.phase):
        return after.step == before.step + 1
    return after.step == 0 or after.epoch == before.epoch + 1


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise RuleBroken(what)
