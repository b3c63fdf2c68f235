from __future__ import annotations

from dataclasses import replace

import pytest

from spark_elastic.protocol import commands as do
from spark_elastic.protocol import events as on
from spark_elastic.protocol import worker_machine
from spark_elastic.protocol.messages import RequestNextWorld, WorkerRaised
from spark_elastic.protocol.types import DRIVER_SILENT_EXIT_CODE, START, Fence, Position, World, WorldView
from tests.unit.protocol.driver_bench import at, make_world

ME = "a"


def _world(generation: int, **positions: Position | None) -> WorldView:
    """As this worker is told it, or, if it is no member, another one."""
    return make_world(generation, positions).view_of(ME if ME in positions else next(iter(positions)))


class MachineUnderTest:
    def __init__(self) -> None:
        self.state = worker_machine.WorkerState(ME)

    def on(self, event: on.WorkerEvent) -> list[type[do.WorkerCommand]]:
        self.state, self.commands = worker_machine.step(self.state, event)
        return [type(command) for command in self.commands]

    def start_running(self, step: int = 5) -> MachineUnderTest:
        """In world 1 with b, at that step."""
        self.on(on.Warm(0))
        self.on(on.WorldReceived(0, _world(1, a=None, b=None)))
        self.on(on.GroupFormed(0, Fence(1, 1)))
        self.on(on.Applied(0, Fence(1, 1), at(step)))
        return self


def test_a_member_at_the_sources_position_sends_state_and_keeps_its_position() -> None:
    me = MachineUnderTest().start_running(step=5)
    me.on(on.GroupBroken(0, Fence(1, 1), (), "reset"))
    me.on(on.WorldReceived(0, _world(2, a=at(5), c=None)))
    assert me.on(on.GroupFormed(0, Fence(1, 2))) == [do.Sync]
    assert me.on(on.Synced(0, Fence(1, 2), at(5))) == [do.Run]


def test_r06_at_a_boundary_the_group_stays_open_until_the_next_world() -> None:
    """A slower peer may still read the step's last bytes from it."""
    me = MachineUnderTest().start_running(step=5)
    assert me.on(on.Boundary(0, Fence(1, 1), "the membership changes")) == [do.Ask]
    asks = RequestNextWorld(ME, Fence(1, 1), at(5), reason="the membership changes", planned=True)
    assert me.commands[0].message == asks
    assert me.on(on.WorldReceived(0, _world(2, a=at(5), c=None))) == [do.CloseGroup, do.Form]
    assert isinstance(me.commands[0], do.CloseGroup)
    assert me.commands[0].fence == Fence(1, 1)


@pytest.mark.parametrize(
    ("fence", "commands"),
    [(Fence(1, 0), []), (Fence(1, 1), [do.AbortGroup]), (Fence(1, 2), []), (Fence(0, 9), [])],
)
def test_r10_an_abort_is_for_its_own_world(fence: Fence, commands: list[type]) -> None:
    assert MachineUnderTest().start_running().on(on.AbortReceived(0, fence, "over")) == commands


def test_r10_a_newer_abort_is_kept_for_its_world() -> None:
    me = MachineUnderTest().start_running(step=5)
    me.on(on.GroupBroken(0, Fence(1, 1), (), "reset"))
    assert me.on(on.AbortReceived(0, Fence(1, 2), "over")) == []
    assert me.on(on.WorldReceived(0, _world(2, a=at(5), b=at(5)))) == [do.Ask]
    assert me.commands[0].message.fence == Fence(1, 2)


def test_a_worker_leaves_a_world_that_ends_before_it_is_formed() -> None:
    me = MachineUnderTest().start_running(step=5)
    me.on(on.GroupBroken(0, Fence(1, 1), (), "reset"))
    me.on(on.WorldReceived(0, _world(2, a=at(5), b=at(5))))
    assert me.on(on.AbortReceived(0, Fence(1, 2), "over")) == [do.AbortGroup]
    assert me.on(on.GroupFormed(0, Fence(1, 2))) == [do.CloseGroup, do.Ask]


