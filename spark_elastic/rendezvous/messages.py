"""The messages that the rendezvous server answers by itself, and how all messages travel.

The path of a message is its class name, and the class of its reply is the parameter of its `DriverRequest` base class.
Nothing here knows HTTP, JSON or threads.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from spark_elastic.protocol.messages import (
    Acknowledged,
    DriverMessage,
    DriverRequest,
    SlotRequest,
    WorkerRequest,
)
from spark_elastic.protocol.types import INITIAL_VERSION, Fence, MembershipVersion, WorkerId

VERSION = 9  # of the wire format; client and server must have the same
MAX_BODY_BYTES = 8 << 20  # of a request
MAX_ANSWER_BYTES = 512 << 20  # all values of the key-value store
MAX_POLL_SECONDS = 20.0  # for which the server holds a long poll

R = TypeVar("R")


class DriverClient(Protocol):
    """What slots and workers need of `rendezvous.client.RendezvousClient`."""

    def ask(self, request: DriverRequest[R], hold: float = 0.0, within: float | None = None) -> R: ...

    def now(self) -> float: ...

    def last_answered_at(self) -> float: ...


# ---- slots


@dataclass(frozen=True)
class WorkerToStop:
    """A worker that its slot must end."""

    worker: WorkerId  # one of the slot, which may have ended by now
    reason: str  # Why; the server also tells it to the worker itself
    kill: bool = False  # the slot kills it without asking


@dataclass(frozen=True)
class SlotCommands:
    """What a slot must do."""

    # Number of commands that the slot knows now. It sends it with its next request, so that none is lost or repeated.
    seen: int
    workers_to_stop: tuple[WorkerToStop, ...] = ()  # by those commands, in the order in which they were given
    release: str | None = None  # why the slot must end its worker and return; None: it stays


@dataclass(frozen=True)
class WatchSlot(SlotRequest[SlotCommands]):
    """Waits for commands after the first `seen` ones (long poll)."""

    seen: int = 0  # as the newest reply has it; 0 before the first


@dataclass(frozen=True)
class LogLines(SlotRequest[Acknowledged]):
    """Output of a worker."""

    worker: WorkerId | None  # None: of a spare
    rank: int | None  # None before its first world
    lines: tuple[str, ...]  # without their line ends


# ---- workers


@dataclass(frozen=True)
class WorkerUpdate:
    """What a worker must know at once."""

    version: MembershipVersion = INITIAL_VERSION  # the newest membership version
    ended_fence: Fence | None = None  # the fence of the newest world that is over; None: none is yet
    end_reason: str = ""  # why that world is over; "" if none is, or of a large one: the driver's log has it
    stop: str | None = None  # why the worker must end; None: it continues


@dataclass(frozen=True)
class WatchWorker(WorkerRequest[WorkerUpdate]):
    """Waits until the version differs, a world after `ended_fence` is over, or the worker must stop (long poll). It
    says what the worker received last, so it cannot miss a world that begins while the poll is open."""

    ended_fence: Fence | None = None  # of the newest world that the worker knows to be over; None: none yet
    version: MembershipVersion = INITIAL_VERSION  # the newest membership version that it knows


@dataclass(frozen=True)
class Report(WorkerRequest[Acknowledged]):
    """Progress for people. Some reports may be lost."""

    numbers: dict[str, Any]  # by name; NaN and infinity as text, see `codec.encode_numbers`


@dataclass(frozen=True)
class Addresses:
    """Answers `FindAddresses`."""

    addresses: tuple[str, ...]  # in the order of its ranks; "" of one that has asked for no world yet


@dataclass(frozen=True)
class FindAddresses(WorkerRequest[Addresses]):
    """Asks where peers reach some members of the sender's world; waits until all of these are known (long poll)."""

    fence: Fence  # of that world; refused unless that is the newest and not over
    ranks: tuple[int, ...]  # of these members


# ---- the key-value store


@dataclass(frozen=True)
class Values:
    """Answers `GetValues` and `SetValues`."""

    values: tuple[bytes | None, ...] = ()  # in the order of the keys, None where one has no value


@dataclass(frozen=True)
class SetValues(DriverRequest[Values]):
    """Stores values[i] under keys[i] of a scope."""

    scope: str  # a generation's, open while its world is, or any other, which the first write opens
    keys: tuple[str, ...]  # names within the scope, one for each value
    values: tuple[bytes, ...]  # replace those that the keys had before


@dataclass(frozen=True)
class GetValues(DriverRequest[Values]):
    """Reads keys of a scope."""

    scope: str  # as in `SetValues`; one that nobody has written is empty
    keys: tuple[str, ...]  # of values that may not be there (yet)
    wait: bool = False  # wait until all of them have a value (long poll)


@dataclass(frozen=True)
class Keys:
    """Answers `ListKeys`."""

    keys: tuple[str, ...] = ()  # in the order in which they were first written


@dataclass(frozen=True)
class ListKeys(DriverRequest[Keys]):
    """Lists the keys of a scope that have a value."""

    scope: str  # as in `GetValues`
    prefix: str = ""  # the beginning of those that are listed


@dataclass(frozen=True)
class Comparison:
    """Answers a `CompareAndSet`."""

    changed: bool  # whether the key had the expected value and was changed
    value: bytes | None = None  # what it has now; None: nothing


@dataclass(frozen=True)
class CompareAndSet(DriverRequest[Comparison]):
    """Changes a key of a scope in one step, if it has the expected value."""

    scope: str  # as in `SetValues`
    key: str  # the one that changes
    expected: bytes | None  # None: the key has no value
    desired: bytes | None  # None: remove the key
    token: str  # of a request that is sent again, which gets the first one's reply


REQUESTS: tuple[type[DriverRequest[Any]], ...] = (
    *typing.get_args(DriverMessage),
    WatchSlot,
    LogLines,
    WatchWorker,
    Report,
    FindAddresses,
    SetValues,
    GetValues,
    ListKeys,
    CompareAndSet,
)


def path_of(request: type[DriverRequest[Any]]) -> str:
    return f"/rendezvous/{request.__name__}"


def reply_of(request: type[DriverRequest[R]]) -> type[R]:
    (reply,) = typing.get_args(request.__orig_bases__[0])  # type: ignore[attr-defined]
    return typing.cast("type[R]", reply)
