"""The state of a hand-written training: Horovod's `State`, `ObjectState` and those of Keras and TensorFlow, with atomic
snapshots; and `WorkerSession`, what a state uses of the worker that it lives in.

A commit is one snapshot over all values, so what is restored and what is handed over always belongs together. Commits
are counted: their number is the position by which the driver finds the newest survivor (R4, survivors). Training thread
only.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np

from elastic_collectives import CollectiveError, Group
from spark_elastic.errors import DriverUnreachable, InvalidInput
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
from spark_elastic.runs.checkpoint import CHECKPOINTER, SNAPSHOT_READER, Checkpointer, SnapshotReader
from spark_elastic.runs.handlers import (
    REGISTRY,
    KerasModelHandler,
    KerasOptimizerHandler,
    LikeKerasModel,
    LikeKerasOptimizer,
    Registry,
    SamplerStateHandler,
    SnapshotHandler,
    StateHandler,
    VariablesHandler,
    find_handler,
)
from spark_elastic.runs.kept_commits import COMMIT_KEEPER
from spark_elastic.runs.snapshot import (
    Kept,
    PickleCodec,
    Snapshot,
    SnapshotBuffer,
    SnapshotBuilder,
    broadcast_snapshot,
    exchange_kept,
    pickle_value,
)
from spark_elastic.worker.context import WorkerContext, get_context
from spark_elastic.worker.function_program import DIST_ENV, DistEnv, exchange_dist_env
from spark_elastic.worker.program import WorkerHandle
from spark_elastic.worker.session import get_group, mark_loop_begun, update_metrics

H = TypeVar("H", bound=StateHandler)

PLAIN = ""  # key of the pickled values in a snapshot's values; no value of a state has such a name


class HostsUpdatedInterrupt(RuntimeError):
    """All ranks agreed to stop at this point, since workers join or leave. Nothing is lost by it."""

    def __init__(self, skip_sync: bool = False) -> None:
        """
        Args:
            skip_sync: workers leave and none joins. The next world decides what is handed over: then nothing is.
        """
        super().__init__("the membership changes")
        self.skip_sync = skip_sync


class State(ABC):
    """Saves, restores and hands over what training needs. Subclasses say how, users say when."""

    takes_checkpoints = False  # whether `write_checkpoint` and `restore_checkpoint` work

    def __init__(self, bcast_object: object = None, get_rank: object = None) -> None:
        """
        Args:
            bcast_object: one of Horovod's arguments; the job's own broadcast is used instead.
            get_rank: likewise.
        """
        self._reset_callbacks: list[Callable[[], object]] = []
        self._session: WorkerSession | None = None
        self._number = 0  # number of the newest commit
        self._source = 0  # the rank whose state the others receive in `sync`

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Functions to call after each change of the world, on the workers that were there before.

        Raises:
            InvalidInput: there is something else among them.
        """
        given: Any = callbacks
        listed: list[Any] = list(given) if isinstance(given, Iterable) else [None]
        if not all(map(callable, listed)):
            raise InvalidInput(
                f"register_reset_callbacks takes a list of functions, such as [f] and not [f()]; got {callbacks!r}."
            )
        self._reset_callbacks.extend(listed)

    def on_reset(self) -> None:
        """The world changed."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: HostUpdateResult) -> None:  # noqa: B027 - a hook
        """A planned change interrupts training here; a hook for subclasses.

        Args:
            timestamp: grows from change to change: the generation of the world that ends.
            update_res: whether workers leave, join, or both.
        """

    def commit(self) -> None:
        """Save, so that a failure goes back to here, and stop here if a planned change waits.

        Does neither `in_mid_step`.

        Raises:
            HostsUpdatedInterrupt: on all ranks together; `elastic.run` catches it.
        """
        if not self.in_mid_step():
            self.make_commit()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Stop here if a planned change waits. All ranks must call this at the same point.

        Raises:
            HostsUpdatedInterrupt: on all ranks together; `elastic.run` catches it.
        """
        # Every rank takes part in the agreement, also one that is in the middle of a step.
        session = self._session
        if session is not None and session.agree_to_stop() and not self.in_mid_step():
            raise HostsUpdatedInterrupt(skip_sync=session.host_update == HostUpdateResult.removed)

    def in_mid_step(self) -> bool:
        """Whether a step is under way: its rows may be counted already, but a save would not hold its result."""
        return False

    @property
    def source_rank(self) -> int:
        """In `sync`: the rank whose state the others receive."""
        return self._source

    @abstractmethod
    def save(self) -> None:
        """Keep everything as it is now, in this process. Only `commit` counts it, except in an `ObjectState`."""

    @abstractmethod
    def restore(self) -> None:
        """Put everything back as it was at the last `save`."""

    @abstractmethod
    def sync(self) -> None:
        """Receive the live state of `source_rank`, and save it. Collective."""

    def reset(self) -> None:  # noqa: B027 - a hook
        """The world changed; called before the reset callbacks."""

    # ---- called by the run loop

    def make_commit(self) -> None:
        """Save as a new commit, with the next number."""
        self.save()
        self._number += 1
        self._report_commit()

    def renew_commit(self) -> None:
        """Save as the newest commit again, under its number, after something other than a step changed the state."""
        self.save()

    def on_broken_world(self) -> None:
        """The world broke: go back to the last commit."""
        self.restore()

    def begin_alone(self) -> None:  # noqa: B027 - a hook
        """The function begins in a process that is no worker."""

    def attach(self, session: WorkerSession | None) -> None:
        if session is not None and session.checkpointer is not None and not self.takes_checkpoints:
            raise InvalidInput(
                "run_id= needs a state that checkpoints can hold, an ObjectState or a class derived from it, such as "
                f"TorchState, FSDPState, KerasState or TensorFlowState; this one is a {type(self).__name__}."
            )
        self._session = session

    def begin_world(self, source: int | None, commits: int | None) -> None:
        """Prepare to continue in a new world. source: the rank whose state all others receive; None: all hold it
        already. commits: how many led to that state; None: the source has restored a checkpoint, which says it."""
        self._number = self._number if commits is None else commits
        if source is None:
            self.renew_commit()  # includes what the reset callbacks changed
        else:
            self._source = source
            self.sync()
        self._report_commit()

    def restore_checkpoint(self, reader: SnapshotReader, candidates: Sequence[Checkpoint]) -> None:
        """Load the first undamaged candidate; StoreError if all are damaged. Called on the source rank alone."""
        raise NotImplementedError

    def write_checkpoint(self, checkpointer: Checkpointer) -> None:
        """Write a checkpoint of the newest commit, and return once it is there. Called on every rank."""
        raise NotImplementedError

    def continue_from(self, other: State) -> None:
        """Go on from the last commit of a state that an earlier call of the user's function made."""
        self.__dict__.update(other.__dict__)
        self.restore()

    def _report_commit(self) -> None:
        # Reporting position 0 would make the driver prefer this worker's initial state to a checkpoint.
        if self._session is not None and self._number:
            self._session.report_commit(self._number)


