from __future__ import annotations

import pytest

from spark_elastic.protocol.driver.forming import ChosenWorker, assign_ranks, find_source, group_by_machine
from spark_elastic.protocol.driver.state import WorkerRecord
from spark_elastic.protocol.types import Position
from tests.unit.protocol.driver_bench import at


def _places(hosts: str) -> list[ChosenWorker]:
    return [ChosenWorker(f"w{i}", f"s{i}", host, None) for i, host in enumerate(hosts)]


@pytest.mark.parametrize(
    ("hosts", "local", "cross"),
    [
        ("a", [(0, 1)], [(0, 1)]),
        ("aab", [(0, 2), (1, 2), (0, 1)], [(0, 2), (0, 1), (1, 2)]),
        ("aba", [(0, 2), (0, 1), (1, 2)], [(0, 2), (1, 2), (0, 1)]),
        ("abb", [(0, 1), (0, 2), (1, 2)], [(0, 2), (1, 2), (0, 1)]),
        ("abcabc", [(0, 2)] * 3 + [(1, 2)] * 3, [(0, 3), (1, 3), (2, 3)] * 2),
    ],
)
def test_local_and_cross_ranks_follow_the_machines(
    hosts: str, local: list[tuple[int, int]], cross: list[tuple[int, int]]
) -> None:
    members = assign_ranks(_places(hosts))
    assert [m.rank for m in members] == list(range(len(hosts)))
    assert [(m.local_rank, m.local_size) for m in members] == local
    assert [(m.cross_rank, m.cross_size) for m in members] == cross


def test_executors_of_one_machine_share_its_local_ranks() -> None:
    places = [
        ChosenWorker(f"w{i}", f"s{i}", f"executor {i}", None, machine) for i, machine in enumerate("mmn")
    ]
    members = assign_ranks(places)
    assert [(m.local_rank, m.local_size) for m in members] == [(0, 2), (1, 2), (0, 1)]
    assert [(m.cross_rank, m.cross_size) for m in members] == [(0, 2), (0, 1), (1, 2)]
    assert [m.host for m in members] == ["executor 0", "executor 1", "executor 2"], (
        "shared memory is an executor's"
    )


@pytest.mark.parametrize(
    ("staying", "joining", "ranked"),
    [
        ("", "a1 b1 a2 b2", "a1 a2 b1 b2"),  # the first world
        ("a1 b1", "b2 a2", "a1 a2 b1 b2"),
        ("a1 b1 a2", "a3 b2", "a1 b1 b2 a2 a3"),  # survivors keep their order
        ("b1", "a1 b2 c1 a2", "b1 b2 a1 a2 c1"),  # rank 0 is a survivor
        ("a1 b1", "", "a1 b1"),
    ],
)
def test_newcomers_come_behind_the_members_of_their_machine(staying: str, joining: str, ranked: str) -> None:
    workers = [
        [WorkerRecord(w, f"slot {w}", "h", 0.0) for w in group.split()] for group in (staying, joining)
    ]
    machines = {w.worker: w.worker[0] for group in workers for w in group}
    assert " ".join(w.worker for w in group_by_machine(*workers, machines)) == ranked


@pytest.mark.parametrize(
    ("positions", "source"),
    [
        ([None, None], None),
        ([at(3), at(3), None], 0),
        ([at(3), at(4), at(4)], 1),
        ([None, at(0)], 1),
    ],
)
def test_r04_the_source_is_the_lowest_rank_at_the_highest_position(
    positions: list[Position | None], source: int | None
) -> None:
    assert find_source([ChosenWorker(f"w{i}", f"s{i}", "h", p) for i, p in enumerate(positions)]) == source
