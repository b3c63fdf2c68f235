"""The order in which ranks carry out negotiated operations: one state machine on every rank, fed with all messages.

In each round every rank sends what it newly requests. An operation is ready once every rank that has not joined has
requested it; operations that become ready in the same round run in the order in which they were first requested, lower
ranks first. The machine has no clock and no thread.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, Literal

from elastic_collectives import CollectiveError, MismatchError, RequestTimeout

Kind = Literal["allreduce", "allgather", "broadcast", "alltoall", "reducescatter", "barrier", "join"]
JOINABLE = ("allreduce", "barrier")  # a rank that has joined can take part in these


@dataclass(frozen=True)
class OperationRequest:
    """One operation on one or more arrays: everything in which the ranks must agree."""

    kind: Kind
    name: str | None = None  # None: the next of this rank's unnamed operations of this kind
    dtypes: tuple[str, ...] = ()  # of each array: numpy's names, and bfloat16
    # Of each array; -1: a first dimension that may differ between ranks.
    shapes: tuple[tuple[int, ...], ...] = ()
    op: str = ""  # of a reduction: the engine's name
    scale: tuple[float, float] = (1.0, 1.0)  # factors before and after a reduction
    compression: str | None = None  # None, "fp16" or "bf16"
    root: int = 0  # of a broadcast: rank within the process set


def find_mismatch(label: str, requests: Mapping[int, OperationRequest]) -> tuple[tuple[int, ...], str] | None:
    """Return (ranks whose request differs from the first one, a sentence); None: all are equal."""
    first, *others = sorted(requests)
    expected = requests[first]
    off = tuple(rank for rank in others if requests[rank] is not expected and requests[rank] != expected)
    if not off:
        return None
    differing = requests[off[0]]
    for what in ("kind", "dtypes", "shapes", "op", "scale", "compression", "root"):
        one, other = getattr(expected, what), getattr(differing, what)
        if one != other:
            who = f"rank{'s' if len(off) > 1 else ''} {', '.join(map(str, off))}"
            return (
                off,
                f"{label!r}: rank {first} has {what} {_format_value(one)}, {who} {_format_value(other)}.",
            )
    raise AssertionError(f"{expected} and {differing} differ in nothing")


def _format_value(value: object) -> str:
    return str(value[0]) if isinstance(value, tuple) and len(value) == 1 else str(value)


CAPACITY = 4096  # requests in the cache


@dataclass(frozen=True)
class Message:
    """What a rank sends in a round: a request, an operation that waited too long, or its join."""

    request: OperationRequest | None = None  # None: it is one of the others
    expired: str | None = None  # the label of the operation; None, with no request either: it is a join
    joined: int = 0  # of a join: the steps that the rank took before it


class RequestCache:
    """Encodes requests that were sent before as numbers, as Horovod's response cache does. All ranks decode all
    messages, so that they number the same requests alike, and clear their caches together."""

    def __init__(self) -> None:
        self._numbers: dict[OperationRequest, int] = {}
        self._requests: list[OperationRequest] = []

    def encode(self, messages: Sequence[Message]) -> bytes:
        return json.dumps(list(map(self._pack, messages)), separators=(",", ":")).encode()

    def _pack(self, message: Message) -> object:
        if message.request is not None:
            number = self._numbers.get(message.request)
            return astuple(message.request) if number is None else number
        return {"joined": message.joined} if message.expired is None else {"expired": message.expired}

    def decode(self, texts: Sequence[bytes]) -> list[list[Message]]:
        """Return each rank's messages of one round, and add their new requests to the cache."""
        by_rank = [list(map(self._unpack, json.loads(text))) for text in texts]
        for request in (message.request for messages in by_rank for message in messages):
            if request is not None and request not in self._numbers:
                self._numbers[request] = len(self._requests)
                self._requests.append(request)
        if len(self._requests) > CAPACITY:
            self._numbers.clear()
            self._requests.clear()
        return by_rank

    def _unpack(self, packed: Any) -> Message:
        if isinstance(packed, int):
            return Message(self._requests[packed])
        if isinstance(packed, dict):
            return Message(**packed)
        kind, name, dtypes, shapes, op, scale, *rest = packed
        shapes, scale = tuple(map(tuple, shapes)), (scale[0], scale[1])
        return Message(OperationRequest(kind, name, tuple(dtypes), shapes, op, scale, *rest))


@dataclass(frozen=True)
class Response:
    """An operation that every rank carries out now, or gives up."""

    label: str  # names the operation, alike on all ranks
    request: OperationRequest  # of the lowest rank that has requested it
    error: CollectiveError | None = None  # not None: every rank gives it up with this error


