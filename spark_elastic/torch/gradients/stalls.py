"""Horovod's stall check: logs which ranks an exchange of gradients waits for, and gives it up in the end."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from elastic_collectives import Group

NAMED = 3  # how many parameters a line names

log = logging.getLogger(__name__)


@contextmanager
def inspected(
    group: Group, names: Callable[[], Sequence[str]], warn_after: float, wait_at_most: float | None
) -> Iterator[None]:
    """Around a collective of `group`, in the thread that calls it.

    names: of the parameters whose gradients it sums. warn_after: seconds until the ranks that it waits for are logged,
    and between two such lines. wait_at_most: until it is an error; None: the group's timeout.
    """
    if warn_after == math.inf and wait_at_most is None:
        yield
        return
    told = 0.0

    def waits(seconds: float, ranks: Sequence[int]) -> None:
        nonlocal told
        if seconds - told >= warn_after:
            told = seconds
            log.warning(
                "gradients of %s have been waiting for %.0f s for rank(s) %s, which have not brought theirs.",
                _listed(names()), seconds, ", ".join(str(group.members[rank]) for rank in ranks),
            )  # fmt: skip

    group.watch(waits)
    group.limit(group.timeout if wait_at_most is None else wait_at_most)
    try:
        yield
    finally:
        group.watch(None)
        group.limit(group.timeout)


def _listed(names: Sequence[str]) -> str:
    some = ", ".join(map(repr, names[:NAMED]))
    return some if len(names) <= NAMED else f"{some} and {len(names) - NAMED} more"
