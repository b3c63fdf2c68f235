"""The worker's loop, which executes the commands of the worker machine around the user's program.

The main thread asks for worlds and forms them, syncs and runs the program (`WorkerLoop`); a thread polls the driver
(`DriverWatch`). Both post to the machine, which a lock owns; who learns of an abort executes it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from elastic_collectives import CollectiveError, Endpoint, Group, MismatchError, RequestTimeout, connect
from spark_elastic.clock import Clock
from spark_elastic.errors import (
    ConnectionClosed,
    DriverUnreachable,
    ElasticError,
    InvalidInput,
    StaleGeneration,
)
from spark_elastic.protocol import commands as do
from spark_elastic.protocol import events as on
from spark_elastic.protocol import messages, worker_machine
from spark_elastic.protocol.types import (
    INITIAL_VERSION,
    Checkpoint,
    Fence,
    Position,
    WorkerId,
    WorkerIdentity,
    WorldView,
)
from spark_elastic.rendezvous import codec
from spark_elastic.rendezvous.messages import (
    MAX_POLL_SECONDS,
    DriverClient,
    FindAddresses,
    Report,
    WatchWorker,
)
from spark_elastic.worker.context import GroupContext, WaitRecorder, WorkerContext, get_context, set_context
from spark_elastic.worker.program import (
    CHANGE,
    Completed,
    Program,
    WorkerExit,
    WorkerHandle,
    check_result_size,
    compute_fingerprint,
    exit_forks,
    format_traceback,
)
from spark_elastic.worker.session import has_loop_begun, make_world_alone, notification_manager

EXIT_GRACE = 2.0  # seconds that the main thread gets to end by itself once it was told to stop
RETRY_EVERY = 0.2  # seconds between tries to reach a silent driver; the last ones come closer together
RETRY_AT_LEAST = 0.01  # seconds
REPORT_EVERY = 0.25  # seconds between two messages with metrics


class BeginAgain(Exception):
    """This worker is in a next world, in which its program has to begin again: another process is to take its place."""

    def __init__(self, left: Fence | None, position: Position | None) -> None:
        super().__init__("the program has to begin again in a new process")
        self.left, self.position = left, position  # as in `WorkerIdentity`


class GroupConnector:
    """Forms the groups of worlds over the one endpoint of this process."""

    def __init__(self, endpoint: Endpoint, timeout: float, wait_recorder: WaitRecorder) -> None:
        self.wait_recorder = wait_recorder
        self._endpoint = endpoint
        self._timeout = timeout  # seconds, of each collective

    @property
    def address(self) -> str:
        return self._endpoint.address

    def connect(self, world: WorldView, addresses: dict[int, str], driver: DriverClient) -> Group:
        """The group of that world. addresses: of members, by rank; others are added once the group needs them."""

        def find_addresses(ranks: Sequence[int]) -> Sequence[str]:
            request = FindAddresses(world.me.worker, world.fence, tuple(ranks))
            deadline = driver.now() + self._timeout
            known: tuple[str, ...] = ("",)
            with suppress(StaleGeneration, DriverUnreachable, ConnectionClosed):  # it is over
                while not all(known) and driver.now() < deadline:
                    known = driver.ask(request, min(MAX_POLL_SECONDS, deadline - driver.now())).addresses
            found = dict(zip(ranks, known, strict=True)) if all(known) else {}
            addresses.update(found)
            return tuple(found.values())

        group = connect(
            self._endpoint,
            world.me.rank,
            world.size,
            (world.fence.attempt, world.fence.generation),
            lambda own: [addresses.get(rank, "").encode() for rank in range(world.size)],
            timeout=self._timeout,
            local_ranks=world.host_ranks,
            find_addresses=find_addresses,
        )
        return self.wait_recorder.watch_group(group)

    def connect_alone(self, world: WorldView) -> Group:
        fence = world.fence.attempt, world.fence.generation
        return connect(self._endpoint, 0, 1, fence, lambda blob: [blob], timeout=self._timeout)


@dataclass(eq=False, repr=False)
class WorkerLoop:
    """Runs one program in world after world until the driver ends the worker."""

    identity: WorkerIdentity
    program: Program
    driver: DriverClient
    clock: Clock
    watch: DriverWatch
    groups: GroupConnector

    def __post_init__(self) -> None:
        self._lock = threading.Lock()  # owns _state, _group, _aborted_fence
        self._applied: on.Applied | None = None  # the machine learns of it with the next event
        me = self.identity
        self._state = worker_machine.WorkerState(me.worker, fence=me.left, position=me.position)
        self._group: Group | None = None
        self._world: WorldView | None = None
        self._addresses: dict[int, str] = {}  # of members of the newest world, by rank, that it knows
        self._group_context = GroupContext()
        self._aborted_fence: Fence | None = None
        self._has_to_begin_again = False  # the program, in the next world, for which it needs a new process
        self._unwritten_checkpoints = 0  # that found no room in the store
        # The world of this worker alone, while its program is outside of the loop that the others are in, and the
        # context to return to; None: it is in the world of the machine.
        self._alone: tuple[WorkerContext, WorkerContext | None] | None = None
        self._handle = WorkerHandle(
            lambda: self.watch.version,
            self._report_position,
            self.watch.report,
            self._next_world,
            report_straggler=self._report_straggler,
            report_checkpoint=self._report_checkpoint,
            go_alone=self._go_alone,
            join_others=self._join_others,
        )
        self._context_between_worlds = WorkerContext(
            self.identity.worker,
            handle=self._handle,
            address=self.identity.address,
            ports=self.identity.ports,
            resources=self.identity.resources,
            wait_recorder=self.groups.wait_recorder,
            driver=self.driver,
        )

    def run(self) -> int:
        """Run until the machine says exit; returns the exit code. Raises `BeginAgain`."""
        try:
            command = self._begin()
            while not isinstance(command, do.Exit):
                command = self._advance(self._run_program(command))
            return command.code
        except WorkerExit as end:
            return end.code
        finally:
            self._close_group()
            self.program.close()

    def _begin(self) -> do.Sync | do.Run | do.Exit:
        """Ask for the first world; where others are inside of their loop, once the program has come to its own."""
        runs_ahead = False
        if self.identity.left is None and getattr(self.program, "may_have_loop", False):
            with suppress(DriverUnreachable):
                runs_ahead = has_loop_begun(self.driver)
        if not runs_ahead:
            return self._advance(on.Warm(self.clock.now()))
        world, _ = self._go_alone()
        return self._advance(self._run_program(do.Run("outside of the loop", world, None)))

    def _go_alone(self) -> tuple[WorldView, Group]:
        """For a program outside of its loop: be in a world of one until `_join_others`: R21 (outside of the loop)."""
        world = make_world_alone(self.identity)
        group = self.groups.connect_alone(world)
        alone = replace(self._context_between_worlds, world=world, group=group, group_context=GroupContext())
        self._alone = alone, get_context() if self._world is not None else None
        set_context(alone)
        return world, group

    def _join_others(self) -> tuple[WorldView, Group] | None:
        """For a program that enters its loop: go to the world that it is a member of. None: it is there."""
        if self._alone is None:
            return None
        _, context = self._alone
        self._end_alone()
        if context is None:
            return self._await_run(self._advance(on.Warm(self.clock.now())))
        set_context(context)
        assert self._world is not None
        assert context.group is not None
        return self._world, context.group

    def _end_alone(self) -> None:
        if self._alone is not None:
            (alone, _), self._alone = self._alone, None
            alone.require_group().close()
            alone.group_context.close()

    def _report_straggler(self, reason: str) -> None:
        self.driver.ask(messages.WorkerStraggles(self.identity.worker, self._fence(), reason))

    def _report_checkpoint(self, written: Checkpoint | None) -> None:
        worker = self.identity.worker
        if written is not None:
            self.driver.ask(messages.CheckpointWritten(worker, written))
            return
        self._unwritten_checkpoints += 1
        self.driver.ask(messages.CheckpointStoreFull(worker, self._unwritten_checkpoints))

    def _advance(self, event: on.WorkerEvent) -> do.Sync | do.Run | do.Exit:
        """Post the event and execute the commands that follow, up to one for the program or the process's exit."""
        commands = deque(self._post(event))
        while commands:
            command = commands.popleft()
            if isinstance(command, do.Sync | do.Run | do.Exit):
                return command
            began = self.clock.now()
            try:
                answer = self._execute(command)
            except DriverUnreachable as error:  # no crash; this thread may notice before `DriverWatch`
                sys.stderr.write(f"worker {self.identity.worker} ends: {error}\n")
                now = self.clock.now()
                answer = on.DriverSilent(now, now - began)
            if answer is not None:
                commands.extend(self._post(answer))
        raise ElasticError(f"the machine of worker {self.identity.worker} gave no command")

    def _next_world(self, error: CollectiveError | None) -> tuple[WorldView, Group]:
        """For a program inside `run`: leave this world and return with the next."""
        assert self._world is not None
        if error is None:
            command = self._advance(on.Boundary(self.clock.now(), self._world.fence, CHANGE))
        else:
            command = self._advance(self._group_broke(self._world.fence, error))
        return self._await_run(command)

    def _await_run(self, command: do.Sync | do.Run | do.Exit) -> tuple[WorldView, Group]:
        while isinstance(command, do.Sync):
            command = self._advance(self._run_program(command))
        if isinstance(command, do.Exit):
            raise WorkerExit(command.code)
        assert self._group is not None
        return command.world, self._group

    def handle_event(self, event: on.WorkerEvent) -> int | None:
        """For the thread of `DriverWatch`: execute what must not wait. Returns an exit code, if any."""
        code = None
        for command in self._post(event):
            if isinstance(command, do.AbortGroup):
                self._abort_group(command)
            elif isinstance(command, do.Exit):
                code = command.code
        return code

    def _post(self, event: on.WorkerEvent) -> tuple[do.WorkerCommand, ...]:
        with self._lock:
            if self._applied is not None:  # of a former world it changes nothing, nor does it twice
                self._state, _ = worker_machine.step(self._state, self._applied)
            self._state, commands = worker_machine.step(self._state, event)
        return commands

    def _execute(self, command: do.WorkerCommand) -> on.WorkerEvent | None:
        match command:
            case do.Ask(_, message):
                return self._ask(message)
            case do.Report(_, message):
                sys.stderr.write(message.traceback)  # the driver may tolerate the failure and not show it
                self.driver.ask(message)
            case do.Form():
                return self._form(command.world)
            case do.AbortGroup():
                self._abort_group(command)
            case do.CloseGroup():
                self._close_group()
            case do.Sync() | do.Run() | do.Exit():
                pass  # not for `_execute`
        return None

    def _ask(self, message: messages.RequestNextWorld | messages.WorkerDone) -> on.WorkerEvent:
        if isinstance(message, messages.RequestNextWorld):
            set_context(self._context_between_worlds)
        else:
            self.watch.send_metrics()  # the driver may end the job upon `done`, before the next message of metrics
        message = replace(message, address="" if self._has_to_begin_again else self.groups.address)
        with self.groups.wait_recorder.record_wait():
            answer = self.driver.ask(message, MAX_POLL_SECONDS)
            while answer.is_undecided:
                answer = self.driver.ask(message, MAX_POLL_SECONDS)
        now = self.clock.now()
        if answer.world is not None:
            if self._has_to_begin_again:
                raise BeginAgain(self._state.fence, self._state.position)
            self._addresses = answer.find_known(dict(self._addresses))  # a collective may still add some
            return on.WorldReceived(now, answer.world)
        return on.StopReceived(now, answer.stop or "")

    def _form(self, world: WorldView) -> on.WorkerEvent:
        group = self.groups.connect(world, self._addresses, self.driver)
        with self._lock:
            self._group, self._world = group, world
            aborted = self._aborted_fence is not None and self._aborted_fence >= world.fence
        if aborted:
            group.abort("the driver ended this generation while it was formed")
        try:
            self.driver.ask(messages.WorldFormed(self.identity.worker, world.fence))
        except StaleGeneration as error:
            return self._group_broke(world.fence, error)
        self._group_context = GroupContext()
        context = self._group_context
        context.position = self.program.position()
        between = self._context_between_worlds
        set_context(replace(between, world=world, group=group, group_context=context))
        return on.GroupFormed(self.clock.now(), world.fence)

    def _run_program(self, command: do.Sync | do.Run) -> on.WorkerEvent:
        group = self._group if self._alone is None else self._alone[0].group
        assert group is not None
        try:
            with exit_forks():
                if isinstance(command, do.Run):
                    return self._train(command.world, group)
                position = self.program.sync(command.world, group)
            return on.Synced(self.clock.now(), command.world.fence, position)
        except WorkerExit:
            raise
        except BaseException as error:
            if isinstance(error, CollectiveError) and self._alone is None:
                return self._group_broke(self._fence(), error)
            # Reported to the driver whatever its class; the driver decides: R13 (deterministic failures).
            return on.UserRaised(self.clock.now(), compute_fingerprint(error), format_traceback(error))
        finally:
            self._end_alone()
            if isinstance(command, do.Run):
                self._has_to_begin_again = getattr(self.program, "needs_new_process", False)

    def _train(self, world: WorldView, group: Group) -> on.WorkerEvent:
        outcome = self.program.run(world, group, self._handle)
        if self._alone is not None:
            raise InvalidInput(
                "the function returned before its elastic loop, in which the other workers train: let each worker call "
                "the loop."
            )
        now = self.clock.now()  # `world` may be over: the program may have gone on to a later one
        if isinstance(outcome, Completed):
            check_result_size(outcome.result)
            return on.Finished(now, self._fence(), outcome.result)
        return on.Boundary(now, self._fence(), outcome.reason)

    def _report_position(self, position: Position) -> None:
        worker = get_context()
        assert worker is not None
        worker.group_context.position = position
        self._applied = on.Applied(self.clock.now(), self._fence(), position)

    def _fence(self) -> Fence:
        assert self._world is not None
        return self._world.fence

    def _group_broke(self, fence: Fence, error: Exception) -> on.GroupBroken:
        by_program = isinstance(error, MismatchError | RequestTimeout)  # no connection has broken
        suspects = error.ranks if isinstance(error, CollectiveError) and not by_program else ()
        return on.GroupBroken(self.clock.now(), fence, tuple(suspects), str(error))

    def _abort_group(self, command: do.AbortGroup) -> None:
        with self._lock:
            self._aborted_fence = command.fence
            is_current = self._world is not None and self._world.fence == command.fence
            group = self._group if is_current else None  # the main thread may have gone on to the next world
        if group is not None:
            group.abort(command.reason)

    def _close_group(self) -> None:
        with self._lock:
            group, self._group = self._group, None
        if group is not None:
            group.close()  # ends a collective in which the `CollectiveThread` waits for peers
            self._group_context.close()


