"""The worker's loop: carries out what the worker machine commands, around the user's program.

The main thread runs joins, forming, sync and the program. The control thread (`control.py`) posts what the driver
says; both go through `_post`, whose lock owns the machine. An abort is carried out by whichever thread hears of it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from elastic_collectives import CollectiveError, Endpoint, Group, connect
from spark_elastic.clock import Clock
from spark_elastic.errors import DriverUnreachable, ElasticError, PeersMissing, StaleGeneration
from spark_elastic.protocol import commands as do
from spark_elastic.protocol import events as on
from spark_elastic.protocol import worker_machine
from spark_elastic.protocol.events import AbortReceived, DriverSilent, StopReceived
from spark_elastic.protocol.types import Fence, Position, SlotId, WorkerId, World
from spark_elastic.rendezvous.messages import NextWorld, WorkerCalls
from spark_elastic.worker.context import Current, Floor, current, set_current
from spark_elastic.worker.program import (
    CHANGE,
    Completed,
    Left,
    Program,
    Session,
    fingerprint,
    refuse_too_large,
    traceback_of,
)


@dataclass(frozen=True)
class Identity:
    """Who a worker is. address: where its peers find it. ports: first and last of those that it may listen on; None:
    any. resources: what Spark gave to its slot, by name."""

    worker: WorkerId
    slot: SlotId
    address: str = "127.0.0.1"
    ports: tuple[int, int] | None = None
    resources: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


class WorkerLoop:
    """Runs one program in world after world until the driver has no more use for it."""

    def __init__(
        self,
        me: Identity,
        program: Program,
        driver: WorkerCalls,
        endpoint: Endpoint,
        clock: Clock,
        collective_timeout: float,
    ) -> None:
        self._me = me
        self._program = program
        self._driver = driver
        self._endpoint = endpoint
        self._clock = clock
        self._timeout = collective_timeout
        self._lock = threading.Lock()  # owns _state, _group, _aborted
        self._state, _ = worker_machine.initial(me.worker, me.slot)
        self._group: Group | None = None
        self._world: World | None = None
        self._floor = Floor()
        self._aborted: Fence | None = None
        self.membership_version: Callable[[], int] = lambda: 0
        self.report: Callable[..., None] = lambda numbers: None
        self.ship_report: Callable[[], None] = lambda: None
        self.watched: Callable[[Group], Group] = lambda group: group
        self.waiting: Callable[[], AbstractContextManager[object]] = nullcontext
        self._session = Session(
            self._version,
            self._tell,
            self._report,
            self._next_world,
            wrote_checkpoint=driver.wrote_checkpoint,
        )
        self._nobody = Current(
            me.worker, session=self._session, address=me.address, ports=me.ports, resources=me.resources
        )

    def run(self) -> int:
        """Run until the machine says exit. Returns the process's exit code."""
        try:
            turn = self._advance(on.Warm(self._clock.now()))
            while not isinstance(turn, do.Exit):
                turn = self._advance(self._guarded(turn))
            return turn.code
        except Left as left:
            return left.code
        finally:
            self._close_group()
            self._program.close()

    def _advance(self, event: on.WorkerEvent) -> do.Sync | do.Run | do.Exit:
        """Post the event and carry out what follows, until it is the program's turn, or the end."""
        todo = deque(self._post(event))
        while todo:
            command = todo.popleft()
            if isinstance(command, do.Sync | do.Run | do.Exit):
                return command
            asked = self._clock.now()
            try:
                answer = self._carry_out(command)
            except DriverUnreachable as error:  # no crash: whoever waits may see it before the control thread
                sys.stderr.write(f"worker {self._me.worker} ends: {error}\n")
                now = self._clock.now()
                answer = on.DriverSilent(now, now - asked)
            if answer is not None:
                todo.extend(self._post(answer))
        raise ElasticError(f"worker {self._me.worker} was left without a command")

    def _next_world(self, error: CollectiveError | None) -> tuple[World, Group]:
        """For a program that is in `run`: leave this world and come back in the next."""
        assert self._world is not None
        if error is None:
            turn = self._advance(on.Boundary(self._clock.now(), self._world.fence, CHANGE))
        else:
            turn = self._advance(self._broke(self._world.fence, error))
        while isinstance(turn, do.Sync):
            turn = self._advance(self._guarded(turn))
        if isinstance(turn, do.Exit):
            raise Left(turn.code)
        assert self._group is not None
        return turn.world, self._group

    def hear(self, event: on.WorkerEvent) -> int | None:
        """For the control thread: carry out what must not wait for the main thread. Returns an exit code, if any."""
        code = None
        for command in self._post(event):
            if isinstance(command, do.AbortGroup):
                self._abort_group(command)
            elif isinstance(command, do.Exit):
                code = command.code
        return code

    def _post(self, event: on.WorkerEvent) -> tuple[do.WorkerCommand, ...]:
        with self._lock:
            self._state, commands = worker_machine.step(self._state, event)
        return commands

    def _carry_out(self, command: do.WorkerCommand) -> on.WorkerEvent | None:
        match command:
            case do.Join():
                return self._join(command)
            case do.Form():
                return self._form(command.world)
            case do.AbortGroup():
                self._abort_group(command)
            case do.CloseGroup():
                self._close_group()
            case do.ReportFailure():
                sys.stderr.write(command.traceback)  # nobody else may tell it: it may be borne
                self._driver.failed(command.fence, command.position, command.fingerprint, command.traceback)
            case do.ReportDone(_, fence, position, result):
                self.ship_report()  # the driver may end the job at our report, and nobody would see the last numbers
                return self._ask(lambda: self._driver.done(fence, position, result))
            case do.Sync() | do.Run() | do.Exit():
                pass  # not for here
        return None

    def _join(self, command: do.Join) -> on.WorkerEvent:
        set_current(self._nobody)
        fence, position, suspects = command.fence, command.position, command.suspects
        return self._ask(
            lambda: self._driver.join(fence, position, suspects, command.reason, command.planned)
        )

    def _ask(self, question: Callable[[], NextWorld]) -> on.WorkerEvent:
        """Repeat a long poll until it brings a world or the end."""
        answer = question()
        while answer.wait:
            answer = question()
        now = self._clock.now()
        if answer.world is not None:
            return on.WorldReceived(now, answer.world)
        return on.StopReceived(now, answer.stop or "")

    def _form(self, world: World) -> on.WorkerEvent:
        member = world.member(self._me.worker)
        assert member is not None  # the machine forms its own worlds only
        try:
            group = connect(
                self._endpoint,
                member.rank,
                world.size,
                (world.fence.attempt, world.fence.generation),
                lambda blob: self._driver.exchange(world.fence, member.rank, blob, self._timeout),
                timeout=self._timeout,
                local_ranks=[peer.rank for peer in world.members if peer.host == member.host],
            )
        except (CollectiveError, StaleGeneration, PeersMissing) as error:
            return self._broke(world.fence, error)
        group = self.watched(group)
        with self._lock:
            self._group, self._world = group, world
            aborted = self._aborted is not None and self._aborted >= world.fence
        if aborted:
            group.abort("the driver ended this generation while it was formed")
        try:
            self._driver.formed(world.fence)
        except StaleGeneration as error:
            return self._broke(world.fence, error)
        self._floor = Floor()
        position = self._program.position()
        now = replace(self._nobody, world=world, group=group, position=position, floor=self._floor)
        set_current(replace(now, waiting=self.waiting, watched=self.watched))
        return on.GroupFormed(self._clock.now(), world.fence)

    def _guarded(self, turn: do.Sync | do.Run) -> on.WorkerEvent:
        """Let the program do its part in this world; what breaks becomes an event."""
        group = self._group
        assert group is not None
        try:
            if isinstance(turn, do.Run):
                return self._train(turn.world, group)
            return on.Synced(self._clock.now(), turn.world.fence, self._program.sync(turn.world, group))
        except CollectiveError as error:
            return self._broke(self._fence(), error)
        except Left:
            raise
        except BaseException as error:
            # The user's, or ours inside the user's, whatever its class: told to the driver, which decides (R13).
            return on.UserRaised(self._clock.now(), fingerprint(error), traceback_of(error))

    def _train(self, world: World, group: Group) -> on.WorkerEvent:
        outcome = self._program.run(world, group, self._session)
        now = self._clock.now()  # and not `world` from here on: the program may be in a later one by now
        if isinstance(outcome, Completed):
            refuse_too_large(outcome.result)
            return on.Finished(now, self._fence(), outcome.result)
        return on.Boundary(now, self._fence(), outcome.reason)

    def _version(self) -> int:
        return self.membership_version()  # looked up late: the control thread puts its own in place

    def _report(self, numbers: Mapping[str, Any]) -> None:
        self.report(numbers)

    def _tell(self, position: Position) -> None:
        here = current()
        assert here is not None
        set_current(replace(here, position=position))
        self._post(on.Applied(self._clock.now(), self._fence(), position))

    def _fence(self) -> Fence:
        assert self._world is not None
        return self._world.fence

    def _broke(self, fence: Fence, error: Exception) -> on.GroupBroken:
        suspects = error.ranks if isinstance(error, CollectiveError) else ()
        return on.GroupBroken(self._clock.now(), fence, tuple(suspects), str(error))

    def _abort_group(self, command: do.AbortGroup) -> None:
        with self._lock:
            self._aborted = command.fence
            meant = self._world is not None and self._world.fence == command.fence
            group = self._group if meant else None  # the main thread may have gone on to the next
        if group is not None:
            group.abort(command.reason)

    def _close_group(self) -> None:
        with self._lock:
            group, self._group = self._group, None
        if group is not None:
            group.close()  # frees the engine's thread if it is in a collective
            self._floor.engine.close()


