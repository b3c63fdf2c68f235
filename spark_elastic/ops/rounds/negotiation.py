"""The order in which ranks carry out what they asked for: the same machine on every rank, fed with what all said.

Pure: no clock, no thread. An operation is due once every rank that has not joined asked for it; operations that are due
in the same round go in the order in which they were first asked for, lower ranks first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from elastic_collectives import CollectiveError, CollectiveTimeout, MismatchError
from spark_elastic.ops.rounds.request import JOINABLE, Request, disagreement
from spark_elastic.ops.rounds.vocabulary import Vocabulary, Word


@dataclass(frozen=True)
class Due:
    """An operation to carry out now; `error`: or to give up, on every rank alike."""

    label: str
    request: Request
    error: CollectiveError | None = None


@dataclass(frozen=True)
class Round:
    """What a round came to.

    mine: labels of the requests that this rank has just announced, in their order. last_joined: once all ranks have
    joined, the one that did so last; they are as before they joined.
    """

    due: tuple[Due, ...]
    mine: tuple[str, ...]
    last_joined: int | None = None


@dataclass
class _Entry:
    requests: dict[int, Request] = field(default_factory=dict)
    expired: bool = False


class Negotiation:
    """One rank's copy of the machine."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._words = Vocabulary()
        self._table: dict[str, _Entry] = {}
        self._unnamed: dict[int, Counter[str]] = {other: Counter() for other in range(size)}
        self._joined: dict[int, int] = {}  # rank -> after how many steps it joined, in the order of joining

    @property
    def undecided(self) -> dict[str, tuple[int, ...]]:
        """Operations that some rank asked for, each with the ranks that have not."""
        return {label: self._missing(entry) for label, entry in self._table.items()}

    @property
    def everybody_waits(self) -> bool:
        """Each rank has asked for something undecided, or has joined: only something new can bring them on."""
        asked = {rank for entry in self._table.values() for rank in entry.requests}
        return len(asked | set(self._joined)) == self._size

    def write(self, words: Sequence[Word]) -> bytes:
        """What this rank says in the next round."""
        return self._words.write(words)

    def hear(self, said: Sequence[bytes], stuck: bool = False) -> Round:
        """Take in what all ranks said, in rank order. stuck: all of them have been waiting for long."""
        mine: list[str] = []
        for rank, words in enumerate(self._words.read(said)):
            for word in words:
                label = self._take(rank, word)
                if label is not None and rank == self._rank:
                    mine.append(label)
        due = [self._decided(label) for label, entry in self._table.items() if self._is_due(entry)]
        if stuck and not due and self._table:
            due = self._stuck()
        for done in due:
            del self._table[done.label]
        last = self._all_joined()
        return Round(tuple(due), tuple(mine), last)

    def _take(self, rank: int, word: Word) -> str | None:
        if word.expired is not None:
            if word.expired in self._table:
                self._table[word.expired].expired = True
        elif word.request is None:
            self._joined[rank] = word.joined
        else:
            label = word.request.name or self._next_unnamed(rank, word.request.kind)
            self._table.setdefault(label, _Entry()).requests[rank] = word.request
            return label
        return None

    def _next_unnamed(self, rank: int, kind: str) -> str:
        self._unnamed[rank][kind] += 1
        return f"{kind}.noname.{self._unnamed[rank][kind]}"

    def _missing(self, entry: _Entry) -> tuple[int, ...]:
        return tuple(
            rank for rank in range(self._size) if rank not in entry.requests and rank not in self._joined
        )

    def _is_due(self, entry: _Entry) -> bool:
        return entry.expired or not self._missing(entry)

    def _decided(self, label: str) -> Due:
        entry = self._table[label]
        request = entry.requests[min(entry.requests)]
        missing = self._missing(entry)
        if missing:
            reason = f"{label!r} waited too long for rank(s) {_listed(missing)}, which did not ask for it."
            return Due(label, request, CollectiveTimeout(missing, reason))
        off = disagreement(label, entry.requests)
        if off is not None:
            return Due(label, request, MismatchError(*off))
        if self._joined and request.kind not in JOINABLE:
            reason = (
                f"{label!r}: no {request.kind} while rank(s) {_listed(sorted(self._joined))} have joined."
            )
            return Due(label, request, MismatchError(tuple(self._joined), reason))
        return Due(label, request)

    def _stuck(self) -> list[Due]:
        """The error where nobody can go on: each rank waits for an operation that others will not ask for."""
        waits = "; ".join(
            f"{label!r} for rank(s) {_listed(missing)}" for label, missing in self.undecided.items()
        )
        ranks = sorted({rank for missing in self.undecided.values() for rank in missing})
        reason = f"the ranks wait for different operations: {waits}."
        return [
            Due(label, entry.requests[min(entry.requests)], MismatchError(ranks, reason))
            for label, entry in self._table.items()
        ]

    def _all_joined(self) -> int | None:
        if len(self._joined) < self._size:
            return None
        # Steps are taken beside the rounds: of ranks that joined at about the same time, the one with most was last.
        last = max(reversed(self._joined), key=lambda rank: self._joined[rank])
        self._joined.clear()
        # Ranks that joined early asked for fewer than others.
        for counts in self._unnamed.values():
            counts.clear()
        return last


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