@pytest.mark.parametrize(
    ("world", "asks"),
    [
        (_world(0, a=None, b=None), Fence(1, 1)),  # an older one
        (_world(1, a=None, b=None), Fence(1, 1)),
        (_world(2, a=at(4), b=at(4)), Fence(1, 2)),  # one at a position that it does not hold
    ],
)
def test_a_worker_joins_again_if_it_gets_a_world_that_is_not_its_next(world: World, asks: Fence) -> None:
    me = MachineUnderTest().start_running(step=5)
    me.on(on.GroupBroken(0, Fence(1, 1), (), "reset"))
    assert me.on(on.WorldReceived(0, world)) == [do.Ask]
    assert (me.commands[0].message.fence, me.commands[0].message.position) == (asks, at(5))


def test_a_worker_ends_if_the_world_does_not_contain_it() -> None:
    me = MachineUnderTest()
    me.on(on.Warm(0))
    assert me.on(on.WorldReceived(0, _world(4, b=at(1)))) == [do.Exit]


def test_r13_an_exception_is_reported_before_the_group_closes() -> None:
    me = MachineUnderTest().start_running(step=5)
    assert me.on(on.UserRaised(0, "f", "Traceback")) == [do.Report, do.CloseGroup, do.Exit]
    assert me.commands[0].message == WorkerRaised(ME, Fence(1, 1), at(5), "f", "Traceback")
    assert me.commands[2] == do.Exit(me.commands[2].reason, 1)
    assert me.on(on.GroupBroken(0, Fence(1, 1), (), "reset")) == [do.Exit]


def test_r15_a_finished_worker_waits_and_can_take_part_again() -> None:
    me = MachineUnderTest().start_running(step=5)
    assert me.on(on.Finished(0, Fence(1, 1), "42")) == [do.Ask]
    assert me.on(on.WorldReceived(0, _world(1, a=None, b=None))) == [do.Ask]  # a late copy: it asks again
    assert me.on(on.WorldReceived(0, _world(2, a=at(5), c=at(5)))) == [do.CloseGroup, do.Form]


def test_r15_a_newcomer_that_returned_without_a_state_holds_the_position_that_it_reported() -> None:
    me = MachineUnderTest()
    me.on(on.Warm(0))
    me.on(on.WorldReceived(0, _world(2, b=START, a=None)))
    me.on(on.GroupFormed(0, Fence(1, 2)))
    me.on(on.Synced(0, Fence(1, 2), None))
    assert me.on(on.Finished(0, Fence(1, 2), "42")) == [do.Ask]
    assert me.commands[0].message.position == START
    assert me.on(on.WorldReceived(0, _world(3, a=START))) == [do.CloseGroup, do.Form]


@pytest.mark.parametrize(
    ("event", "code"), [(on.StopReceived(0, "done"), 0), (on.DriverSilent(0, 61.0), DRIVER_SILENT_EXIT_CODE)]
)
def test_r12_a_worker_ends_on_a_stop_or_a_silent_driver(event: on.WorkerEvent, code: int) -> None:
    me = MachineUnderTest().start_running()
    assert me.on(event) == [do.AbortGroup, do.Exit]
    assert me.commands[1] == do.Exit(me.commands[1].reason, code)
    assert me.on(on.Applied(0, Fence(1, 1), at(6))) == [do.Exit]


def test_events_of_another_world_are_ignored() -> None:
    me = MachineUnderTest().start_running(step=5)
    before = me.state
    for event in (
        on.GroupFormed(0, Fence(1, 0)),
        on.Applied(0, Fence(1, 0), at(9)),
        on.Boundary(0, Fence(1, 2), ""),
        on.GroupBroken(0, Fence(1, 0), (), ""),
        on.Finished(0, Fence(1, 0), ""),
        on.WorldReceived(0, _world(2, a=None)),
    ):
        assert me.on(event) == []
        assert me.state == replace(before)