class ObjectState(State):
    """Values by name, as attributes: `state = ObjectState(epoch=0, sampler=sampler)`, then `state.epoch += 1`.

    Values without a handler must pickle. Assigning to the attribute of a value with a handler makes the handler use the
    new value; `restore` brings back the one of the commit.
    """

    takes_checkpoints = True
    registry: Registry = REGISTRY

    def __init__(self, bcast_object: object = None, get_rank: object = None, **values: Any) -> None:
        self._handlers: dict[str, StateHandler] = {}
        self._plain: list[str] = []  # names of the values that are pickled
        # Values of the newest commit by name, in whose place others were assigned since then.
        self._replaced: dict[str, Any] = {}
        super().__init__()
        self._snapshots = SnapshotBuffer()
        for name, value in values.items():
            self._add(name, value)
        self.renew_commit()
        self._snapshots.wait()  # a checkpoint may be loaded next, and there is no older snapshot to fall back to

    def _add(self, name: str, value: Any) -> None:
        if name.startswith("_") or hasattr(type(self), name):
            raise InvalidInput(f"a state cannot hold a value named {name!r}: choose another name.")
        handler = find_handler(value, self.registry)
        if handler is None:
            self._plain.append(name)
        else:
            self._handlers[name] = handler
        object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        # Private attributes are set before `_handlers` exists.
        handler = None if name.startswith("_") else self._handlers.get(name)
        if handler is not None and value is not handler.value:
            self._snapshots.wait()  # the new value may change what is being copied: an optimizer the parameters
            if isinstance(handler, SnapshotHandler):
                self._replaced.setdefault(name, handler.value)
            handler.set_value(value)
        object.__setattr__(self, name, value)

    def __contains__(self, value: object) -> bool:
        return any(value is each for each in vars(self).values())

    def save(self) -> None:
        """Keep one version of everything; large values are copied in the background. This is a new commit."""
        self._number += 1
        self.renew_commit()
        self._report_commit()

    def make_commit(self) -> None:
        session = self._session
        if (
            session is not None
            and session.checkpointer is not None
            and session.group.rank == 0
            and session.checkpointer.count_step()
        ):
            self._offer_newest_commit(session.checkpointer)
        self.save()

    def renew_commit(self) -> None:
        for handler in self._list_own_handlers():
            handler.save()
        self._snapshots.begin(make_commit_position(self._number), self._capture)

    def restore(self) -> None:
        """Put everything back to the newest complete snapshot."""
        snapshot = self._snapshots.wait_for_newest()
        assert snapshot is not None
        for name, value in dict(self._replaced).items():
            setattr(self, name, value)
        self._load(snapshot)
        for handler in self._list_own_handlers():
            handler.restore()
        self._report_commit()

    def begin_world(self, source: int | None, commits: int | None) -> None:
        if source is not None:
            super().begin_world(source, commits)  # `sync` merges what the samplers know
            return
        progress = self._gather_progress()
        super().begin_world(source, commits)
        self._merge_progress(progress)

    def sync(self) -> None:
        """Receive the live state of `source_rank`, verified before anything changes (R5, staging), and save it."""
        progress = self._gather_progress()
        self._sync_values()
        self._merge_progress(progress)

    def _gather_progress(self) -> dict[str, list[bytes]]:
        """What each rank's samplers know to be processed, by the sampler's name. Collective if there is a sampler."""
        group = self._find_group()
        if group is None:
            return {}
        samplers = self._find_handlers(SamplerStateHandler).items()
        return {name: group.allgather_bytes(handler.pack_progress()) for name, handler in samplers}

    def _merge_progress(self, progress: dict[str, list[bytes]]) -> None:
        differing = {name: packed for name, packed in progress.items() if any(packed)}
        for name, packed in differing.items():
            self._find_handlers(SamplerStateHandler)[name].merge_progress(packed)
        if differing:
            self.renew_commit()

    def _find_group(self) -> Group | None:
        return get_group() if self._session is None else self._session.group

    def _sync_values(self) -> None:
        group = self._find_group()
        # Handlers of the user's come first: a rank that breaks there has not received the rest, and claims nothing.
        self._sync_each(self._list_own_handlers())
        # Other ranks save nothing here: that snapshot would pass for the state that is to arrive.
        if group is None or group.rank == self.source_rank:
            self._snapshots.begin(make_commit_position(self._number), self._capture)
        if group is not None:
            allocate = self._snapshots.get_free_memory
            mine = self._snapshots.wait_for_newest()
            arrived = broadcast_snapshot(group, self.source_rank, mine, PickleCodec(), allocate=allocate)
            sent = mine if arrived is None else arrived
            assert sent is not None
            exchange_kept(group, self.source_rank, sent.values, self.list_kept())
            if arrived is not None:
                self._snapshots.replace(arrived)
                self._load(arrived)
        self._sync_each(self._find_snapshot_handlers().values())

    def list_kept(self) -> dict[tuple[str, int, int], Kept]:
        """What snapshots share that this process has made itself, by key."""
        return {}

    def _sync_each(self, handlers: Iterable[StateHandler]) -> None:
        for handler in handlers:
            handler.source_rank = self.source_rank
            handler.sync()

    def attach(self, session: WorkerSession | None) -> None:
        own = [name for name, h in self._handlers.items() if not isinstance(h, SnapshotHandler)]
        if session is not None and session.checkpointer is not None and own:
            raise InvalidInput(
                f"run_id= makes a state durable as one snapshot, and the handler of {own[0]!r} takes no part in it: "
                "have it be a SnapshotHandler, or leave run_id out."
            )
        super().attach(session)
        if session is not None:
            self._snapshots.keeper = session.process_values.get(COMMIT_KEEPER)

    def restore_checkpoint(self, reader: SnapshotReader, candidates: Sequence[Checkpoint]) -> None:
        snapshot = reader.read(candidates)
        if snapshot is None:
            return
        if not self._fits(snapshot):
            raise InvalidInput(
                "the run's checkpoints are of a state of other names: make the same one, or use another run_id."
            )
        self._snapshots.wait()
        self._load(snapshot)

    def write_checkpoint(self, checkpointer: Checkpointer) -> None:
        assert self._session is not None
        if self._session.group.rank == 0:
            self._offer_newest_commit(checkpointer)
            checkpointer.flush()

    def _offer_newest_commit(self, checkpointer: Checkpointer) -> None:
        """Called before the next commit is saved: rank 0 has completed the exchanges after the newest one by then, so
        every survivor holds it or receives it."""
        assert self._session is not None
        snapshot = self._snapshots.wait_for_newest()
        if snapshot is not None and snapshot.position != START:
            with checkpointer.measure_stall():
                copy = snapshot.copy()  # the buffer writes over this memory with the commit after the next
            checkpointer.offer(self._session.world.fence, copy)

    def reset(self) -> None:
        for handler in self._handlers.values():
            handler.reset()

    def continue_from(self, other: State) -> None:
        snapshot = other._snapshots.wait_for_newest() if isinstance(other, ObjectState) else None
        if snapshot is None or not self._fits(snapshot):
            raise InvalidInput(
                "the function made a state of other names than when it was called before: make the same one each time."
            )
        self._snapshots.replace(snapshot)
        self._replaced = {}
        self.restore()

    def _fits(self, snapshot: Snapshot) -> bool:
        return set(snapshot.values) == {PLAIN, *self._find_snapshot_handlers()}

    def _list_own_handlers(self) -> list[StateHandler]:
        """Handlers of the user's that save and restore by themselves."""
        return [handler for handler in self._handlers.values() if not isinstance(handler, SnapshotHandler)]

    def _find_snapshot_handlers(self) -> dict[str, SnapshotHandler]:
        return {name: h for name, h in self._handlers.items() if isinstance(h, SnapshotHandler)}

    def _find_handlers(self, kind: type[H]) -> dict[str, H]:
        """Those of one class, by the names of their values."""
        return {name: handler for name, handler in self._handlers.items() if isinstance(handler, kind)}

    def _capture(self, builder: SnapshotBuilder) -> dict[str, Any]:
        values = {name: handler.capture(builder) for name, handler in self._find_snapshot_handlers().items()}
        values[PLAIN] = self._pickle_plain()
        self._replaced = {}
        return values

    def _pickle_plain(self) -> bytes:
        values = {name: getattr(self, name) for name in self._plain}
        try:
            return pickle_value(values)
        except Exception as error:  # objects raise anything when they are asked for their state
            raise InvalidInput(
                f"a value of the state cannot be pickled ({error}): keep it outside."
            ) from error

    def _load(self, snapshot: Snapshot, later: Collection[str] = ()) -> None:
        """later: names of values that are not loaded here."""
        for name, handler in self._find_snapshot_handlers().items():
            if name not in later:
                handler.load(snapshot.values[name], snapshot.memory)
        for name, value in pickle.loads(snapshot.values[PLAIN]).items():
            object.__setattr__(self, name, value)
        self._number = snapshot.position.step
        self._replaced = {}


