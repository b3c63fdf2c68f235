from __future__ import annotations

import pytest

from spark_elastic.protocol.driver.forming import choose_members, format_names
from spark_elastic.protocol.driver.state import WorkerRecord
from spark_elastic.protocol.types import Limits
from tests.unit.protocol.driver_bench import at


def _workers(spec: str) -> list[WorkerRecord]:
    """ "A5 b5": A at step 5, b the same but draining; "N": a newcomer."""
    return [
        WorkerRecord(
            word[0],
            f"s{word[0]}",
            "h",
            0.0,
            position=at(int(word[1:])) if word[1:] else None,
            draining="asked" if word[0].islower() else "",
        )
        for word in spec.split()
    ]


@pytest.mark.parametrize(
    ("survivors", "newcomers", "least", "most", "chosen"),
    [
        ("A5 B5", "N O", 1, 4, "ABNO"),
        ("A5 B5", "N O P", 1, 4, "ABNO"),  # no more than fit
        ("A5 B5 C5", "", 1, 3, "ABC"),
        ("A5 b5", "", 1, 4, "A"),  # who drains leaves
        ("A5 b5", "", 2, 4, "Ab"),  # unless it is needed
        ("A5 b5", "N", 2, 4, "AN"),
        ("a5", "", 1, 4, "a"),  # no worker could take its state
        ("a5", "N", 1, 4, "aN"),  # it hands its state on first
        ("a5 b5", "N O", 1, 2, "aN"),  # and makes room
        ("a5 B4", "", 1, 4, "aB"),  # the newest state is kept
        ("A5 b5 C5", "N", 1, 3, "ACN"),  # order of rank
        ("A5", "N", 1, 1, "A"),
    ],
)
def test_members_are_survivors_then_newcomers(
    survivors: str, newcomers: str, least: int, most: int, chosen: str
) -> None:
    limits = Limits(num_workers=most, min_workers=least, max_workers=most)
    found = choose_members(_workers(survivors), _workers(newcomers), limits)
    assert "".join(worker.worker for worker in found) == chosen


def test_r08_a_world_is_no_larger_than_its_batch() -> None:
    limits = Limits(num_workers=4, min_workers=1, max_workers=4, max_global_batch=2)
    assert len(choose_members([], _workers("N O P"), limits)) == 2


def test_long_lists_of_names_are_shortened() -> None:
    assert format_names(["a", "b"]) == "a, b"
    assert format_names([str(i) for i in range(10)], most=2) == "0, 1 and 8 more"
