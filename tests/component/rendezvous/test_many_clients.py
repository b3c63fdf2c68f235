"""The server and the driver machine under many clients at once: everybody comes into one world, again and again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from spark_elastic.clock import SystemClock
from spark_elastic.driver.journal import Journal
from spark_elastic.driver.loop import DriverLoop, EventQueue
from spark_elastic.protocol import driver_machine
from spark_elastic.protocol.commands import AbortWorld, DriverCommand, PublishWorld
from spark_elastic.protocol.messages import RegisterSlot, RequestNextWorld, WorkerStarted, WorldFormed
from spark_elastic.protocol.types import Limits, Phase, Position, World
from spark_elastic.rendezvous.client import RendezvousClient, exchange_blobs
from spark_elastic.rendezvous.long_polls import Waiters
from spark_elastic.rendezvous.messages import MAX_POLL_SECONDS, ExchangeAddresses
from spark_elastic.rendezvous.routes import ServerCallbacks
from spark_elastic.rendezvous.server import RendezvousServer
from spark_elastic.rendezvous.server_state import ServerState

WORKERS = 200
ROUNDS = 3
KEY = b"many clients' key, 32 bytes long"


@pytest.fixture
def address() -> Iterator[str]:
    """Of a server whose driver is the real machine in its real loop."""
    inbox: EventQueue = EventQueue()
    clock = SystemClock()
    limits = Limits(WORKERS, WORKERS, WORKERS, gather_timeout=120, lease=120, regroup_timeout=120)
    server = RendezvousServer(KEY, 1, ServerCallbacks(inbox.put, lambda lines: None), clock)

    def carry_out(command: DriverCommand) -> None:
        if isinstance(command, PublishWorld):
            server.publish(command.world)
        elif isinstance(command, AbortWorld):
            server.abort(command.fence, command.reason)

    loop = DriverLoop(driver_machine.initial(limits, 1), inbox, carry_out, clock, Journal())
    with server:
        loop.start()
        yield server.address
        loop.close()


def _live(address: str, job: int, together: threading.Barrier) -> list[World]:
    """One slot and its worker, through all rounds."""
    worlds: list[World] = []
    with RendezvousClient(address, KEY, 1, SystemClock(), 60.0) as client:
        slot, worker = client, client
        slot.ask(RegisterSlot(f"{job}-0", f"host-{job // 8}", job, facts={}))
        slot.ask(WorkerStarted(f"{job}-0", f"{job}-0.1"))
        for number in range(ROUNDS):
            together.wait(60)
            fence = worlds[-1].fence if worlds else None
            position = Position(0, Phase.TRAIN, number) if worlds else None
            answer = worker.ask(
                RequestNextWorld(f"{job}-0.1", fence, position, planned=bool(worlds)), hold=MAX_POLL_SECONDS
            )
            world = answer.world
            assert world is not None, answer
            member = world.member(f"{job}-0.1")
            assert member is not None
            blobs = exchange_blobs(
                worker,
                ExchangeAddresses(f"{job}-0.1", world.fence, member.rank, str(member.rank).encode()),
                60.0,
            )
            assert blobs == tuple(str(rank).encode() for rank in range(WORKERS))
            worker.ask(WorldFormed(f"{job}-0.1", world.fence))
            worlds.append(world)
    return worlds


@pytest.mark.timeout(300)
def test_many_clients_join_one_world_after_another(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the server does for an exchange grows with the ranks, not with their pairs."""
    built: list[str] = []
    wakes: list[str] = []
    add_blob, wake = ServerState.add_blob, Waiters.wake

    def counting_add_blob(self: ServerState, scope: str, name: str, rank: int, blob: bytes) -> bool:
        complete = add_blob(self, scope, name, rank, blob)
        built.extend([scope] * complete)
        return complete

    def counting_wake(self: Waiters, topic: str) -> None:
        wakes.append(topic)
        wake(self, topic)

    monkeypatch.setattr(ServerState, "add_blob", counting_add_blob)
    monkeypatch.setattr(Waiters, "wake", counting_wake)
    together = threading.Barrier(WORKERS)
    with ThreadPoolExecutor(WORKERS) as pool:
        lives = list(pool.map(lambda job: _live(address, job, together), range(1, WORKERS + 1)))
    assert all(worlds == lives[0] for worlds in lives)
    assert [world.fence.generation for world in lives[0]] == [1, 2, 3]
    assert len(built) == len(set(built)) == ROUNDS
    of_exchanges = [topic for topic in wakes if topic.startswith("generation/")]
    assert len(of_exchanges) <= 3 * ROUNDS