class KerasState(ObjectState):
    """A Keras model, its optimizer and plain values by name, all parts of one snapshot; with any backend."""

    registry: Registry = (
        (LikeKerasModel, KerasModelHandler),
        (LikeKerasOptimizer, KerasOptimizerHandler),
        *REGISTRY,
    )

    def __init__(self, model: Any, optimizer: Any = None, **values: Any) -> None:
        """
        Args:
            model: a built model.
            optimizer: None takes the optimizer that the model was compiled with.
            values: may include further models and built optimizers.

        Raises:
            InvalidInput: there is no optimizer, or the model is not built.
        """
        optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
        if optimizer is None:
            raise InvalidInput(f"{type(self).__name__} needs an optimizer: pass one, or compile the model.")
        if not model.built:
            raise InvalidInput(
                "the model is not built: call it on a batch, or model.build(input_shape), before its state is made."
            )
        if not optimizer.built:  # a newcomer needs its slot variables before it receives those of others
            optimizer.build(model.trainable_variables)
        super().__init__(model=model, optimizer=optimizer, **values)


class _Variables(list[Any]):
    """The type by which a `TensorFlowState` recognises its variables."""


class TensorFlowState(ObjectState):
    """Variables and plain values by name, all in one snapshot. variables: of TensorFlow or Keras, in the same order on
    all workers. session: only None."""

    registry: Registry = ((_Variables, VariablesHandler), *REGISTRY)

    def __init__(self, variables: Sequence[Any] | None = None, session: object = None, **values: Any) -> None:
        if session is not None or not variables:
            raise InvalidInput(
                "TensorFlowState takes a list of variables, and no session: there are neither sessions nor global "
                "variables in TensorFlow 2."
            )
        super().__init__(variables=_Variables(variables), **values)


