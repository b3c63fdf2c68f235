"""The run loop of hand-written training: what `elastic.run` wraps around the user's function.

A loss goes back to the last commit, a planned change goes on from the live values; in both cases everything that the
state holds belongs together (W3). Who hands its state to whom follows from the world alone, the same on every rank
(W2). Training thread only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from elastic_collectives import CollectiveError, MismatchError
from spark_elastic.errors import InvalidInput
from spark_elastic.protocol.types import START, World
from spark_elastic.state.state import HostsUpdatedInterrupt, State, WorkerSession

R = TypeVar("R")

STATE = "state"  # in `WorkerSession.persistent`: of the newest elastic function of this process
ENTERED = "entered"  # whether this call of the user's function has reached it
BEGUN = "begun"  # the fence of the world that it was begun in


def elastic(func: Callable[..., R], get_session: Callable[[], WorkerSession | None]) -> Callable[..., R]:
    """`func(state, ...)` run again in each world, from where its state stands. In a process that is no worker: once.

    get_session: the place of the process when the function is called.
    """

    @wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> R:
        session = get_session()
        if session is None:
            return func(state, *args, **kwargs)
        _enter(state, session)
        try:
            return _sync(lambda: func(state, *args, **kwargs), state, session)
        finally:
            state.attach(None)

    return wrapper


def _enter(state: State, session: WorkerSession) -> None:
    kept = session.persistent
    if kept.get(ENTERED) and kept[STATE] is not state:
        raise InvalidInput(
            "elastic.run was called with two states in one function, and a newcomer could not know where to begin: put "
            "everything into one state and one function."
        )
    former = kept.get(STATE)
    state.attach(session)
    if former is not None and former is not state:
        state.take_from(former)
    kept[STATE], kept[ENTERED] = state, True


def _sync(func: Callable[[], R], state: State, session: WorkerSession) -> R:
    changed = False
    while True:
        error: CollectiveError | None = None
        try:
            if changed:
                state.on_reset()
            _begin(state, session)
            result = func()
            _last(state, session)
            return result
        except HostsUpdatedInterrupt:
            state.on_hosts_updated(float(session.world.fence.generation), 0)
            state.count_save()  # a worker that broke here is one commit behind, and takes over
            if session.is_job_ending():
                _last(state, session)
        except MismatchError:
            raise  # not a loss that another world could mend
        except CollectiveError as broke:
            state.restore()
            error = broke
        _next_world(session, error)
        changed = True


def _next_world(session: WorkerSession, error: CollectiveError | None) -> None:
    while True:
        try:
            session.next_world(error)
            return
        except CollectiveError as broke:
            error = broke


def _begin(state: State, session: WorkerSession) -> None:
    world = session.world
    if session.persistent.get(BEGUN) == world.fence:
        return  # the user's function called it again
    source, number = hand_over_of(world)
    if world.resume:
        number = None  # that of the checkpoint, which travels with it
        if session.group.rank == source and session.durable is not None:
            state.resume(session.durable, world.resume)
    state.begin_world(source, number)
    session.persistent[BEGUN] = world.fence


def _last(state: State, session: WorkerSession) -> None:
    """Make the newest commit durable, since none follows it."""
    if session.durable is not None and session.group.rank == 0:
        state.make_durable(session.durable)


def hand_over_of(world: World) -> tuple[int | None, int | None]:
    """(rank whose state all take over, number of its commits); None: all hold that state already.

    Before the first commit everybody takes over one worker's state: initial values may differ, and the world in which
    they were to be made equal may have broken in the middle of it.
    """
    if world.position is None or world.position == START:
        return (0 if world.source is None else world.source), 0
    return (world.source if world.receivers else None), world.position.step
