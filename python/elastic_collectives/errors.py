"""Every error of a group, in one tree.

    CollectiveError          the group is over: build a new one
    ├── PeerLost             a connection broke
    ├── GroupAborted         abort() was called here or at a peer
    ├── CollectiveTimeout    peers did not come in time
    └── MismatchError        the ranks did not call the same collective with the same sizes

The rank that notices a failure informs the others: all reachable ranks raise the same class, ranks and reason.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

E = TypeVar("E", bound="CollectiveError")


class CollectiveError(RuntimeError):
    """The group failed and cannot be used again. `ranks`: those at fault, as far as known; `reason`: one sentence. A
    message or an error may be passed alone: programs written for Horovod raise it so, to have their state restored."""

    def __init__(self, ranks: Sequence[int] | str | Exception = (), reason: str = "") -> None:
        if isinstance(ranks, str | Exception):
            ranks, reason = (), str(ranks)
        super().__init__(reason)
        self.ranks: tuple[int, ...] = tuple(ranks)
        self.reason = reason

    def to_world_ranks(self: E, members: Sequence[int]) -> E:
        """The error of a subgroup with the rank numbers of the whole world: always another one, which may be kept. By
        the frames of this one, the program's variables would live on in the next world. members: `Group.members` of the
        subgroup."""
        if list(members) == list(range(len(members))):
            return type(self)(self.ranks, self.reason)
        listed = ", ".join(map(str, members))
        reason = f"{self.reason} (counted among ranks {listed})"
        return type(self)([members[rank] for rank in self.ranks], reason)


class PeerLost(CollectiveError):
    """A connection broke: the peer died, or closed its group."""


class GroupAborted(CollectiveError):
    """`abort` was called on this rank or on a peer, or the group was closed; `ranks`: those that the caller blamed."""


class CollectiveTimeout(CollectiveError):
    """Peers did not come within the group's timeout; `ranks` are those that this rank waited for."""


class RequestTimeout(CollectiveTimeout):
    """Ranks that can be reached did not request a negotiated operation in time."""


class MismatchError(CollectiveError):
    """The ranks did not call the same collective with the same sizes."""


def refuse_forks(pid: int) -> None:
    """Raises RuntimeError in a process that was forked from `pid`: its parent's connections are not its own."""
    if os.getpid() != pid:
        raise RuntimeError(
            "a process that a worker's code forked (os.fork) called a collective, which only the worker may: end such "
            "a process by os._exit, or start it by subprocess or multiprocessing."
        )


BY_CAUSE: tuple[type[CollectiveError], ...] = (PeerLost, GroupAborted, CollectiveTimeout, MismatchError)


def raise_by_cause(cause: int, ranks: Sequence[int], reason: str) -> None:
    """Raise the class for an engine error; `cause` indexes BY_CAUSE."""
    raise BY_CAUSE[cause](ranks, reason)
