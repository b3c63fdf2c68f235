"""What is told to whom, without a server around it."""

from __future__ import annotations

from spark_elastic.protocol.messages import NextWorld
from spark_elastic.protocol.types import Fence, Member, WorkerId, World
from spark_elastic.rendezvous.messages import SlotCommands, WorkerToStop
from spark_elastic.rendezvous.server_state import ServerState


def _world(generation: int, *workers: str) -> World:
    members = tuple(Member(w, w[:-2], "h", rank, 0, 1, 0, 1, None) for rank, w in enumerate(workers))
    return World(Fence(1, generation), members, None, "why")


def test_r10_an_older_abort_is_ignored() -> None:
    state = ServerState(1)
    state.publish(_world(1, "1-0.1"))
    state.publish(_world(2, "1-0.1"))
    state.abort(Fence(1, 1), "late")
    assert state.get_end_reason(Fence(1, 2)) is None
    assert state.find_next_world("1-0.1", Fence(1, 1)) == NextWorld(_world(2, "1-0.1"))


def test_the_first_reason_of_an_abort_and_of_the_jobs_end_stays() -> None:
    for decide in (lambda state, reason: state.abort(Fence(1, 1), reason), ServerState.end):
        state = ServerState(1)
        state.publish(_world(1, "1-0.1"))
        decide(state, "first")
        decide(state, "second")
        assert state.get_end_reason(Fence(1, 1)) == "first"
    assert state.get_stop_reason("1-0.1") == "first"
    assert state.get_commands("1-0", 0) == SlotCommands(0, (), "first")


def test_the_command_to_stop_a_worker_reaches_its_slot() -> None:
    state = ServerState(1)
    state.stop_worker(WorkerId("7-2.3"), "a", kill=False)
    state.stop_worker(WorkerId("7-2.4"), "b", kill=True)
    commands = (WorkerToStop("7-2.3", "a", False), WorkerToStop("7-2.4", "b", True))
    assert state.get_commands("7-2", 0) == SlotCommands(2, commands)
    assert state.get_commands("7-2", 1) == SlotCommands(2, commands[1:])
    assert state.get_commands("7-2", 2) == SlotCommands(2)
    assert state.get_commands("7-3", 0) == SlotCommands(0)
