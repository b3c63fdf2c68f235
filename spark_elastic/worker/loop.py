"""The worker's loop: carries out what the worker machine commands, around the user's program.

The main thread runs joins, forming, sync and the program. The control thread (`control.py`) posts what the driver
says; both go through `_post`, whose lock owns the machine. An abort is carried out by whichever thread hears of it.
"""

from __future__ import annotations

import hashlib
import threading
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from elastic_collectives import CollectiveError, Endpoint, Group, connect
from spark_elastic.clock import Clock
from spark_elastic.errors import ElasticError, PeersMissing, StaleGeneration
from spark_elastic.protocol import commands as do
from spark_elastic.protocol import events as on
from spark_elastic.protocol import worker_machine
from spark_elastic.protocol.types import Fence, Position, SlotId, WorkerId, World
from spark_elastic.rendezvous.calls import WorkerCalls
from spark_elastic.rendezvous.messages import NextWorld
from spark_elastic.worker.context import Current, set_current
from spark_elastic.worker.program import Completed, Program, Session


@dataclass(frozen=True)
class Identity:
    worker: WorkerId
    slot: SlotId


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
        self._aborted: Fence | None = None
        self.membership_version: Callable[[], int] = lambda: 0
        self.report: Callable[..., None] = lambda numbers: None
        self.watched: Callable[[Group], Group] = lambda group: group

    def run(self) -> int:
        """Until the machine says exit; returns the process's exit code."""
        todo = deque(self._post(on.Warm(self._clock.now())))
        try:
            while todo:
                command = todo.popleft()
                if isinstance(command, do.Exit):
                    return command.code
                event = self._carry_out(command)
                if event is not None:
                    todo.extend(self._post(event))
        finally:
            self._close_group()
            self._program.close()
        raise ElasticError(f"worker {self._me.worker} was left without a command")

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
            case do.Sync():
                return self._guarded(command.world, lambda group: self._sync(command.world, group))
            case do.Run():
                return self._guarded(command.world, lambda group: self._train(command.world, group))
            case do.AbortGroup():
                self._abort_group(command)
            case do.CloseGroup():
                self._close_group()
            case do.ReportFailure():
                self._driver.failed(command.fence, command.position, command.fingerprint, command.traceback)
            case do.ReportDone(_, fence, position, result):
                return self._ask(lambda: self._driver.done(fence, position, result))
            case do.Exit():
                pass
        return None

    def _join(self, command: do.Join) -> on.WorkerEvent:
        set_current(Current(self._me.worker))
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
            return on.GotWorld(now, answer.world)
        return on.StopHeard(now, answer.stop or "")

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
        set_current(Current(self._me.worker, world, group, self._program.position()))
        return on.Formed(self._clock.now(), world.fence)

    def _guarded(self, world: World, work: Callable[[Group], on.WorkerEvent]) -> on.WorkerEvent:
        """Run `work` in this world's group; what breaks becomes an event."""
        assert self._group is not None
        try:
            return work(self._group)
        except CollectiveError as error:
            return self._broke(world.fence, error)
        except (Exception, SystemExit) as error:
            # The user's, or ours inside the user's: told to the driver, which decides (R13).
            return on.UserRaised(self._clock.now(), fingerprint(error), traceback.format_exc())

    def _sync(self, world: World, group: Group) -> on.WorkerEvent:
        return on.Synced(self._clock.now(), world.fence, self._program.sync(world, group))

    def _train(self, world: World, group: Group) -> on.WorkerEvent:
        def tell(position: Position) -> None:
            set_current(Current(self._me.worker, world, group, position))
            self._post(on.Applied(self._clock.now(), world.fence, position))

        outcome = self._program.run(world, group, Session(self.membership_version, tell, self.report))
        now = self._clock.now()
        if isinstance(outcome, Completed):
            return on.Finished(now, world.fence, outcome.result)
        return on.Boundary(now, world.fence, outcome.reason)

    def _broke(self, fence: Fence, error: Exception) -> on.GroupBroke:
        suspects = error.ranks if isinstance(error, CollectiveError) else ()
        return on.GroupBroke(self._clock.now(), fence, tuple(suspects), str(error))

    def _abort_group(self, command: do.AbortGroup) -> None:
        with self._lock:
            self._aborted = command.fence
            group = self._group
        if group is not None:
            group.abort(command.reason)

    def _close_group(self) -> None:
        with self._lock:
            group, self._group = self._group, None
        if group is not None:
            group.close()


def fingerprint(error: BaseException) -> str:
    """The same defect gives the same text on every host: type, message and the innermost frame's function and line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f"{frames[-1].name}:{frames[-1].lineno}" if frames else ""
    return hashlib.sha256(f"{type(error).__qualname__}|{error}|{where}".encode()).hexdigest()[:16]
