"""Logs which operation waits for which ranks, once it has waited for long. One thread; the time is a value."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

log = logging.getLogger(__name__)


class OverdueOperations:
    """Warns again after each further `warn_after` seconds. name: of the process set; "" for the whole world. members:
    what its ranks are in the world."""

    def __init__(self, name: str, warn_after: float, members: Sequence[int]) -> None:
        self._where = f" of {name}" if name else ""
        self._warn_after = warn_after
        self._members = members
        self._since: dict[str, float] = {}
        self._warned: dict[str, float] = {}

    def look(self, undecided: Mapping[str, tuple[int, ...]], now: float) -> None:
        """undecided: operations that some rank asked for, each with the ranks that have not."""
        for settled in self._since.keys() - undecided.keys():
            del self._since[settled]
            self._warned.pop(settled, None)
        for label, missing in undecided.items():
            since = self._since.setdefault(label, now)
            if now - self._warned.get(label, since) >= self._warn_after:
                self._warned[label] = now
                log.warning(
                    "operation %r%s has been waiting for %.0f s for rank(s) %s, which did not ask for it.",
                    label, self._where, now - since, ", ".join(str(self._members[rank]) for rank in missing),
                )  # fmt: skip