# The control thread of a worker: hears the driver while the main thread trains.
#
# It long-polls the driver for aborts, the membership version and orders to stop, and sends progress along. It never
# touches the program. R12: when the driver is silent for `driver_timeout`, the worker ends itself.


LAST_WORDS = 2.0  # seconds that the main thread gets to end by itself after an order to stop
PAUSE = 0.2  # seconds between tries while the driver is away; the last ones come closer together
LEAST_PAUSE = 0.01
REPORT_EVERY = 0.25  # seconds between two progress messages


class Control:
    """Two daemon threads: `watch` for the driver's word, `report` for progress. `start` and `close` frame the run."""

    def __init__(
        self, me: Identity, loop: WorkerLoop, driver: WorkerCalls, clock: Clock, driver_timeout: float
    ):
        self._me = me
        self._loop = loop
        self._driver = driver
        self._clock = clock
        self._driver_timeout = driver_timeout
        self._version = 0
        self._closing = threading.Event()
        self._latest: Mapping[str, Any] | None = None
        self._threads = [
            threading.Thread(target=self._watch, name="spark-elastic-watch", daemon=True),
            threading.Thread(target=self._ship_reports, name="spark-elastic-report", daemon=True),
        ]

    def start(self) -> None:
        self._loop.membership_version = lambda: self._version
        self._loop.report, self._loop.ship_report = self._report, self._ship
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._closing.set()

    def _report(self, numbers: Mapping[str, Any]) -> None:
        self._latest = numbers  # the newest wins; a reader never sees half of one

    def _ship_reports(self) -> None:
        while not self._closing.wait(REPORT_EVERY):
            self._ship()

    def _ship(self) -> None:
        numbers, self._latest = self._latest, None
        if numbers is not None:
            # Progress is for people; the watch thread is who minds the driver's absence.
            with suppress(ElasticError):
                self._driver.report(dict(numbers))

    def _watch(self) -> None:
        began = self._clock.now()
        over: Fence | None = None  # the newest generation that is known to be over
        while not self._closing.is_set():
            heard = max(began, self._driver.heard_at())
            left = heard + self._driver_timeout - self._clock.now()
            if left <= 0.0:
                silent = DriverSilent(self._clock.now(), self._driver_timeout - left)
                self._leave(self._loop.hear(silent), "the driver is silent")
            try:
                news = self._driver.watch(over, self._version, within=max(0.0, left))
            except ElasticError:
                self._closing.wait(min(PAUSE, max(LEAST_PAUSE, left)))
                continue
            now = self._clock.now()
            self._version = max(self._version, news.version)
            if news.over is not None and news.over != over:
                over = news.over
                self._loop.hear(AbortReceived(now, over, news.why))
            if news.stop is not None:
                self._leave(self._loop.hear(StopReceived(now, news.stop)), news.stop)
                return

    def _leave(self, code: int | None, reason: str) -> None:
        """End the process even where user code does not come back."""
        if code is None or self._closing.wait(LAST_WORDS):
            return
        sys.stderr.write(f"worker {self._me.worker} ends: {reason}\n")
        sys.stderr.flush()
        os._exit(code)
