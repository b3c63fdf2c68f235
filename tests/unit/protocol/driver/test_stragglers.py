"""A member without which the others are quicker: exchanged for its slot's spare, then for another slot."""

from __future__ import annotations

from spark_elastic.protocol import events as on
from spark_elastic.protocol.commands import AnnounceChange, LaunchSlot
from spark_elastic.protocol.messages import WorkerExited, WorkerStraggles
from spark_elastic.protocol.types import Fence, SlotId, WorkerId
from tests.unit.protocol.driver_bench import Bench, name

ALL = (1, 2, 3, 4)
SPARE = name(2, 2)


def exchange(bench: Bench, straggler: WorkerId, step: int) -> None:
    members = bench.members()
    bench.on(WorkerStraggles(straggler, bench.fence, "it is slow"))
    bench.wait(0.2, heartbeats_of=ALL)
    bench.stop_planned(step, *members)


def let_spare_join(bench: Bench) -> None:
    bench.on(WorkerExited(SlotId("2-0"), name(2), 0))
    bench.restart(SPARE)
    bench.form()
    bench.wait(0.2, heartbeats_of=ALL)
    bench.stop_planned(9, *bench.members())
    bench.form()


def test_a_slot_whose_second_worker_is_a_straggler_too_is_exchanged_and_its_host_cools_down() -> None:
    bench = Bench.running(*ALL)
    exchange(bench, name(2), 6)
    let_spare_join(bench)
    exchange(bench, SPARE, 12)
    assert bench.members() == [name(1), name(3), name(4)]
    assert bench.released == ["2-0"]
    assert bench.state.blacklist.find_host_return("h2", bench.now) is not None
    bench.on(on.LaunchEnded(0, 2, "released"))
    bench.wait(70.0, heartbeats_of=ALL)
    assert len(bench.find_commands(LaunchSlot)) == 5


def test_a_straggler_stays_where_the_world_would_be_too_small_without_it() -> None:
    bench = Bench.running(*ALL, min_workers=4)
    bench.on(WorkerStraggles(name(2), bench.fence, "it is slow"))
    bench.wait(1.0, heartbeats_of=ALL)
    assert not bench.find_commands(AnnounceChange)


def test_a_straggler_of_a_former_world_changes_nothing() -> None:
    bench = Bench.running(*ALL)
    bench.on(WorkerStraggles(name(2), Fence(1, bench.fence.generation - 1), "it was slow"))
    bench.wait(1.0, heartbeats_of=ALL)
    assert not bench.find_commands(AnnounceChange)
