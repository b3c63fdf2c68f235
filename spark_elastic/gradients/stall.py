"""Horovod's stall check: logs which ranks a collective waits for, and how long it may wait.

Two forms of it. `OperationStallCheck` serves negotiated operations, which ranks request before they carry them out:
rank 0 knows from the negotiation which ranks have not asked. `watch_collective` serves the exchange of gradients, which
no negotiation precedes: the engine reports which ranks it waits for.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from elastic_collectives import Group

log = logging.getLogger(__name__)

NAMED = 3  # parameters that a line names at most


class OperationStallCheck:
    """Warns of operations that some ranks have requested and others have not. Used by one thread; time is a value."""

    def __init__(self, process_set: str, warn_after: float, members: Sequence[int]) -> None:
        """
        Args:
            process_set: its name in messages; "" for the whole world.
            warn_after: seconds until the first warning of an operation, and between two of them.
            members: rank in the world of each rank of the process set.
        """
        self._where = f" of {process_set}" if process_set else ""
        self._warn_after = warn_after
        self._members = members
        self._pending_since: dict[str, float] = {}  # by label
        self._warned_at: dict[str, float] = {}  # by label

    def check(self, pending: Mapping[str, tuple[int, ...]], now: float) -> None:
        """Log what has been pending for too long.

        Args:
            pending: by label of each requested operation, the ranks that have not requested it.
        """
        for label in self._pending_since.keys() - pending.keys():
            del self._pending_since[label]
            self._warned_at.pop(label, None)
        for label, missing in pending.items():
            since = self._pending_since.setdefault(label, now)
            if now - self._warned_at.get(label, since) >= self._warn_after:
                self._warned_at[label] = now
                log.warning(
                    "operation %r%s has been waiting for %.0f s for rank(s) %s, which did not request it.",
                    label, self._where, now - since, ", ".join(str(self._members[rank]) for rank in missing),
                )  # fmt: skip


def watch_collective(
    group: Group, parameters: Callable[[], Sequence[str]], warn_after: float, wait_at_most: float | None
) -> AbstractContextManager[None]:
    """Check a collective of `group` for stalls. To be entered in the thread that calls the collective.

    Args:
        parameters: returns the names of the parameters whose gradients the collective sums.
        warn_after: seconds until a warning names the ranks that it waits for, and between two warnings.
        wait_at_most: seconds until the wait is an error; None: the timeout of the group.
    """
    watches = warn_after != math.inf or wait_at_most is not None
    return _CollectiveWatch(group, parameters, warn_after, wait_at_most) if watches else nullcontext()


class _CollectiveWatch:
    """May be entered again: each step does."""

    def __init__(
        self,
        group: Group,
        parameters: Callable[[], Sequence[str]],
        warn_after: float,
        wait_at_most: float | None,
    ) -> None:
        self._group, self._parameters = group, parameters
        self._warn_after, self._wait_at_most = warn_after, wait_at_most
        self._warned_after = 0.0

    def __enter__(self) -> None:
        self._warned_after = 0.0
        self._group.watch(self._on_wait)
        if self._wait_at_most is not None:
            self._group.set_timeout(self._wait_at_most)

    def __exit__(self, *error: object) -> None:
        self._group.watch(None)
        if self._wait_at_most is not None:
            self._group.set_timeout(self._group.timeout)

    def _on_wait(self, seconds: float, ranks: Sequence[int]) -> None:
        if seconds - self._warned_after >= self._warn_after:
            self._warned_after = seconds
            log.warning(
                "gradients of %s have been waiting for %.0f s for rank(s) %s, which have not sent theirs.",
                _format_names(self._parameters()), seconds, ", ".join(str(self._group.members[rank]) for rank in ranks),
            )  # fmt: skip


def _format_names(names: Sequence[str]) -> str:
    some = ", ".join(map(repr, names[:NAMED]))
    return some if len(names) <= NAMED else f"{some} and {len(names) - NAMED} more"
