"""The order in which ranks carry out what they asked for: the same machine on every rank, fed with what all said.

The order itself needs no clock and no thread. An operation is due once every rank that has not joined asked for it;
operations that are due in the same round go in the order in which they were first asked for, lower ranks first.
"""

from __future__ import annotations

import json
import logging
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields

from elastic_collectives import CollectiveError, CollectiveTimeout, MismatchError

# What a rank asks for in one operation, as far as the ranks must agree on it. Pure; frozen values, any thread.


ALLREDUCE = "allreduce"
ALLGATHER = "allgather"
BROADCAST = "broadcast"
ALLTOALL = "alltoall"
REDUCESCATTER = "reducescatter"
BARRIER = "barrier"
JOINABLE = (ALLREDUCE, BARRIER)  # a rank that has joined can take part


@dataclass(frozen=True)
class Request:
    """One operation on one or more arrays.

    name: None takes the next of the unnamed operations of its kind. shapes: one for each array; -1 stands for a first
    dimension that may differ. dtypes: numpy's names, and bfloat16. scale: factors before and after.
    compression: None, "fp16" or "bf16". root: rank within the channel.
    """

    kind: str
    name: str | None = None
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    op: str = ""
    scale: tuple[float, float] = (1.0, 1.0)
    compression: str | None = None
    root: int = 0

    def to_json(self) -> bytes:
        return json.dumps([getattr(self, field.name) for field in fields(self)]).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Request:
        kind, name, dtypes, shapes, op, scale, compression, root = json.loads(text)
        return cls(
            kind, name, tuple(dtypes), tuple(map(tuple, shapes)), op, (scale[0], scale[1]), compression, root
        )


def qualify_name(label: str, name: str | None) -> str | None:
    """The name of an operation for which a user has this one; labels keep names of different kinds apart."""
    return None if name is None else f"{label}.{name}"


def find_mismatch(label: str, requests: Mapping[int, Request]) -> tuple[tuple[int, ...], str] | None:
    """(ranks that differ from the first, one sentence), or None where all ask for the same."""
    first, *others = sorted(requests)
    wanted = requests[first]
    off = tuple(rank for rank in others if requests[rank] is not wanted and requests[rank] != wanted)
    if not off:
        return None
    ours, theirs = requests[first], requests[off[0]]
    for what in ("kind", "dtypes", "shapes", "op", "scale", "compression", "root"):
        one, other = getattr(ours, what), getattr(theirs, what)
        if one != other:
            who = f"rank{'s' if len(off) > 1 else ''} {', '.join(map(str, off))}"
            return (
                off,
                f"{label!r}: rank {first} has {what} {_format_value(one)}, {who} {_format_value(other)}.",
            )
    raise AssertionError(f"{ours} and {theirs} differ in nothing")


def _format_value(value: object) -> str:
    return str(value[0]) if isinstance(value, tuple) and len(value) == 1 else str(value)


# Requests that were asked for before travel as two bytes: the same numbers on every rank, since all hear all.
#
# Pure; owned by one thread. All ranks learn the same requests in the same order, and forget all of them together.


CAPACITY = 4096
_NEW = 0xFFFF
_EXPIRED = 0xFFFE
_JOIN = 0xFFFD
_NUMBER = struct.Struct("<H")
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class Message:
    """One thing that a rank says in a round: a request, that it has joined (after so many steps), or that an operation
    waited too long."""

    request: Request | None = None
    expired: str | None = None
    joined: int = 0