class TensorFlowKerasState(KerasState):
    """As `spark_elastic.keras.elastic.KerasState`. backend: not used."""

    def __init__(self, model: Any, optimizer: Any = None, backend: object = None, **values: Any) -> None:
        super().__init__(model, optimizer, **values)


# ---- the worker

MARKED = "marked"  # key of the process's values: this worker has told the driver that it enters its loop


class WorkerSession:
    def __init__(self, handle: WorkerHandle) -> None:
        self._handle = handle
        self.process_values: dict[str, Any] = handle.process_values  # outlive one call of the user's function
        # Writes checkpoints, and reads those of the run; None in a job without them.
        self.checkpointer: Checkpointer | None = handle.process_values.get(CHECKPOINTER)
        self.snapshot_reader: SnapshotReader | None = handle.process_values.get(SNAPSHOT_READER)
        self._agreed_version = INITIAL_VERSION  # newest membership version that all ranks know

    @property
    def world(self) -> WorldView:
        world = _require_context().world
        assert world is not None
        return world

    @property
    def group(self) -> Group:
        return _require_context().require_group()

    @property
    def address(self) -> str:
        return _require_context().address

    def wait_until_idle(self) -> None:
        """Wait until no other thread calls the group's collectives."""
        _require_context().group_context.collective_thread.drain()

    def report_commit(self, commits: int) -> None:
        """Report that this worker now holds the state of `commits` commits."""
        self._handle.report_position(make_commit_position(commits))
        metrics: dict[str, Any] = {"step": commits, "world": self.world.size}
        if self.checkpointer is not None:
            metrics["checkpoint_seconds"] = self.checkpointer.stall_seconds
        update_metrics(self._handle, metrics)

    def agree_to_stop(self) -> bool:
        """Whether all ranks stop here for a planned change; the same answer on each (R6, step summary). It follows from
        the membership version of the last exchange of gradients; if there was none, a small exchange takes place."""
        worker = _require_context()
        version = worker.group_context.take_agreed_version()
        if version is None:
            newest = np.array([self._handle.membership_version().encode()], np.int64)
            self.wait_until_idle()
            worker.require_group().allreduce(newest, op="max")
            version = MembershipVersion.decode(int(newest[0]))
        self._agreed_version = version
        return version > self.world.version

    @property
    def host_update(self) -> HostUpdateResult:
        """What the planned change does that all ranks know of since `agree_to_stop`."""
        return self._agreed_version.update

    def is_job_ending(self) -> bool:
        return self._agreed_version.job_ends

    def enter_loop(self) -> None:
        """Be in one world with the others that are in their loops. R21 (outside of the loop): the driver knows of it
        before this worker exchanges anything inside."""
        worker = _require_context()
        if worker.driver is not None and MARKED not in self.process_values:
            self.process_values[MARKED] = True
            with suppress(DriverUnreachable):  # `DriverWatch` ends the worker in time
                mark_loop_begun(worker.driver)
        joined = self._handle.join_others()
        if joined is not None:
            env = self.process_values.pop(DIST_ENV, None)
            (env or self._exchange_env(*joined)).apply()

    def next_world(self, error: CollectiveError | None) -> None:
        """Leave this world, because of `error` or at an agreed boundary, and return once the next one stands. Raises
        CollectiveError if that one broke at once."""
        self._exchange_env(*self._handle.next_world(error)).apply()

    def _exchange_env(self, world: WorldView, group: Group) -> DistEnv:
        worker = _require_context()
        return exchange_dist_env(world, group, worker.address, worker.ports, in_loop=True)


def get_session() -> WorkerSession | None:
    """The session of this process; None in a process that is not a worker."""
    worker = get_context()
    return None if worker is None or worker.handle is None else WorkerSession(worker.handle)


def make_commit_position(commits: int) -> Position:
    """The position of a hand-written training after so many commits: in epoch 0."""
    return Position(0, Phase.TRAIN, commits)


def _require_context() -> WorkerContext:
    worker = get_context()
    assert worker is not None
    return worker