@dataclass(frozen=True)
class RoundResult:
    responses: tuple[Response, ...]  # in the order in which to carry them out
    announced: tuple[str, ...]  # labels of the requests that this rank announced in the round, in their order
    # Once all ranks have joined, which ends the join: the one that joined last.
    last_joined: int | None = None


@dataclass
class _PendingOperation:
    requests: dict[int, OperationRequest] = field(default_factory=dict)  # by rank
    expired: bool = False  # a rank has waited for it too long


class Negotiation:
    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size
        self._cache = RequestCache()
        self._pending: dict[str, _PendingOperation] = {}  # by label, in the order of the first request
        self._unnamed_counts: dict[int, Counter[str]] = {other: Counter() for other in range(size)}
        # Rank -> the steps it took before it joined, in the order of joining.
        self._joined: dict[int, int] = {}

    @property
    def pending(self) -> dict[str, tuple[int, ...]]:
        """By operation that some rank has requested, the ranks that have not requested it."""
        return {label: self._find_missing_ranks(entry) for label, entry in self._pending.items()}

    @property
    def all_ranks_wait(self) -> bool:
        """Whether each rank has joined or requested something pending, so that only a new request makes progress."""
        waiting = {rank for entry in self._pending.values() for rank in entry.requests}
        return len(waiting | set(self._joined)) == self._size

    def encode(self, messages: Sequence[Message]) -> bytes:
        return self._cache.encode(messages)

    def process(self, texts: Sequence[bytes], deadlocked: bool = False) -> RoundResult:
        """texts: what each rank sent, in rank order. deadlocked: all ranks have been waiting for long, so that pending
        operations fail unless one is ready."""
        announced: list[str] = []
        for rank, messages in enumerate(self._cache.decode(texts)):
            for message in messages:
                label = self._apply(rank, message)
                if label is not None and rank == self._rank:
                    announced.append(label)
        ready = [label for label, e in self._pending.items() if e.expired or not self._find_missing_ranks(e)]
        responses = [self._make_response(label) for label in ready]
        if deadlocked and not responses:
            responses = self._make_deadlock_responses()
        for response in responses:
            del self._pending[response.label]
        return RoundResult(tuple(responses), tuple(announced), self._finish_join())

    def _apply(self, rank: int, message: Message) -> str | None:
        """Returns the label of the operation that the message requests, if it requests one."""
        if message.expired is not None:
            if message.expired in self._pending:
                self._pending[message.expired].expired = True
        elif message.request is None:
            self._joined[rank] = message.joined
        else:
            label = message.request.name or self._label_unnamed(rank, message.request.kind)
            self._pending.setdefault(label, _PendingOperation()).requests[rank] = message.request
            return label
        return None

    def _label_unnamed(self, rank: int, kind: str) -> str:
        self._unnamed_counts[rank][kind] += 1
        return f"{kind}.noname.{self._unnamed_counts[rank][kind]}"

    def _find_missing_ranks(self, entry: _PendingOperation) -> tuple[int, ...]:
        there = entry.requests.keys() | self._joined.keys()
        return tuple(rank for rank in range(self._size) if rank not in there)

    def _make_response(self, label: str) -> Response:
        entry = self._pending[label]
        request = entry.requests[min(entry.requests)]
        missing = self._find_missing_ranks(entry)
        if missing:
            reason = (
                f"{label!r} waited too long for rank(s) {_format_ranks(missing)}, which did not request it."
            )
            return Response(label, request, RequestTimeout(missing, reason))
        off = find_mismatch(label, entry.requests)
        if off is not None:
            return Response(label, request, MismatchError(*off))
        if self._joined and request.kind not in JOINABLE:
            reason = f"{label!r}: no {request.kind} while rank(s) {_format_ranks(sorted(self._joined))} have joined."
            return Response(label, request, MismatchError(tuple(self._joined), reason))
        return Response(label, request)

    def _make_deadlock_responses(self) -> list[Response]:
        """Every pending operation fails: each rank waits for one that the others do not request."""
        waits = "; ".join(
            f"rank(s) {_format_ranks(sorted(entry.requests))} for {label!r}, which rank(s) "
            f"{_format_ranks(self._find_missing_ranks(entry))} did not request"
            for label, entry in self._pending.items()
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
        # Ranks take steps outside of the rounds: of ranks that joined in one round, the one with most steps was last.
        last = max(reversed(self._joined), key=lambda rank: self._joined[rank])
        self._joined.clear()
        # Ranks that joined early have requested fewer unnamed operations than the others.
        for counts in self._unnamed_counts.values():
            counts.clear()
        return last


def _format_ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
