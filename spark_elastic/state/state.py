"""The state of a hand-written training, as its loop and the run loop see it: Horovod's `State`.

Commits are counted: their number is the position by which the driver finds the newest survivor (R4). Training thread
only. It must not know how its values are kept (`object_state`) nor how worlds are formed (`WorkerSession`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from elastic_collectives import CollectiveError, Group
from spark_elastic.errors import InvalidInput
from spark_elastic.protocol.types import Checkpoint, World
from spark_elastic.state.durable_commits import DurableCommits


class HostsUpdatedInterrupt(RuntimeError):
    """All ranks agreed to stop at this point, since workers join or leave. Nothing is lost by it.

    skip_sync: taken for Horovod's sake; what is handed over follows from the next world alone.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the membership changes")
        self.skip_sync = skip_sync


class WorkerSession(Protocol):
    """What a state and the run loop use of the worker that this process is."""

    @property
    def world(self) -> World: ...

    @property
    def group(self) -> Group: ...

    @property
    def persistent(self) -> dict[str, Any]:
        """Values by name that outlive one call of the user's function."""
        ...

    def report_commit(self, commits: int) -> None:
        """Report that this worker now has the state of that many commits."""
        ...

    def agree_to_stop(self) -> bool:
        """Whether all ranks stop here for a planned change: R6 (step summary). Collective, with the same answer on all.

        Raises:
            CollectiveError: the group broke.
        """
        ...

    @property
    def durable(self) -> DurableCommits | None:
        """Writes commits to the store; None: this job's commits are not durable."""
        ...

    def is_job_ending(self) -> bool:
        """Whether the job ends at the stop that all ranks agreed on."""
        ...

    def next_world(self, error: CollectiveError | None) -> None:
        """Leave this world, because of `error` or at an agreed boundary, and return when the next one is formed.

        Raises:
            CollectiveError: the next world broke while it was formed.
        """
        ...


class State(ABC):
    """Save, restore and hand over what training needs. Subclasses say how, users say when.

    bcast_object, get_rank: Horovod's arguments; the job's own are used in their place.
    """

    def __init__(self, bcast_object: object = None, get_rank: object = None) -> None:
        self._reset_callbacks: list[Callable[[], object]] = []
        self._session: WorkerSession | None = None
        self._number = 0  # of the newest commit
        self._source = 0

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], object]]) -> None:
        """Functions to call after each change of the world, on the workers that were there before."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """The world changed."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:  # noqa: B027 - a hook
        """A planned change interrupts training here; for subclasses that want to know."""

    def commit(self) -> None:
        """Save, so that a failure goes back to here, and stop here if a planned change waits.

        `in_mid_step` it does neither.

        Raises:
            HostsUpdatedInterrupt: on all ranks together; `elastic.run` catches it.
        """
        if not self.in_mid_step():
            self.count_save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Stop here if a planned change waits. To be called by all ranks alike.

        Raises:
            HostsUpdatedInterrupt: on all ranks together; `elastic.run` catches it.
        """
        # All ranks ask, whatever each of them finds itself in.
        if self._session is not None and self._session.agree_to_stop() and not self.in_mid_step():
            raise HostsUpdatedInterrupt

    def in_mid_step(self) -> bool:
        """Whether a step is under way whose result no save would hold yet, though its rows may be counted already."""
        return False

    @property
    def source_rank(self) -> int:
        """In `sync`: the rank whose state the others take."""
        return self._source

    @abstractmethod
    def save(self) -> None:
        """Keep everything as it is now, in this process."""

    @abstractmethod
    def restore(self) -> None:
        """Put everything back as it was at the last `save`."""

    @abstractmethod
    def sync(self) -> None:
        """Take over the live state of `source_rank`, and save it. Collective."""

    def reset(self) -> None:  # noqa: B027 - a hook
        """The world changed; before the reset callbacks."""

    # ---- for the run loop

    def count_save(self) -> None:
        """A save that counts as a commit."""
        self.save()
        self._number += 1
        self._tell()

    def save_again(self) -> None:
        """A save that stands for the same commit as the one before."""
        self.save()

    def attach(self, session: WorkerSession | None) -> None:
        """Give this state a session, or take it away (None).

        Raises:
            InvalidInput: the job's commits are to be durable, and this state's cannot be.
        """
        if (
            session is not None
            and session.durable is not None
            and type(self).make_durable is State.make_durable
        ):
            raise _not_durable(self)
        self._session = session

    def begin_world(self, source: int | None, number: int | None) -> None:
        """Prepare to go on in a new world.

        source: whose state all take over; None: all hold it already. number: of commits that it stands for; None: those
        that this state has.
        """
        self._number = self._number if number is None else number
        if source is None:
            self.save_again()  # what reset callbacks changed is part of it from here on
        else:
            self._source = source
            self.sync()
        self._tell()

    def resume(self, durable: DurableCommits, candidates: Sequence[Checkpoint]) -> None:
        """Become the newest durable commit.

        Raises:
            InvalidInput: this kind of state is kept in a way of its own. StoreError: no checkpoint is whole.
        """
        raise _not_durable(self)

    def make_durable(self, durable: DurableCommits) -> None:
        """Make the newest commit durable before returning, since no other follows. Called on rank 0."""
        raise _not_durable(self)

    def take_from(self, other: State) -> None:
        """Go on from the last commit of a state that an earlier call of the user's function made."""
        self.__dict__.update(other.__dict__)
        self.restore()

    def _tell(self) -> None:
        # Before the first commit there is nothing that a checkpoint should give way to.
        if self._session is not None and self._number:
            self._session.report_commit(self._number)


def _not_durable(state: State) -> InvalidInput:
    return InvalidInput(
        f"run_id= needs a state that can be made durable, an ObjectState or TorchState; this one is a "
        f"{type(state).__name__}."
    )
