"""Worlds of threads over fake groups, with the driver's rules: who may form the next world, and who hands its state on;
and a state of numpy numbers.

A script says at which step of the whole run somebody dies or joins. One condition guards everything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from elastic_collectives import CollectiveError, Group
from spark_elastic.handwritten.elastic_loop import elastic
from spark_elastic.handwritten.object_state import ObjectState
from spark_elastic.protocol.types import (
    INITIAL_VERSION,
    START,
    Checkpoint,
    HostUpdateResult,
    MembershipVersion,
    Phase,
    Position,
    WorldView,
)
from spark_elastic.runs.checkpoint import Checkpointer, SnapshotReader
from spark_elastic.runs.handlers import SnapshotHandler
from spark_elastic.runs.snapshot import Bytes, SnapshotBuilder
from tests.fake_group import FakeFabric
from tests.unit.protocol.driver_bench import make_world

DEADLINE = 20.0  # seconds


class WorkerKilled(BaseException):
    """This worker is no more."""


@dataclass(frozen=True)
class Event:
    """When a worker first reaches `step`: `rank` dies at its `after`-th collective from then on, or somebody joins.
    slips: it does not die, but that collective breaks for it alone, as one does when a peer hangs up behind it."""

    step: int
    rank: int | None = None
    after: int = 1
    slips: bool = False


class FakeDriver:
    """The driver. events: of the script, in order."""

    def __init__(self, size: int, events: tuple[Event, ...] = ()) -> None:
        self._news = threading.Condition()
        self._generation = 0
        self._events = list(events)
        self._version = INITIAL_VERSION
        self._alive: set[FakeSession] = set()
        self._here: list[FakeSession] = []
        self._done: set[FakeSession] = set()
        self._members: list[FakeSession] = []
        self._threads: list[threading.Thread] = []
        self._first = size
        self.checkpointer: Checkpointer | None = None
        self.snapshot_reader: SnapshotReader | None = None
        self.resume: tuple[Checkpoint, ...] = ()  # what the first world begins from
        self.enter_group: Callable[[Group], object] = id  # what a worker's thread does with each new group
        self.sizes: list[int] = []
        self.errors: list[BaseException] = []
        self.results: list[Any] = []

    def play(self, work: Callable[[FakeSession], Any]) -> list[Any]:
        """`work(session)` on every worker, newcomers included; what those returned that lived."""
        self._work = work
        for _ in range(self._first):
            self._start()
        for thread in self._threads:  # grows while it is gone through
            thread.join(DEADLINE)
            assert not thread.is_alive(), "a worker hangs"
        if self.errors:
            raise self.errors[0]
        return self.results

    def train(self, loop: Callable[[Any], Any], make: Callable[[FakeSession], Any]) -> list[Any]:
        """The loop under `elastic` on every worker. make: its state."""
        return self.play(lambda session: elastic(loop, lambda: session)(make(session)))

    def take_steps(self, state: Any, steps: int) -> Iterator[float]:
        """Of a loop, each with an exchange; what follows one stands in the body. Yields the ranks' mean, which is 1."""
        while state.step < steps:
            self.reach_step(state.step)
            gradient = np.ones(1)
            state._session.allreduce(gradient)
            state.step += 1
            yield float(gradient[0]) / state._session.world.size

    def reach_step(self, step: int) -> None:
        """A worker is about to take this step."""
        with self._news:
            while self._events and step >= self._events[0].step:
                event = self._events.pop(0)
                if event.rank is None:
                    self._version = self._version.next(update=HostUpdateResult.added)
                    self._start()
                else:
                    self._members[event.rank % len(self._members)].light(event.after, event.slips)
            self._news.notify_all()

    def leave_others(self, session: FakeSession) -> bool:
        """Whether somebody lives on when this one dies; it counts as dead from here on."""
        with self._news:
            others = self._alive - {session}
            self._alive = others or self._alive
            return bool(others)

    def announce(self) -> None:
        """A planned change that brings nobody, as when a host drains."""
        with self._news:
            self._version = self._version.next(update=HostUpdateResult.removed)

    @property
    def version(self) -> int:
        return self._version

    def _start(self) -> None:
        session = FakeSession(self)
        self._alive.add(session)
        thread = threading.Thread(target=self._be, args=(session,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _be(self, session: FakeSession) -> None:
        try:
            session.next_world(None)
            result = self._work(session)
            with self._news:
                self.results.append(result)
        except WorkerKilled:
            pass
        except BaseException as error:
            self.errors.append(error)
            session.close_group()
        finally:
            with self._news:
                self._alive.discard(session)
                self._form()
                self._news.notify_all()

    def arrive(self, session: FakeSession) -> tuple[WorldView, Group]:
        with self._news:
            if session.doomed:
                self._alive.discard(session)
                self._form()
                self._news.notify_all()
                raise WorkerKilled
            before = self._generation
            self._here.append(session)
            self._form()
            self._news.notify_all()
            if not self._news.wait_for(
                lambda: self._generation > before and session not in self._here, DEADLINE
            ):
                raise TimeoutError("no world was formed")
            group = self._fabric.group(self._members.index(session))
            view = self._world.view_of(self._world.members[group.rank].worker)
            return view, group

    def _form(self) -> None:
        """Once everybody who lives has come; newcomers are soon there."""
        if not self._here or not self._alive <= set(self._here):
            return
        if self._generation == 0 and len(self._here) < self._first:
            return
        order = [session for session in self._members if session in self._here]
        order += [session for session in self._here if session not in order]
        self._generation += 1
        positions = {f"w{id(s)}": s.position for s in order}
        resume = () if any(positions.values()) else self.resume
        self._world = make_world(self._generation, positions, version=self._version, resume=resume)
        self._fabric = FakeFabric(len(order), (1, self._generation), timeout=DEADLINE)
        for session, group in zip(order, self._fabric.groups, strict=True):
            group._exchange_parts = session.break_planned(group._exchange_parts)  # type: ignore[method-assign]
        self._members, self._here = order, []
        self.sizes.append(len(order))


class FakeSession:
    """`state.WorkerSession` of one thread."""

    address = "a machine"
    world: WorldView
    group: Group
    host_update: HostUpdateResult

    def __init__(self, stage: FakeDriver) -> None:
        self._stage = stage
        self.checkpointer, self.snapshot_reader = stage.checkpointer, stage.snapshot_reader
        self.process_values: dict[str, Any] = {}
        self.position: Position | None = None
        self.doomed = False
        self._fuse: int | None = None

    def wait_until_idle(self) -> None:
        """Nothing: its thread alone calls the group."""

    def is_job_ending(self) -> bool:
        return False

    def report_commit(self, commits: int) -> None:
        self.position = Position(0, Phase.TRAIN, commits)

    def agree_to_stop(self) -> bool:
        newest = np.array([self._stage.version.encode()], np.int64)
        self.allreduce(newest, "max")
        agreed = MembershipVersion.decode(int(newest[0]))
        self.host_update = agreed.update
        return agreed > self.world.version

    def allreduce(self, array: Any, op: str = "sum") -> None:
        self.group.allreduce(array, op)

    def finish_together(self) -> None:
        """No worker leaves before all are done, as in a job; nothing planned happens here."""
        self._fuse = None
        self.allreduce(np.ones(1))

    def break_planned(self, meet: Callable[..., Any]) -> Callable[..., Any]:
        """A group's collectives, those of a hand-over among them, each nearer to what `light` has planned."""

        def meet_or_break(*call: Any) -> Any:
            self._fuse = None if self._fuse is None else self._fuse - 1
            if self._fuse != 0:
                return meet(*call)
            self._fuse = None
            if self._slips:
                meet(*call)
                raise CollectiveError((), "it broke here, and nowhere else")
            if self._stage.leave_others(self):
                self.die()
            return meet(*call)

        return meet_or_break

    def light(self, nth: int, slips: bool) -> None:
        if self._fuse is None:
            self._fuse, self._slips = nth, slips

    def die(self) -> NoReturn:
        self.doomed = True
        self.close_group()
        raise WorkerKilled

    def close_group(self) -> None:
        self.group.close()

    def enter_loop(self) -> None:
        """Nothing: all are inside."""

    def next_world(self, error: CollectiveError | None) -> None:
        if error is not None:
            self.group.abort(str(error))
        self.world, self.group = self._stage.arrive(self)
        self._stage.enter_group(self.group)
        if self.world.source is None:
            self.position = START


class Weights:
    def __init__(self, numbers: int = 8, fill: float = 0.0) -> None:
        self.numbers = np.full(numbers, fill)
        self.changes = 0

    def add(self, change: float) -> None:
        self.numbers += change
        self.changes += 1


class WeightsHandler(SnapshotHandler):
    def capture(self, builder: SnapshotBuilder) -> Any:
        return builder.add(self.value.numbers.view(np.uint8), lambda: self.value.changes)

    def load(self, values: Any, memory: Bytes) -> None:
        self.value.numbers[:] = values.of(memory).view(np.float64)
        self.value.changes += 1


class WeightsState(ObjectState):
    registry = ((Weights, WeightsHandler),)
