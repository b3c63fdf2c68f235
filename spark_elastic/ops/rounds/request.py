"""What a rank asks for in one operation, as far as the ranks must agree on it. Pure; frozen values, any thread."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields

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


def named(label: str, name: str | None) -> str | None:
    """The name of an operation for which a user has this one; labels keep names of different kinds apart."""
    return None if name is None else f"{label}.{name}"


def disagreement(label: str, requests: Mapping[int, Request]) -> tuple[tuple[int, ...], str] | None:
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
            return off, f"{label!r}: rank {first} has {what} {_said(one)}, {who} {_said(other)}."
    raise AssertionError(f"{ours} and {theirs} differ in nothing")


def _said(value: object) -> str:
    return str(value[0]) if isinstance(value, tuple) and len(value) == 1 else str(value)
