"""This process's place among the workers, as a hand-written training's state needs it. Main thread only."""

from __future__ import annotations

from typing import Any

import numpy as np

from elastic_collectives import CollectiveError, Group
from spark_elastic.errors import InvalidInput
from spark_elastic.protocol.types import Phase, Position, World, is_last
from spark_elastic.state import object_state
from spark_elastic.state.durable_commits import DURABLE, DurableCommits
from spark_elastic.worker.context import Current, EngineThread, current
from spark_elastic.worker.program import Session
from spark_elastic.worker.script import surround

# What hand-written training tells people of itself: numbers for the job's progress, status page and metrics.
#
# Whatever a worker reports, rank 0's is shown. Kept where it outlives one call of the user's function, so that a count
# of commits does not take the loss off the page. Training thread only.


REPORTED = "reported"  # in `Session.kept`
COUNTED = ("step", "steps", "rows", "world", "checkpoint_seconds")


def report(**numbers: Any) -> None:
    """Show these numbers of a training, as `report(loss=0.3, accuracy=0.9)`; each stays until it is reported anew.

    Cheap, to be called each step: four times a second the newest go to the driver, which shows those of rank 0. What
    `float` takes is a number. Does nothing in a process that is no worker.

    Raises:
        InvalidInput: what is not a number, or a name that the job counts itself.
    """
    here = current()
    told: dict[str, Any] = {}
    for name, value in numbers.items():
        if name in COUNTED:
            raise InvalidInput(f"report() counts {name} itself: give yours under another name.")
        try:
            told[name] = value if isinstance(value, int) else float(value)
        except (TypeError, ValueError) as error:
            raise InvalidInput(
                f"report() takes numbers; {name} is a {type(value).__name__} and no number: {error}."
            ) from error
    if here is not None and here.session is not None:
        size = {} if here.world is None else {"world": here.world.size}
        tell(here.session, {**told, **size})


def tell(session: Session, numbers: dict[str, Any]) -> None:
    """Report numbers, in addition to those that were reported before."""
    kept: dict[str, Any] = session.kept.setdefault(REPORTED, {})
    kept.update(numbers)
    session.report(dict(kept))


class WorkerSeat:
    """`state.Seat` over the current worker. A count of commits is told as a position in epoch 0."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._agreed = 0  # newest version that all ranks heard of

    @property
    def world(self) -> World:
        world = _here().world
        assert world is not None
        return world

    @property
    def group(self) -> Group:
        return group_of(_here())

    @property
    def kept(self) -> dict[str, Any]:
        return self._session.kept

    def at(self, commits: int) -> None:
        self._session.tell(Position(0, Phase.TRAIN, commits))
        tell(self._session, {"step": commits, "world": self.world.size})

    def stop_wanted(self) -> bool:
        """Whether all ranks stop here: told by the version that came with the last exchange of gradients or, if there
        was none, by a small exchange."""
        here = _here()
        version = here.floor.take_agreed()
        if version is None:
            newest = np.array([self._session.membership_version()], np.int64)
            here.floor.clear()
            group_of(here).allreduce(newest, op="max")
            version = int(newest[0])
        self._agreed = version
        return version > self.world.version

    @property
    def durable(self) -> DurableCommits | None:
        durable: DurableCommits | None = self._session.kept.get(DURABLE)
        return durable

    def ends(self) -> bool:
        return is_last(self._agreed)

    def next_world(self, error: CollectiveError | None) -> None:
        world, group = self._session.next_world(error)
        here = _here()
        surround(world, group, here.address, here.ports)


def seat_of_process() -> WorkerSeat | None:
    """This process's seat; None in a process that is not a worker."""
    here = current()
    return None if here is None or here.session is None else WorkerSeat(here.session)


def group_of_process() -> Group | None:
    """The current world's group; None in a process that is not a worker.

    Raises:
        CollectiveError: between two worlds there is none.
    """
    here = current()
    return None if here is None else group_of(here)


def engine_of_process() -> EngineThread | None:
    """The thread that calls the current world's collectives; None in a process that is not a worker."""
    here = current()
    return None if here is None else here.floor.engine


def group_of(here: Current) -> Group:
    """The current world's group.

    Raises:
        CollectiveError: between two worlds there is none.
    """
    if here.group is None:
        raise CollectiveError((), "this worker is between two worlds")
    return here.group


def _here() -> Current:
    here = current()
    assert here is not None
    return here


# What Spark gave to the slot of this worker.


def task_resources() -> dict[str, tuple[str, ...]]:
    """Addresses by resource, as `TaskContext.resources()` has them: {"gpu": ("0",)}; empty where there are none.

    For the function on a worker: the addresses are the slot's own, so that no two workers of a host take the same.
    """
    here = current()
    return {} if here is None else dict(here.resources)


# States of hand-written training as a worker has them: a `sync` outside of the run loop finds the process's world.


class ObjectState(object_state.ObjectState):
    __doc__ = object_state.ObjectState.__doc__
    group_of_process = staticmethod(group_of_process)


class KerasState(object_state.KerasState):
    __doc__ = object_state.KerasState.__doc__
    group_of_process = staticmethod(group_of_process)
