"""Every error of a group, in one tree.

    CollectiveError          the group is over: build a new one
    ├── PeerLost             a connection broke
    ├── GroupAborted         abort() was called here or at a peer
    ├── CollectiveTimeout    peers did not come in time
    └── MismatchError        the ranks did not call the same collective with the same sizes

The rank that notices tells the others: class, ranks and reason are the same on all that could be told.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Self


class CollectiveError(RuntimeError):
    """A group failed and is of no more use. `ranks`: those at fault, as far as known; `reason`: one sentence.

    A message or an error alone is the reason: so programs for Horovod raise it, to have their state restored.
    """

    def __init__(self, ranks: Sequence[int] | str | Exception = (), reason: str = "") -> None:
        if isinstance(ranks, str | Exception):
            ranks, reason = (), str(ranks)
        super().__init__(reason)
        self.ranks: tuple[int, ...] = tuple(ranks)
        self.reason = reason

    def among(self, members: Sequence[int]) -> Self:
        """What a subgroup raised, for those who know its ranks as the `Group.members` that they are."""
        if list(members) == list(range(len(members))):
            return self
        listed = ", ".join(map(str, members))
        reason = f"{self.reason} (counted among ranks {listed})"
        return type(self)([members[rank] for rank in self.ranks], reason)


class PeerLost(CollectiveError):
    """A connection broke: the peer died, or closed its group."""


class GroupAborted(CollectiveError):
    """`abort` was called on this rank or on a peer, or the group was closed; `ranks` tells the origin's culprits."""


class CollectiveTimeout(CollectiveError):
    """Peers did not come within the group's timeout; `ranks` are those that were waited for."""


class MismatchError(CollectiveError):
    """The ranks did not call the same collective with the same sizes."""


BY_CAUSE: tuple[type[CollectiveError], ...] = (PeerLost, GroupAborted, CollectiveTimeout, MismatchError)


def raise_by_cause(cause: int, ranks: Sequence[int], reason: str) -> None:
    """What the engine calls to raise; `cause` indexes BY_CAUSE."""
    raise BY_CAUSE[cause](ranks, reason)
