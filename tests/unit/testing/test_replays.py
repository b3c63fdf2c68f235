from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from spark_elastic.driver.journal import Journal
from spark_elastic.errors import InvalidInput
from spark_elastic.protocol import driver_machine
from spark_elastic.protocol.commands import DriverCommand
from spark_elastic.protocol.driver.state import DriverState, JobStage
from spark_elastic.protocol.events import DriverEvent
from spark_elastic.protocol.messages import RequestNextWorld
from spark_elastic.testing import ReplayDiffers, replay
from tests.simulator.fault_plan import FaultKind, random_plan
from tests.simulator.simulation import simulate


def _journal_of(seed: int, path: Path) -> None:
    """A simulated job of one driver, journalled as the driver loop does it."""
    plan = random_plan(seed)
    others = (FaultKind.KILL_DRIVER, FaultKind.TAKE_OVER)
    plan = replace(plan, faults=tuple(fault for fault in plan.faults if fault.kind not in others))
    journal = Journal(str(path))
    journal.begin(*driver_machine.initial(plan.limits, 1))
    numbers = itertools.count(1)

    def step(state: DriverState, event: DriverEvent) -> tuple[DriverState, tuple[DriverCommand, ...]]:
        event = replace(event, id=f"e{next(numbers)}")
        after, commands = driver_machine.step(state, event)
        journal.record(event, commands, after)
        return after, commands

    simulate(plan, step)
    journal.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A journal."""
    _journal_of(63, tmp_path / "journal")
    return tmp_path / "journal"


@pytest.mark.parametrize("seed", range(40, 46))
def test_a_replayed_job_makes_the_same_decisions(seed: int, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    _journal_of(seed, path)
    again = replay(path)
    assert len(again.entries) == len(path.read_text().splitlines()) - 1
    assert again.state.stage is JobStage.ENDED


def test_a_journal_becomes_a_test_that_can_fail(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = replay(path).as_test("test_the_job_of_monday")
    module: dict[str, object] = {}
    exec(compile(source, "pasted", "exec"), module)
    test = module["test_the_job_of_monday"]
    assert callable(test)
    test()
    monkeypatch.setitem(driver_machine.HANDLERS, RequestNextWorld, lambda tx, event: None)
    with pytest.raises(AssertionError):
        test()


def test_a_part_of_a_journal_becomes_a_shorter_test(path: Path) -> None:
    source = replay(path).as_test(entries=10)
    assert source.count("(now=") == 10
    exec(compile(source, "pasted", "exec"), {})


def test_the_first_difference_is_named(path: Path) -> None:
    lines = path.read_text().splitlines()
    number, changed = next(
        (number, json.loads(line)) for number, line in enumerate(lines, 1) if '"AbortWorld"' in line
    )
    changed["commands"] = []
    path.write_text("\n".join([*lines[: number - 1], json.dumps(changed), *lines[number:], ""]))
    with pytest.raises(ReplayDiffers, match=rf"line {number}, at .*: AbortWorld\(.*comes in addition"):
        replay(path)


def test_an_exception_of_the_machine_is_a_difference(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_error(tx: object, event: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setitem(driver_machine.HANDLERS, RequestNextWorld, raise_error)
    with pytest.raises(ReplayDiffers, match="the machine fails at RequestNextWorld"):
        replay(path)


def test_a_torn_last_line_is_left_out(path: Path) -> None:
    whole = len(replay(path).entries)
    path.write_bytes(path.read_bytes()[:-20])
    assert len(replay(path).entries) == whole - 1
    _journal_of(44, path)  # the next driver appends to it
    assert len(replay(path, 0).entries) == whole - 1
    assert replay(path).initial["limits"] == random_plan(44).limits
    with pytest.raises(InvalidInput, match="has 2 jobs, and none has the number 2"):
        replay(path, 2)


def test_a_torn_line_in_the_middle_is_an_error(path: Path) -> None:
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:5], lines[5][:30], *lines[6:]]))
    with pytest.raises(InvalidInput, match="line 6 does not belong to a job"):
        replay(path)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "has 0 jobs"),
        ('{"at": 1}\n', "line 1 does not belong to a job"),
        ('{"journal": 9}\n', "it has format 9, and this release knows 7"),
        ('{"journal": 7, "initial": {"attempt": 1}, "commands": []}\n', "the machine begins from"),
        ("[1]\n", "is not a journal"),
    ],
)
def test_a_file_that_is_no_journal_is_refused_with_a_sentence(text: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=why):
        replay(path)


def test_a_missing_file_is_refused_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"The journal .* cannot be read"):
        replay(tmp_path / "nothing")
