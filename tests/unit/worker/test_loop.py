"""What a worker's loop makes of what its program does."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from spark_elastic.protocol import commands as do
from spark_elastic.protocol import events as on
from spark_elastic.protocol.driver.forming import RankAssignment, assign_ranks
from spark_elastic.protocol.types import Fence, World
from spark_elastic.worker.program import Completed, WorkerExit
from tests.unit.worker.loops import build_loop


def _world(generation: int) -> World:
    return World(
        Fence(1, generation), assign_ranks([RankAssignment("1-0.1", "1-0", "h", None)]), None, "start"
    )


class _Group:
    def __init__(self) -> None:
        self.aborted: list[str] = []
        self.abort = self.aborted.append


def test_r10_an_abort_that_the_control_thread_carries_out_late_spares_the_next_world() -> None:
    """Between its word and its deed the main thread has gone on."""
    loop, groups = build_loop(), [_Group(), _Group()]

    def go_on(generation: int) -> None:
        loop._group, loop._world = groups[generation - 1], _world(generation)  # type: ignore[assignment]

    for event in (on.Warm(0), on.WorldReceived(0, _world(1)), on.GroupFormed(0, Fence(1, 1))):
        loop._post(event)
    go_on(1)
    post = loop._post

    def held_up(event: on.WorkerEvent) -> tuple[do.WorkerCommand, ...]:
        commands = post(event)
        go_on(2)
        return commands

    loop._post = held_up  # type: ignore[method-assign]
    loop.handle_event(on.AbortReceived(0, Fence(1, 1), "world 1 is over"))
    assert groups[1].aborted == []


def test_a_result_that_no_message_takes_ends_the_job_with_a_sentence() -> None:
    """Refused by the server, it would end the process in the middle of its last word."""
    program: Any = SimpleNamespace(run=lambda *world: Completed("x" * 9_000_000))
    loop, world = build_loop(program), _world(1)
    loop._group, loop._world = SimpleNamespace(), world  # type: ignore[assignment]
    event = loop._run_program(do.Run("", world, None))
    assert isinstance(event, on.UserRaised)
    assert "InvalidInput: what training returned takes 8.6 MiB" in event.traceback


@pytest.mark.parametrize("raised", [asyncio.CancelledError, KeyboardInterrupt, GeneratorExit, BaseException])
def test_what_user_code_raises_is_told_whatever_its_class(raised: type[BaseException]) -> None:
    """As a bare exit code it would be tried again until the budget is used up."""

    def run(*world: object) -> Completed:
        raise raised("why")

    loop = build_loop(SimpleNamespace(run=run))
    loop._group, loop._world = SimpleNamespace(), _world(1)  # type: ignore[assignment]
    event = loop._run_program(do.Run("", _world(1), None))
    assert isinstance(event, on.UserRaised)
    assert f"{raised.__name__}: why" in event.traceback


def test_the_end_of_a_function_that_was_in_other_worlds_is_no_exception_of_the_users() -> None:
    def run(*world: object) -> Completed:
        raise WorkerExit(0)

    loop = build_loop(SimpleNamespace(run=run))
    loop._group, loop._world = SimpleNamespace(), _world(1)  # type: ignore[assignment]
    with pytest.raises(WorkerExit):
        loop._run_program(do.Run("", _world(1), None))