@dataclass(eq=False, repr=False)
class DriverWatch:
    """Learns from the driver, by long polls in a daemon thread, of aborts, membership versions and the worker's stop.
    It never touches the program. R12 (driver silence): it ends the worker after `driver_timeout`."""

    worker: WorkerId
    driver: DriverClient
    clock: Clock
    driver_timeout: float
    slot_answered_at: Callable[[], float] = lambda: 0.0  # when the driver last answered the worker's slot

    def __post_init__(self) -> None:
        self.version = INITIAL_VERSION  # the newest that this worker knows; any thread may read it
        self._latest: Mapping[str, Any] | None = None  # metrics that were not sent yet
        self._closing = threading.Event()

    def start(self, handle_event: Callable[[on.WorkerEvent], int | None]) -> None:
        """handle_event: that of the worker's loop; returns an exit code if the worker has to end."""
        watch = partial(self._watch, handle_event)
        threading.Thread(target=watch, name="spark-elastic-watch", daemon=True).start()
        threading.Thread(target=self._send_regularly, name="spark-elastic-report", daemon=True).start()

    def close(self) -> None:
        self._closing.set()

    def _watch(self, handle_event: Callable[[on.WorkerEvent], int | None]) -> None:
        began = self.clock.now()
        ended_fence: Fence | None = None  # of the newest world that the driver has ended
        while not self._closing.is_set():
            last_seen = max(began, self.driver.last_answered_at(), self.slot_answered_at())
            left = last_seen + self.driver_timeout - self.clock.now()
            if left <= 0.0:
                silent = on.DriverSilent(self.clock.now(), self.driver_timeout - left)
                self._exit(handle_event(silent), "the driver is silent")
            try:
                # Asks by what it received last, not by the world that the worker is in. So it does not miss the end of
                # a world that begins while the request is open.
                request = WatchWorker(self.worker, ended_fence, self.version)
                watched = self.driver.ask(request, MAX_POLL_SECONDS, max(0.0, left))
            except Exception:  # also a lack of descriptors or memory, which may pass
                self._closing.wait(min(RETRY_EVERY, max(RETRY_AT_LEAST, left)))
                continue
            now = self.clock.now()
            if watched.version > self.version:
                self.version = watched.version
                notification_manager.handle_hosts_updated(self.clock.wall(), watched.version.update)
            if watched.ended_fence is not None and watched.ended_fence != ended_fence:
                ended_fence = watched.ended_fence
                why = watched.end_reason or "the driver ended this world, and its log says why"
                handle_event(on.AbortReceived(now, ended_fence, why))
            if watched.stop is not None:
                self._exit(handle_event(on.StopReceived(now, watched.stop)), watched.stop)
                return

    def _exit(self, code: int | None, reason: str) -> None:
        """End the process, even if user code never returns to the main thread."""
        if code is None or self._closing.wait(EXIT_GRACE):
            return
        with suppress(Exception):  # user code may have put a closed file there, or one on a full disk
            sys.stderr.write(f"worker {self.worker} ends: {reason}\n")
            sys.stderr.flush()
        os._exit(code)

    # ---- metrics

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Replace what is sent next. Never blocks."""
        self._latest = metrics

    def send_metrics(self) -> None:
        metrics, self._latest = self._latest, None
        if metrics is not None:
            with suppress(Exception):  # progress is for people
                self.driver.ask(Report(self.worker, codec.encode_numbers(metrics)))

    def _send_regularly(self) -> None:
        while not self._closing.wait(REPORT_EVERY):
            self.send_metrics()
