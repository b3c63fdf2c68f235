"""Which members are named for keeping others waiting, by heartbeats alone."""

from __future__ import annotations

import pytest

from spark_elastic.protocol.driver.stall import Stall, find_stalls
from spark_elastic.protocol.messages import Heartbeat
from spark_elastic.protocol.types import Fence, Member, SlotId, WorkerId, World

NOW, AFTER = 100.0, 3.0


def member(rank: int) -> Member:
    return Member(WorkerId(f"{rank}-0.1"), SlotId(f"{rank}-0"), f"host-{rank}", rank, 0, 1, rank, 3, None)


WORLD = World(Fence(1, 1), (member(0), member(1), member(2)), None, "start")
Sign = tuple[str, bool, float]
WAITING: Sign = ("S", True, 4.0)


def find(
    *signs: Sign | None, began: float = 0.0, at: float = NOW - 0.5, ended_at: float | None = None
) -> tuple[Stall, ...]:
    """signs: (state, waits, seconds) of each rank's newest heartbeat."""
    heartbeats = {
        f"{rank}-0": (at, Heartbeat(SlotId(f"{rank}-0"), WorkerId(f"{rank}-0.1"), *sign, "f (a.py:1)"))
        for rank, sign in enumerate(signs)
        if sign is not None
    }
    return find_stalls(WORLD, heartbeats, NOW, AFTER, began, 1.0, ended_at)


@pytest.mark.parametrize(
    ("sign", "how"),
    [
        (("T", False, 4.0), "its process is stopped (T), last seen in f (a.py:1)"),
        (("T", True, 4.0), "its process is stopped (T)"),  # in the middle of an exchange
        (("R", False, 4.0), "its process runs (R), last seen in f (a.py:1)"),
        (("D", False, 4.0), "its process waits for a device (D)"),
        (("I", False, 4.0), "its process is in state I"),
        (None, "its slot has been silent for 100.0 s"),
    ],
)
def test_the_member_that_the_others_wait_for_is_named(sign: Sign | None, how: str) -> None:
    (stall,) = find(WAITING, sign, WAITING)
    assert stall.text.startswith("rank 1 (worker 1-0.1, host host-1) has kept others waiting for 4.0 s: ")
    assert how in stall.text


def test_a_member_that_works_on_in_a_world_that_is_over_is_named_although_no_member_waits() -> None:
    signs: tuple[Sign | None, ...] = (("S", False, 50.0), None, ("Z", False, 50.0))
    assert not find(*signs)
    assert not find(*signs, ended_at=NOW - 2.9)
    (stall,) = find(*signs, ended_at=NOW - 4.0)
    assert stall.text.startswith(
        "rank 0 (worker 0-0.1, host host-0) has kept others waiting for 4.0 s: its process"
    )


WORKS: Sign = ("R", False, 50.0)


@pytest.mark.parametrize(
    ("signs", "when", "named"),
    [
        ((("T", False, 9.0), WAITING, ("R", False, 4.0)), {}, [0, 2]),
        ((("S", True, 2.9), WORKS, ("S", True, 2.9)), {}, []),  # none has waited for long
        ((WORKS, WORKS, WORKS), {}, []),
        ((WAITING, WORKS, ("R", False, 0.2)), {}, [1]),  # one has just begun to work
        ((WAITING, WAITING, WAITING), {}, []),
        (
            (("S", True, 60.0), ("R", False, 2.0), ("S", True, 60.0)),
            {"began": NOW - 2.0},
            [],
        ),  # before the world
        ((("T", True, 60.0), WORKS, WORKS), {}, []),  # a stopped member does not wait
        ((WAITING, WAITING, WAITING), {"at": NOW - 30.0}, []),  # nor one of a silent slot
    ],
)
def test_members_that_others_have_long_waited_for_are_named(
    signs: tuple[Sign, ...], when: dict[str, float], named: list[int]
) -> None:
    assert [stall.member.rank for stall in find(*signs, **when)] == named


def test_heartbeats_about_an_earlier_worker_do_not_count() -> None:
    heartbeats = {
        f"{rank}-0": (NOW, Heartbeat(SlotId(f"{rank}-0"), WorkerId(f"{rank}-0.1"), *WAITING))
        for rank in range(3)
    }
    heartbeats["1-0"] = (NOW, Heartbeat(SlotId("1-0"), WorkerId("1-0.0"), "R", False, 50.0, "f (a.py:1)"))
    assert not find_stalls(WORLD, heartbeats, NOW, AFTER, 0.0, 1.0)
