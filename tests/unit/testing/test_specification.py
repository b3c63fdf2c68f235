"""The rules that a journal shows: a decision that breaks one is found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from spark_elastic.protocol import commands as do
from spark_elastic.protocol.events import DriverEvent
from spark_elastic.protocol.types import Member, World
from tests.simulator import server
from tests.simulator.fault_plan import Fault, FaultKind, Moment, scene
from tests.simulator.simulation import simulate
from tests.specification import STATES, RuleBroken, Specification

Entries = list[tuple[DriverEvent, Sequence[do.DriverCommand]]]
FAULTS = (
    Fault(FaultKind.KILL_WORKER, Moment.COMPLETE, nth=9, target=3),
    Fault(FaultKind.KILL_HOST, Moment.APPLIED, nth=40, target=1),
)
STORY = replace(scene(*FAULTS, steps=40), checkpoint_every=3)


@pytest.fixture
def story(monkeypatch: pytest.MonkeyPatch) -> tuple[Entries, set[str]]:
    """What a simulated driver was told and decided, and what it came to."""
    entries: Entries = []
    followed: list[Specification] = []

    class Recorder(Specification):
        def read(self, event: DriverEvent, commands: Sequence[do.DriverCommand]) -> None:
            entries.append((event, commands))
            followed[:] = [self]
            super().read(event, commands)

    monkeypatch.setattr(server, "Specification", Recorder)
    simulate(STORY)
    return entries, followed[0].reached


def in_worlds(
    change: Callable[[World], World], number: int = 2
) -> Callable[[do.DriverCommand], do.DriverCommand]:
    """Changes one of the worlds."""

    def change_command(command: do.DriverCommand) -> do.DriverCommand:
        if isinstance(command, do.PublishWorld) and command.world.fence.generation == number:
            return replace(command, world=change(command.world))
        return command

    return change_command


def in_kind(kind: type, **values: object) -> Callable[[do.DriverCommand], do.DriverCommand]:
    return lambda command: replace(command, **values) if isinstance(command, kind) else command  # type: ignore[arg-type]


def move(member: Member) -> Member:
    assert member.position is not None
    return replace(member, position=replace(member.position, step=99))


def has_several(command: do.DriverCommand) -> bool:
    return isinstance(command, do.PublishCheckpoint) and len(command.checkpoints) > 1


def order(world: World, places: Sequence[int]) -> World:
    members = [replace(world.members[place], rank=rank) for rank, place in enumerate(places)]
    return replace(world, members=tuple(members))


def test_a_story_without_a_broken_rule_comes_to_most_states(story: tuple[Entries, set[str]]) -> None:
    assert set(STATES) - story[1] <= {"survivors differed by a step", "a planned change", "a host was lost"}


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (in_worlds(lambda w: replace(w, fence=replace(w.fence, attempt=9))), "R10 .* another attempt"),
        (in_worlds(lambda w: replace(w, fence=replace(w.fence, generation=5))), "R10 .* grow by one"),
        (in_worlds(lambda w: order(w, [1, 0, *range(2, w.size)])), "R4 .* order has changed"),
        (in_worlds(lambda w: order(w, range(1, w.size))), "R12, R13: .* left out without a reason"),
        (in_worlds(lambda w: replace(w, members=w.members[:1] * 2)), "R4: ranks"),
        (in_worlds(lambda w: order(w, [0]), number=1), "R16 .* too early with too few"),
        (in_worlds(lambda w: replace(w, source=None)), "R4: the state comes from a position that is not"),
        (in_worlds(lambda w: replace(w, members=(move(w.members[0]), *w.members[1:]))), "R4: .* stands at"),
        (in_kind(do.AbortWorld, fence=None), "R10: not the newest world"),
        (
            lambda c: replace(c, checkpoints=c.checkpoints[::-1]) if has_several(c) else c,
            "R18 .* not the first",
        ),
        (in_kind(do.End, outcome=do.JobOutcome.CANCELLED), "R15 .* nobody has cancelled"),
        (in_kind(do.End, outcome=do.JobOutcome.FAILURE_BUDGET), "R13: . failures, of 10"),
    ],
)
def test_a_decision_that_breaks_a_rule_is_found(
    story: tuple[Entries, set[str]], change: Callable[[do.DriverCommand], do.DriverCommand], rule: str
) -> None:
    rules = Specification(STORY.limits, 1, ())

    def read_all() -> None:
        for event, commands in story[0]:
            rules.read(event, [change(command) for command in commands])

    with pytest.raises(RuleBroken, match=rule):
        read_all()


@pytest.mark.parametrize("kind", [do.PublishWorld, do.End])
def test_a_world_or_an_end_that_comes_too_early_is_found(story: tuple[Entries, set[str]], kind: type) -> None:
    entries = story[0]
    rules = Specification(STORY.limits, 1, ())
    decisions = [command for _, commands in entries for command in commands if isinstance(command, kind)]
    begun = next(
        place
        for place, (_, commands) in enumerate(entries)
        if any(isinstance(command, do.PublishWorld) for command in commands)
    )
    for event, commands in entries[: begun + 1]:
        rules.read(event, commands)
    with pytest.raises(RuleBroken, match="R4 .* not left world 1" if kind is do.PublishWorld else "R15"):
        rules.read(entries[begun][0], [decisions[-1] if kind is do.End else decisions[1]])
