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
from spark_elastic.protocol.types import Limits, Phase, Position, WorldView
from spark_elastic.rendezvous.client import RendezvousClient
from spark_elastic.rendezvous.messages import MAX_POLL_SECONDS, FindAddresses
from spark_elastic.rendezvous.server import RendezvousServer, ServerCallbacks

WORKERS = 200
ROUNDS = 2
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


def _live(address: str, job: int, together: threading.Barrier) -> list[WorldView]:
    """One slot and its worker, through all rounds."""
    worlds: list[WorldView] = []
    with RendezvousClient(address, KEY, 1, SystemClock(), 60.0) as client:
        client.ask(RegisterSlot(f"{job}-0", f"host-{job // 8}", job, facts={}))
        client.ask(WorkerStarted(f"{job}-0", f"{job}-0.1"))
        for number in range(ROUNDS):
            together.wait(60)
            fence = worlds[-1].fence if worlds else None
            position = Position(0, Phase.TRAIN, number) if worlds else None
            more = {"planned": bool(worlds), "address": f"host-{job}:7000"}
            request = RequestNextWorld(f"{job}-0.1", fence, position, **more)
            answer = client.ask(request, hold=MAX_POLL_SECONDS)
            world = answer.world
            assert world is not None, answer
            assert (world.me.worker, world.size, answer.addresses) == (f"{job}-0.1", WORKERS, ())
            assert answer.runs == (((0, WORKERS),) if number else ())
            peers = world.me.rank, (world.me.rank + 1) % WORKERS
            mine, _ = client.ask(FindAddresses(f"{job}-0.1", world.fence, peers)).addresses
            assert mine == f"host-{job}:7000"
            client.ask(WorldFormed(f"{job}-0.1", world.fence))
            worlds.append(world)
    return worlds


@pytest.mark.timeout(300)
def test_many_clients_join_one_world_after_another(address: str) -> None:
    together = threading.Barrier(WORKERS)
    with ThreadPoolExecutor(WORKERS) as pool:
        lives = list(pool.map(lambda job: _live(address, job, together), range(1, WORKERS + 1)))
    for number, worlds in enumerate(zip(*lives, strict=True), start=1):
        assert sorted(world.me.rank for world in worlds) == list(range(WORKERS))
        assert {world.fence.generation for world in worlds} == {number}
        assert all(world.me.rank in world.host_ranks for world in worlds)