class RequestCache:
    """Numbers for requests."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._numbers: dict[Request, int] = {}
        self._requests: list[Request] = []

    def encode(self, words: Sequence[Message]) -> bytes:
        return b"".join(map(self._encode_message, words))

    def _encode_message(self, word: Message) -> bytes:
        if word.request is None:
            if word.expired is not None:
                return _encode_text(_EXPIRED, word.expired.encode())
            return _NUMBER.pack(_JOIN) + _LENGTH.pack(word.joined)
        number = self._numbers.get(word.request)
        return _encode_text(_NEW, word.request.to_json()) if number is None else _NUMBER.pack(number)

    def decode(self, texts: Sequence[bytes]) -> list[list[Message]]:
        """What all ranks said in one round; then their new requests are known."""
        said = [list(self._decode_messages(text)) for text in texts]
        for words in said:
            for word in words:
                self._add(word.request)
        if len(self._requests) > self._capacity:
            self._numbers.clear()
            self._requests.clear()
        return said

    def _add(self, request: Request | None) -> None:
        if request is not None and request not in self._numbers:
            self._numbers[request] = len(self._requests)
            self._requests.append(request)

    def _decode_messages(self, text: bytes) -> Iterator[Message]:
        at = 0
        while at < len(text):
            (number,) = _NUMBER.unpack_from(text, at)
            at += _NUMBER.size
            if number < _JOIN:
                yield Message(self._requests[number])
                continue
            (length,) = _LENGTH.unpack_from(text, at)
            at += _LENGTH.size
            if number == _JOIN:
                yield Message(joined=length)
            else:
                told = text[at : at + length]
                at += length
                yield Message(Request.from_json(told)) if number == _NEW else Message(expired=told.decode())


def _encode_text(number: int, text: bytes) -> bytes:
    return _NUMBER.pack(number) + _LENGTH.pack(len(text)) + text


@dataclass(frozen=True)
class Response:
    """An operation to carry out now; `error`: or to give up, on every rank alike."""

    label: str
    request: Request
    error: CollectiveError | None = None


@dataclass(frozen=True)
class RoundResult:
    """What a round came to.

    mine: labels of the requests that this rank has just announced, in their order. last_joined: once all ranks have
    joined, the one that did so last; they are as before they joined.
    """

    responses: tuple[Response, ...]
    announced: tuple[str, ...]
    last_joined: int | None = None


@dataclass
class _PendingOperation:
    requests: dict[int, Request] = field(default_factory=dict)
    expired: bool = False


class Negotiation:
    """One rank's copy of the machine."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._cache = RequestCache()
        self._pending: dict[str, _PendingOperation] = {}
        self._unnamed_counts: dict[int, Counter[str]] = {other: Counter() for other in range(size)}
        self._joined: dict[int, int] = {}  # rank -> after how many steps it joined, in the order of joining

    @property
    def pending(self) -> dict[str, tuple[int, ...]]:
        """Operations that some rank asked for, each with the ranks that have not."""
        return {label: self._missing_ranks(entry) for label, entry in self._pending.items()}

    @property
    def all_ranks_wait(self) -> bool:
        """Each rank has asked for something undecided, or has joined: only something new can bring them on."""
        asked = {rank for entry in self._pending.values() for rank in entry.requests}
        return len(asked | set(self._joined)) == self._size

    def encode(self, words: Sequence[Message]) -> bytes:
        """What this rank says in the next round."""
        return self._cache.encode(words)

    def process(self, said: Sequence[bytes], stuck: bool = False) -> RoundResult:
        """Take in what all ranks said, in rank order. stuck: all of them have been waiting for long."""
        mine: list[str] = []
        for rank, words in enumerate(self._cache.decode(said)):
            for word in words:
                label = self._apply(rank, word)
                if label is not None and rank == self._rank:
                    mine.append(label)
        due = [self._make_response(label) for label, entry in self._pending.items() if self._is_ready(entry)]
        if stuck and not due and self._pending:
            due = self._make_deadlock_responses()
        for done in due:
            del self._pending[done.label]
        last = self._finish_join()
        return RoundResult(tuple(due), tuple(mine), last)

    def _apply(self, rank: int, word: Message) -> str | None:
        if word.expired is not None:
            if word.expired in self._pending:
                self._pending[word.expired].expired = True
        elif word.request is None:
            self._joined[rank] = word.joined
        else:
            label = word.request.name or self._make_label(rank, word.request.kind)
            self._pending.setdefault(label, _PendingOperation()).requests[rank] = word.request
            return label
        return None

    def _make_label(self, rank: int, kind: str) -> str:
        self._unnamed_counts[rank][kind] += 1
        return f"{kind}.noname.{self._unnamed_counts[rank][kind]}"

    def _missing_ranks(self, entry: _PendingOperation) -> tuple[int, ...]:
        return tuple(
            rank for rank in range(self._size) if rank not in entry.requests and rank not in self._joined
        )

    def _is_ready(self, entry: _PendingOperation) -> bool:
        return entry.expired or not self._missing_ranks(entry)

    def _make_response(self, label: str) -> Response:
        entry = self._pending[label]
        request = entry.requests[min(entry.requests)]
        missing = self._missing_ranks(entry)
        if missing:
            reason = (
                f"{label!r} waited too long for rank(s) {_format_ranks(missing)}, which did not ask for it."
            )
            return Response(label, request, CollectiveTimeout(missing, reason))
        off = find_mismatch(label, entry.requests)
        if off is not None:
            return Response(label, request, MismatchError(*off))
        if self._joined and request.kind not in JOINABLE:
            reason = f"{label!r}: no {request.kind} while rank(s) {_format_ranks(sorted(self._joined))} have joined."
            return Response(label, request, MismatchError(tuple(self._joined), reason))
        return Response(label, request)

    def _make_deadlock_responses(self) -> list[Response]:
        """The error where nobody can go on: each rank waits for an operation that others will not ask for."""
        waits = "; ".join(
            f"{label!r} for rank(s) {_format_ranks(missing)}" for label, missing in self.pending.items()
        )
        ranks = sorted({rank for missing in self.pending.values() for rank in missing})
        reason = f"the ranks wait for different operations: {waits}."
        return [
            Response(label, entry.requests[min(entry.requests)], MismatchError(ranks, reason))
            for label, entry in self._pending.items()
        ]

    def _finish_join(self) -> int | None:
        if len(self._joined) < self._size:
            return None
        # Steps are taken beside the rounds: of ranks that joined at about the same time, the one with most was last.
        last = max(reversed(self._joined), key=lambda rank: self._joined[rank])
        self._joined.clear()
        # Ranks that joined early asked for fewer than others.
        for counts in self._unnamed_counts.values():
            counts.clear()
        return last


def _format_ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


# Logs which operation waits for which ranks, once it has waited for long. One thread; the time is a value.


log = logging.getLogger(__name__)


class OperationStallCheck:
    """Warns again after each further `warn_after` seconds. name: of the process set; "" for the whole world. members:
    what its ranks are in the world."""

    def __init__(self, name: str, warn_after: float, members: Sequence[int]) -> None:
        self._where = f" of {name}" if name else ""
        self._warn_after = warn_after
        self._members = members
        self._since: dict[str, float] = {}
        self._warned: dict[str, float] = {}

    def check(self, undecided: Mapping[str, tuple[int, ...]], now: float) -> None:
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
