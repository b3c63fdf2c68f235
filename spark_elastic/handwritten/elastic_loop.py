"""The run loop of hand-written training: what `elastic.run` wraps around the user's function.

After a worker is lost, training goes back to the last commit; after a planned change it continues from the live values.
In both cases all values of the state belong to the same moment. Which rank hands its state to which follows from the
world alone, so that every rank decides alike. Training thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from elastic_collectives import CollectiveError, MismatchError
from spark_elastic.errors import InvalidInput
from spark_elastic.handwritten.object_state import HostsUpdatedInterrupt, State, WorkerSession, get_session
from spark_elastic.protocol.types import START, WorldView
from spark_elastic.runs.kept_commits import COMMIT_KEEPER, CommitKeeper
from spark_elastic.worker.session import ENTERED, STATE

R = TypeVar("R")

# Key of `process_values`: the fence of the newest world that the state has begun.
SYNCED_FENCE = "synced_fence"


def run(func: Callable[..., R]) -> Callable[..., R]:
    """Decorator: call `func(state, ...)` again in each world, from where its state stands, until it returns. In a
    process that is no worker: once."""
    return elastic(func)


def elastic(
    func: Callable[..., R], find_session: Callable[[], WorkerSession | None] = get_session
) -> Callable[..., R]:
    """As `run`. find_session: returns the session of the process; called with each call of the function."""

    @wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> R:
        if not isinstance(state, State):
            raise InvalidInput(
                f"a function of elastic.run takes a state first, such as TorchState(model=model); got "
                f"{type(state).__name__}."
            )
        session = find_session()
        if session is None:
            state.begin_alone()
            return func(state, *args, **kwargs)
        _enter(state, session)
        try:
            return _run_in_worlds(lambda: func(state, *args, **kwargs), state, session)
        finally:
            state.attach(None)

    return wrapper


def _enter(state: State, session: WorkerSession) -> None:
    process_values = session.process_values
    if process_values.get(ENTERED) and process_values[STATE] is not state:
        raise InvalidInput(
            "elastic.run was called with two states in one function, and a newcomer could not know where to begin: put "
            "everything into one state and one function."
        )
    former = process_values.get(STATE)
    state.attach(session)
    if former is not None and former is not state:
        state.continue_from(former)
    process_values[STATE], process_values[ENTERED] = state, True


def _run_in_worlds(func: Callable[[], R], state: State, session: WorkerSession) -> R:
    changed = False
    while True:
        error: CollectiveError | None = None
        try:
            if changed:
                state.on_reset()
            else:
                session.enter_loop()
            _begin_world(state, session)
            result = func()
            if session.checkpointer is not None:  # no commit follows
                state.write_checkpoint(session.checkpointer)
            return result
        except HostsUpdatedInterrupt:
            error = _save_at_stop(state, session)
        except MismatchError:
            raise  # another world could not mend it
        except CollectiveError as broke:
            state.on_broken_world()
            error = broke
        changed = False
        while not changed:
            try:
                session.next_world(error)
                changed = True
            except CollectiveError as broke:  # at once
                error = broke


def _save_at_stop(state: State, session: WorkerSession) -> CollectiveError | None:
    """Commit where all ranks agreed to stop. Returns what broke the world meanwhile."""
    state.on_hosts_updated(float(session.world.fence.generation), session.host_update)
    try:
        # The stop is a commit of its own: a worker whose exchange broke here is one commit behind, and receives it.
        state.make_commit()
        if session.is_job_ending() and session.checkpointer is not None:
            state.write_checkpoint(session.checkpointer)
    except MismatchError:
        raise
    except CollectiveError as broke:
        state.on_broken_world()
        return broke
    return None


def _begin_world(state: State, session: WorkerSession) -> None:
    world = session.world
    if session.process_values.get(SYNCED_FENCE) == world.fence:
        return  # the user's function called its elastic function again
    commits: int | None
    source, commits = choose_source(world)
    reader = session.snapshot_reader
    keeper: CommitKeeper | None = session.process_values.get(COMMIT_KEEPER)
    if keeper is not None:
        keeper.begin_world(world.fence, keeps=world.me.local_rank == 0)
    if world.resume:
        commits = None  # the checkpoint says it
        if session.group.rank == source and reader is not None:
            state.restore_checkpoint(reader, world.resume)
    state.begin_world(source, commits)
    if reader is not None:
        reader.forget()
    session.process_values[SYNCED_FENCE] = world.fence


def choose_source(world: WorldView) -> tuple[int | None, int]:
    """(the rank whose state all others receive; None: all hold it already, how many commits led to that state).

    Before the first commit all receive the state of one worker: initial values may differ, and the world in which
    they were to become equal may have broken midway.
    """
    if world.position is None or world.position == START:
        return (0 if world.source is None else world.source), 0
    return (world.source if world.has_receivers else None), world.position.step
