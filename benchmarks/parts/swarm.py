"""Thousands of slots and workers as the rendezvous server sees them: real connections, signed requests, long polls.

One event loop a process carries them all: threads for each, as a real slot has, would be the load that is measured.
Each has what a real one has: a session and two connections of the slot (orders, and all else), the same of its worker.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from spark_elastic.protocol.messages import (
    Heartbeat,
    RegisterSlot,
    Request,
    RequestNextWorld,
    WorkerStarted,
    WorldFormed,
)
from spark_elastic.protocol.types import INITIAL_VERSION, Fence, MembershipVersion, Phase, Position
from spark_elastic.rendezvous import auth, codec, http1
from spark_elastic.rendezvous.messages import (
    MAX_POLL_SECONDS,
    VERSION,
    ExchangeAddresses,
    GetValues,
    SetValues,
    WatchSlot,
    WatchWorker,
    path_of,
)

KEY = b"k" * 32
BLOB = 120  # bytes that a rank hands in
SHORT = 20  # requests of a process under way at once while everybody comes


class Line:
    """A connection with its session, made on first use; one request at a time."""

    def __init__(self, address: str) -> None:
        self._host, _, self._port = address.rpartition(":")
        self._free = asyncio.Lock()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._session = auth.create_id()
        self._count = 0

    async def post(self, path: str, body: bytes) -> dict[str, Any]:
        async with self._free:
            if self._streams is None:
                self._streams = await asyncio.open_connection(self._host, int(self._port))
                self._session = (await self._exchange(auth.HELLO, b""))["session"]
            return await self._exchange(path, body)

    async def _exchange(self, path: str, body: bytes) -> dict[str, Any]:
        assert self._streams is not None
        reader, writer = self._streams
        credentials = auth.sign_request(KEY, path, self._session, self._count, body)
        self._count += 1
        writer.write(http1.encode_request(path, "driver", [("authorization", credentials.header())], body))
        head = await reader.readuntil(http1.END_OF_HEAD)
        status, fields, length = http1.parse_response(head[:-4])
        reply = await reader.readexactly(length)
        assert auth.reply_is_genuine(KEY, credentials, status, reply, fields[auth.REPLY_HEADER]), status
        answer: dict[str, Any] = json.loads(codec.decompress(reply))
        return answer


class Session:
    """Two lines: one for the long poll that is always open, one for everything else."""

    def __init__(self, address: str) -> None:
        self._lines = Line(address), Line(address)

    async def ask(self, request: Request[Any], hold: float = 0.0, watching: bool = False) -> dict[str, Any]:
        body = codec.dumps({"v": VERSION, "attempt": 1, "hold": hold, "message": request})
        answer = await self._lines[watching].post(path_of(type(request)), body)
        if "reply" not in answer:
            raise RuntimeError(f"{type(request).__name__} was answered by {answer}")
        reply: dict[str, Any] = answer["reply"]
        return reply


class Worker:
    """One slot and its worker."""

    def __init__(self, job: int, address: str) -> None:
        self.job = job
        self._names = f"{job}-0.1", f"{job}-0"
        self._slot, self._worker = Session(address), Session(address)
        self._fence: Fence | None = None
        self._watches: list[asyncio.Task[None]] = []

    async def join(self) -> None:
        """Register and announce the worker; then the two long polls that are always open."""
        worker, slot = self._names
        await self._slot.ask(RegisterSlot(slot, f"host-{self.job // 8}", self.job))
        await self._slot.ask(WorkerStarted(slot, worker))
        await self._worker.ask(SetValues("come", (worker,), (b"here",)))
        self._watches = [asyncio.create_task(watch()) for watch in (self._watch_slot, self._watch_worker)]

    async def rendezvous(self) -> float:
        """Ask for the next world, exchange addresses, tell that it stands. When it did."""
        worker, _ = self._names
        position = None if self._fence is None else Position(0, Phase.TRAIN, self._fence.generation)
        join = RequestNextWorld(worker, self._fence, position, planned=self._fence is not None)
        while (world := (await self._worker.ask(join, MAX_POLL_SECONDS))["world"]) is None:
            pass
        self._fence = Fence(world["fence"]["attempt"], world["fence"]["generation"])
        (rank,) = (member["rank"] for member in world["members"] if member["worker"] == worker)
        exchange = ExchangeAddresses(worker, self._fence, rank, os.urandom(BLOB), "mesh")
        while (blobs := (await self._worker.ask(exchange, MAX_POLL_SECONDS))["blobs"]) is None:
            pass
        assert len(blobs) == len(world["members"])
        await self._worker.ask(WorldFormed(worker, self._fence))
        return time.monotonic()

    async def mesh(self, size: int, meshes: int) -> float:
        """One GET per pair of ranks over HTTP, in each of several meshes."""
        rank = str(self.job - 1)
        for mesh in range(meshes):
            scope = f"mesh {size} {mesh}"
            await self._worker.ask(SetValues(scope, (rank,), (os.urandom(BLOB),)))
            for peer in range(size):
                wanted = GetValues(scope, (str(peer),), wait=True)
                while (await self._worker.ask(wanted, MAX_POLL_SECONDS))["values"] == [None]:
                    pass
        return time.monotonic()

    async def send_heartbeats(self, first: float, end: float, paced: bool) -> int:
        """How many heartbeats it sent, as often as it is told to, or as fast as it can."""
        worker, slot = self._names
        sent, due = 0, first
        while due < end:
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            every = (await self._slot.ask(Heartbeat(slot, worker, "S", waits=True, seconds=0.1)))[
                "heartbeat_interval"
            ]
            sent += 1
            due = max(due + every * paced, time.monotonic())
        return sent

    async def leave(self) -> None:
        for watch in self._watches:
            watch.cancel()

    async def _watch_slot(self) -> None:
        while (await self._slot.ask(WatchSlot(self._names[1], 0), MAX_POLL_SECONDS, watching=True))[
            "release"
        ] is None:
            pass

    async def _watch_worker(self) -> None:
        ended_fence, version, stop = None, INITIAL_VERSION, None
        while stop is None:
            request = WatchWorker(self._names[0], ended_fence, version)
            update = await self._worker.ask(request, MAX_POLL_SECONDS, watching=True)
            version, stop = MembershipVersion(**update["version"]), update["stop"]
            ended_fence = Fence(**update["ended_fence"]) if update["ended_fence"] else None


def be_clients(pipe: Connection, address: str, jobs: Sequence[int], size: int) -> None:
    """Obeys (what, argument) orders from the pipe; answers each with what it measured."""
    asyncio.run(_obey(pipe, [Worker(job, address) for job in jobs], size))
    os._exit(0)  # long polls that are still open must not be waited for


async def _obey(pipe: Connection, workers: list[Worker], size: int) -> None:
    loop = asyncio.get_running_loop()
    while (order := await loop.run_in_executor(None, pipe.recv)) is not None:
        what, argument = order
        if what == "come":
            await _call_few_at_a_time([worker.join for worker in workers])
            pipe.send(0.0)
        elif what == "rendezvous":
            pipe.send(max(await asyncio.gather(*(worker.rendezvous() for worker in workers))))
        elif what == "mesh":
            pipe.send(max(await asyncio.gather(*(worker.mesh(size, argument) for worker in workers))))
        elif what == "heartbeat":
            seconds, paced = argument
            now = time.monotonic()
            # Spread over a second, as slots that came one after the other are.
            begins = [now + paced * number / len(workers) for number in range(len(workers))]
            heartbeats = (
                w.send_heartbeats(begin, now + seconds, paced)
                for w, begin in zip(workers, begins, strict=True)
            )
            pipe.send(sum(await asyncio.gather(*heartbeats)))
    for worker in workers:
        await worker.leave()


async def _call_few_at_a_time(calls: Sequence[Callable[[], Awaitable[object]]]) -> None:
    gate = asyncio.Semaphore(SHORT)

    async def call_one(call: Callable[[], Awaitable[object]]) -> None:
        async with gate:
            await call()

    await asyncio.gather(*map(call_one, calls))
