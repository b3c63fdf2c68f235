"""The messages that the rendezvous server answers by itself, and how all messages travel.

Messages that the driver machine consumes are in `protocol.messages`. The path of a message is its class name, and the
class of its reply is the parameter of its `Request` base class. Nothing here knows HTTP, JSON or threads.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from spark_elastic.protocol.messages import Acknowledged, DriverMessage, Request, SlotRequest, WorkerRequest
from spark_elastic.protocol.types import INITIAL_VERSION, Fence, MembershipVersion, WorkerId

VERSION = 5  # of the wire format; client and server must have the same
# Begins a log line that a slot itself writes; the driver always logs such lines.
SLOT_LINE_PREFIX = "spark_elastic: "
MAX_BODY_BYTES = 8 << 20  # of a request
MAX_POLL_SECONDS = 20.0  # for which the server holds a long poll

R = TypeVar("R")


class DriverClient(Protocol):
    """What slots and workers need of `rendezvous.client.RendezvousClient`."""

    def ask(self, request: Request[R], hold: float = 0.0, within: float | None = None) -> R: ...

    def now(self) -> float: ...

    def last_answered_at(self) -> float: ...


# ---- slots


@dataclass(frozen=True)
class WorkerToStop:
    """A worker that its slot must end."""

    # One of the slot, which may have ended by now.
    worker: WorkerId
    # Why; the server also tells it to the worker itself.
    reason: str
    # The slot kills it without asking.
    kill: bool = False


@dataclass(frozen=True)
class SlotCommands:
    """What a slot must do."""

    # Number of commands that the slot knows now. It sends it with its next request, so that none is lost or repeated.
    seen: int
    # By those commands, in the order in which they were given.
    workers_to_stop: tuple[WorkerToStop, ...] = ()
    # Why the slot must end its worker and return; None: it stays.
    release: str | None = None


@dataclass(frozen=True)
class WatchSlot(SlotRequest[SlotCommands]):
    """Waits for commands after the first `seen` ones (long poll)."""

    # As the newest reply has it; 0 before the first.
    seen: int = 0


@dataclass(frozen=True)
class LogLines(SlotRequest[Acknowledged]):
    """Output of a worker."""

    # None: of a spare.
    worker: WorkerId | None
    # None before its first world.
    rank: int | None
    # Without their line ends.
    lines: tuple[str, ...]


# ---- workers


@dataclass(frozen=True)
class WorkerUpdate:
    """What a worker must know at once."""

    # The newest membership version.
    version: MembershipVersion
    # The fence of the newest world that is over; None: none is yet.
    ended_fence: Fence | None = None
    # Why that world is over; "" if none is.
    end_reason: str = ""
    # Why the worker must end; None: it continues.
    stop: str | None = None


@dataclass(frozen=True)
class WatchWorker(WorkerRequest[WorkerUpdate]):
    """Waits until the version differs, a world after `ended_fence` is over, or the worker must stop (long poll).

    The request says what the worker received last, not which world it is in. It therefore cannot miss a world that
    begins while the poll is open.
    """

    # Of the newest world that the worker knows to be over; None: none yet.
    ended_fence: Fence | None = None
    # The newest membership version that it knows.
    version: MembershipVersion = INITIAL_VERSION


@dataclass(frozen=True)
class Report(WorkerRequest[Acknowledged]):
    """Progress for people. Some reports may be lost."""

    # A few numbers by name. JSON has no NaN and no infinity: they travel as text (see `codec.encode_numbers`).
    numbers: dict[str, Any]


@dataclass(frozen=True)
class Blobs:
    """Answers an exchange."""

    # One of each rank, in rank order; None while some are missing.
    blobs: tuple[bytes, ...] | None = None
    # Workers that have not sent theirs.
    missing: tuple[WorkerId, ...] = ()


@dataclass(frozen=True)
class ExchangeAddresses(WorkerRequest[Blobs]):
    """Sends the address of `rank`, as bytes, and waits for those of all ranks (long poll)."""

    # Of the world whose members exchange; refused unless that is the newest and not over.
    fence: Fence
    # The sender's in that world.
    rank: int
    # For the peers, opaque to the server.
    blob: bytes
    # A world may have several exchanges.
    name: str = "mesh"


# ---- the key-value store


@dataclass(frozen=True)
class Values:
    """Answers `GetValues` and `SetValues`."""

    # In the order of the requested keys, None where a key has no value; () answers `SetValues`.
    values: tuple[bytes | None, ...] = ()


@dataclass(frozen=True)
class SetValues(Request[Values]):
    """Stores values[i] under keys[i] of a scope."""

    # A generation's, open while its world is, or any other, which the first write opens.
    scope: str
    # Names within the scope, one for each value.
    keys: tuple[str, ...]
    # Replace those that the keys had before.
    values: tuple[bytes, ...]


@dataclass(frozen=True)
class GetValues(Request[Values]):
    """Reads keys of a scope."""

    # As in `SetValues`; one that nobody has written is empty.
    scope: str
    # Of values that may not be there (yet).
    keys: tuple[str, ...]
    # Wait until all of them have a value (long poll).
    wait: bool = False


@dataclass(frozen=True)
class Keys:
    """Answers `ListKeys`."""

    # In the order in which they were first written.
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class ListKeys(Request[Keys]):
    """Lists the keys of a scope that have a value."""

    # As in `GetValues`.
    scope: str
    # The beginning of those that are listed.
    prefix: str = ""


@dataclass(frozen=True)
class Comparison:
    """Answers a `CompareAndSet`."""

    # Whether the key had the expected value and was changed.
    changed: bool
    # What it has now; None: nothing.
    value: bytes | None = None


@dataclass(frozen=True)
class CompareAndSet(Request[Comparison]):
    """Changes a key of a scope in one step, if it has the expected value."""

    # As in `SetValues`.
    scope: str
    # The one that changes.
    key: str
    # None: the key has no value.
    expected: bytes | None
    # None: remove the key.
    desired: bytes | None
    # Unique. A request that is sent again, after a broken connection, gets the first one's reply.
    token: str


REQUESTS: tuple[type[Request[Any]], ...] = (
    *typing.get_args(DriverMessage),
    WatchSlot,
    LogLines,
    WatchWorker,
    Report,
    ExchangeAddresses,
    SetValues,
    GetValues,
    ListKeys,
    CompareAndSet,
)


def path_of(request: type[Request[Any]]) -> str:
    """The path to which the request is posted."""
    return f"/rendezvous/{request.__name__}"


def reply_of(request: type[Request[R]]) -> type[R]:
    """The class of the reply to a request."""
    (reply,) = typing.get_args(request.__orig_bases__[0])  # type: ignore[attr-defined]
    return typing.cast("type[R]", reply)
