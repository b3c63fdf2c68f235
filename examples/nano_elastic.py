"""Elastic training in one file: how spark_elastic works, without spark_elastic, on numpy and plain processes.

    python examples/nano_elastic.py             # three workers; four are killed, newcomers join
    python examples/nano_elastic.py --kills 0   # nobody is killed: the same weights

Read it from the top: the data plan, a step, the ring, the worker, the coordinator. What must hold, whoever is killed:

- each row of an epoch enters exactly one applied step (`State.seen` counts it, and is summed with the gradients);
- no applied step is taken back while a worker that has it lives: a loss costs at most the step in flight;
- the weights are those of an undisturbed run, up to the order in which floats are added.

docs/how-it-works.md walks through it, and says what the product adds to each part.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

SEED, ROWS, FEATURES, BATCH, EPOCHS = 7, 250, 8, 16, 3
STEPS_PER_EPOCH = -(-ROWS // BATCH)
STEPS = EPOCHS * STEPS_PER_EPOCH
LEASE = 1.0  # seconds that a peer may let others wait before it counts as lost
LEARNING_RATE, MOMENTUM = 0.05, 0.9

# A table that every process can read; the product reads Parquet files from a store.
_draw = np.random.default_rng(SEED)
INPUTS = _draw.normal(size=(ROWS, FEATURES))
TARGETS = INPUTS @ np.arange(1.0, FEATURES + 1) + 0.1 * _draw.normal(size=ROWS)


# 1. The data plan: one stream, drop a prefix, divide the rest.
#
# Which rows a step takes depends on the seed and the number of the step alone. No rank, no size, no history: so whoever
# takes step 17, in whatever world and for the second time, takes the same rows, and progress is one integer.


def rows_of_step(step: int) -> np.ndarray:
    epoch, taken = divmod(step, STEPS_PER_EPOCH)
    stream = np.random.default_rng((SEED, epoch)).permutation(ROWS)
    return stream[taken * BATCH :][:BATCH]


def share_of(rows: np.ndarray, rank: int, size: int) -> np.ndarray:
    return rows[len(rows) * rank // size : len(rows) * (rank + 1) // size]


# 2. A step, which makes the next state of a state.


@dataclass(frozen=True)
class State:
    """All that the next step depends on. It is replaced as a whole: no state is half of one step, half of the next."""

    step: int  # how many have been applied, over all epochs
    weights: np.ndarray
    velocity: np.ndarray
    seen: np.ndarray  # how often each row of the table has entered an applied step

    @staticmethod
    def first() -> State:
        return State(0, np.zeros(FEATURES), np.zeros(FEATURES), np.zeros(ROWS))

    def pack(self) -> np.ndarray:
        return np.concatenate([[self.step], self.weights, self.velocity, self.seen])

    @staticmethod
    def unpack(vector: np.ndarray) -> State:
        step, weights, velocity, seen = np.split(vector, np.cumsum([1, FEATURES, FEATURES]))
        return State(int(step[0]), weights, velocity, seen)


def take_step(state: State, ring: Ring, vote: bool) -> tuple[State, bool]:
    """The state after the next step, and whether this world ends after it.

    One sum carries all that the ranks must agree on: gradients, the rows that they are of, and a vote. All ranks get
    the same bytes, so all apply the same step and draw the same decision. Until the sum is there, nothing has changed:
    an error leaves `state` as it was.
    """
    rows = rows_of_step(state.step)
    mine = share_of(rows, ring.rank, ring.size)
    errors = INPUTS[mine] @ state.weights - TARGETS[mine]
    gradient = 2 * INPUTS[mine].T @ errors / len(rows)  # of the step's loss: divided by all rows, not by mine
    entered = np.bincount(mine, minlength=ROWS)
    total = ring.sum(np.concatenate([gradient, entered, [vote]]))
    gradient, entered, votes = np.split(total, [FEATURES, FEATURES + ROWS])
    velocity = MOMENTUM * state.velocity + gradient
    weights = state.weights - LEARNING_RATE * velocity
    return State(state.step + 1, weights, velocity, state.seen + entered), votes[0] > 0


# 3. The ring: how the members of one world add up.


class Link:
    """A connection between a worker and the coordinator: one JSON object per line."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._unread = b""

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, **message: Any) -> None:
        self.connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]]:
        """The messages that are complete, once anything has arrived."""
        received = self.connection.recv(65536)
        if not received:
            raise ConnectionError("the connection was closed")
        *lines, self._unread = (self._unread + received).split(b"\n")
        return [json.loads(line) for line in lines]


class Ring:
    """The connections of one world: rank r sends to r + 1 and receives from r - 1.

    It is never used again after an error: the survivors build the ring of the next generation. Every error of it is an
    OSError; a wait without progress for LEASE seconds is one, too.
    """

    def __init__(self, world: dict[str, Any], control: Control | None = None) -> None:
        self.rank, self.size, self._ports = world["rank"], len(world["ports"]), world["ports"]
        self._generation, self._control = world["generation"], control
        self._left = self._right = None

    def connect(self, listener: socket.socket) -> None:
        """Build the ring; a world of one needs none."""
        if self.size > 1:
            address = ("127.0.0.1", self._ports[(self.rank + 1) % self.size])
            self._right = socket.create_connection(address, LEASE)
            self._right.sendall(self._generation.to_bytes(8, "big"))
            self._left = self._accept(listener)
            for neighbour in (self._left, self._right):
                neighbour.setblocking(False)
                neighbour.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Ring:
        return self

    def __exit__(self, *error: object) -> None:
        """Closing tells the neighbours: an error runs around the ring within milliseconds."""
        for neighbour in (self._left, self._right):
            if neighbour is not None:
                neighbour.close()

    def sum(self, vector: np.ndarray) -> np.ndarray:
        """In the first half of the turns partial sums travel around, each rank adding its own; in the second half the
        finished chunks do. Each chunk is finished by one rank and copied to the others: all hold the same bits."""
        chunks = np.array_split(vector.astype(float), self.size)
        for turn in range(2 * (self.size - 1)):
            outgoing, incoming = (
                chunks[(self.rank - turn) % self.size],
                chunks[(self.rank - turn - 1) % self.size],
            )
            received = np.frombuffer(self._exchange(outgoing.tobytes(), incoming.nbytes))
            incoming[:] = incoming + received if turn < self.size - 1 else received
        return np.concatenate(chunks)

    def broadcast(self, vector: np.ndarray, source: int) -> np.ndarray:
        """The source's vector, handed from neighbour to neighbour."""
        distance = (self.rank - source) % self.size
        if distance > 0:
            vector = np.frombuffer(self._exchange(b"", vector.nbytes))
        if distance < self.size - 1:
            self._exchange(vector.tobytes(), 0)
        return vector

    def _exchange(self, outgoing: bytes, wanted: int) -> bytes:
        """Send to the right while receiving from the left: ranks that first sent could all wait for each other."""
        unsent, received = memoryview(outgoing), bytearray()
        while unsent or len(received) < wanted:
            receiving = [self._left] if len(received) < wanted else []
            for ready in self._wait(receiving, [self._right] if unsent else []):
                if ready is self._right:
                    unsent = unsent[ready.send(unsent) :]
                else:
                    arrived = ready.recv(wanted - len(received))
                    if not arrived:
                        raise ConnectionError("the left neighbour is gone")
                    received += arrived
        return bytes(received)

    def _accept(self, listener: socket.socket) -> socket.socket:
        """The left neighbour's connection of this generation. Those of earlier ones may still stand in the queue."""
        while True:
            for ready in self._wait([listener], []):
                connection, _ = ready.accept()
                connection.settimeout(LEASE)
                if int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "big") == self._generation:
                    return connection
                connection.close()

    def _wait(self, receiving: list[Any], sending: list[Any]) -> list[Any]:
        """Those that are ready. The coordinator may interrupt every wait."""
        readable, writable, _ = select.select([*receiving, self._control.link], sending, [], LEASE)
        if not readable and not writable:
            raise TimeoutError(f"a neighbour has been silent for {LEASE} s")
        if self._control.link in readable:
            readable.remove(self._control.link)
            self._control.read()
        if self._control.lost == self._generation:
            raise ConnectionError("the coordinator says that a member is lost")
        return readable + writable


# 4. The worker.


class Control:
    """What the coordinator has told this worker."""

    def __init__(self, port: int, worker: int) -> None:
        self.link = Link(socket.create_connection(("127.0.0.1", port)))
        self.link.send(worker=worker, process=os.getpid())
        self.world: dict[str, Any] | None = None  # the newest
        self.lost = -1  # the newest generation of which a member is lost
        self.change_wanted = False  # somebody waits for a world that has other members

    def read(self) -> None:
        for message in self.link.receive():
            self.lost = message.get("lost", self.lost)
            self.world = message.get("world", self.world)
            self.change_wanted = "world" not in message and ("change" in message or self.change_wanted)

    def poll(self) -> None:
        while select.select([self.link], [], [], 0)[0]:
            self.read()

    def ask_for_world(self, **request: Any) -> dict[str, Any]:
        self.world = None
        try:
            self.link.send(**request)
            while self.world is None:
                self.read()
        except OSError:  # others may have gone on without this worker: its state is worth nothing
            sys.exit("the coordinator is gone, or has evicted this worker")
        return self.world


def work(port: int, worker: int, pause: float, verbose: bool) -> None:
    """A worker's whole life. It asks for its first world when it is ready to train: nobody waits while it starts.

    After an error and after a planned change the same thing follows: ask for the next world, and take the state of the
    member that has come furthest. Old members differ by one step at most: some had the whole sum when the ring broke.
    """
    leaving: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: leaving.append(number))  # a drain: leave after a step
    listener = socket.create_server(("127.0.0.1", 0))
    control, state = Control(port, worker), State.first()
    while True:
        result = state.pack().tolist() if state.step == STEPS else None
        own_port = listener.getsockname()[1]
        world = control.ask_for_world(step=state.step, port=own_port, leaving=bool(leaving), result=result)
        if "end" in world:
            return
        try:
            with Ring(world, control) as ring:
                ring.connect(listener)
                state = State.unpack(ring.broadcast(state.pack(), world["source"]))
                ended = False
                while state.step < STEPS and not ended:
                    time.sleep(pause)  # a model that takes longer
                    control.poll()
                    state, ended = take_step(state, ring, control.change_wanted or bool(leaving))
                    if verbose:
                        say(
                            f"worker {worker} applied step {state.step - 1} in generation {world['generation']}"
                        )
        except OSError as error:
            say(f"worker {worker}, after {state.step} steps: {error}")


# 5. The coordinator: it starts processes, decides who is a member, and sees no gradient.


@dataclass(eq=False)
class Member:
    """A worker that has a connection."""

    link: Link
    worker: int = -1
    process: int = 0
    request: dict[str, Any] | None = None  # for the next world


class Coordinator:
    """One thread owns all of this."""

    def __init__(self, workers: int, options: list[str], failures: int) -> None:
        self._wanted, self._options, self._failures = workers, options, failures
        self._server = socket.create_server(("127.0.0.1", 0))
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._started = 0
        self._connected: list[Member] = []
        self._world: list[Member] = []  # those of the current generation that are alive
        self._generation = 0
        self._since: float | None = None  # when the first of them asked for the next world
        self.result: State | None = None

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        for member in self._connected:
            member.link.connection.close()
        self._selector.close()
        self._server.close()

    def tend(self) -> None:
        """One round: start processes, listen, evict, and publish the next world once nobody is in the old one."""
        self._start_processes()
        for key, _ in self._selector.select(timeout=0.02):
            if key.data is None:
                member = Member(Link(self._server.accept()[0]))
                self._selector.register(member.link, selectors.EVENT_READ, member)
                self._connected.append(member)
            elif key.data in self._connected:
                self._hear(key.data)
        if self._since is not None and time.monotonic() > self._since + LEASE:
            for member in [each for each in self._world if each.request is None]:
                self._lose(member, "has not asked in time")
        asking = [each for each in self._connected if each.request is not None]
        ready = self._generation > 0 or len(asking) >= self._wanted
        if asking and ready and all(each.request is not None for each in self._world):
            self._publish(asking)

    def members(self) -> list[Member]:
        return list(self._world)

    def _start_processes(self) -> None:
        self._processes = [each for each in self._processes if each.poll() is None]
        while len(self._processes) < self._wanted:
            if self._started >= self._wanted + self._failures:
                sys.exit(f"more than {self._failures} workers were lost")
            port = self._server.getsockname()[1]
            command = [sys.executable, __file__, "--join", str(port), str(self._started), *self._options]
            self._processes.append(subprocess.Popen(command))
            self._started += 1

    def _hear(self, member: Member) -> None:
        try:
            messages = member.link.receive()
        except OSError:
            self._lose(member, "is lost")
            return
        for message in messages:
            if "worker" in message:
                member.worker, member.process = message["worker"], message["process"]
                say(f"worker {member.worker} is process {member.process}")
                continue
            member.request = message
            if member not in self._world:
                self._tell(
                    self._world, change=True
                )  # the members vote for an end of their world, see take_step
            elif self._since is None:
                self._since = time.monotonic()

    def _lose(self, member: Member, why: str) -> None:
        """A closed connection is a process that has ended: the kernel closes it, however it ended."""
        say(f"worker {member.worker} {why}")
        self._selector.unregister(member.link)
        member.link.connection.close()
        self._connected.remove(member)
        for process in self._processes:
            if process.pid == member.process:
                process.kill()  # a process that stands still would keep its place
        if member in self._world:
            self._world.remove(member)
            self._tell(self._world, lost=self._generation)

    def _publish(self, asking: list[Member]) -> None:
        """The next world: who asked, the oldest first, and the rank of the one that has come furthest.

        Who wants to leave may go once another has all of his state. Once anybody has taken the last step, the job ends.
        """
        requests = {
            each: each.request for each in sorted(asking, key=lambda each: each.worker) if each.request
        }
        results = [request["result"] for request in requests.values() if request["result"]]
        if results:
            assert all(each == results[0] for each in results), "replicas differ"
            self.result = State.unpack(np.array(results[0]))
            self._tell(asking, world={"end": True})
            return
        kept = max((request["step"] for request in requests.values() if not request["leaving"]), default=-1)
        going = [each for each, request in requests.items() if request["leaving"] and request["step"] <= kept]
        self._tell(going, world={"end": True})
        self._world = [each for each in requests if each not in going]
        steps = [requests[each]["step"] for each in self._world]
        source = steps.index(max(steps))
        self._generation += 1
        self._since = None
        named = ", ".join(str(each.worker) for each in self._world)
        say(
            f"generation {self._generation}: workers {named}; {max(steps)} steps, from {self._world[source].worker}"
        )
        ports = [requests[each]["port"] for each in self._world]
        world = {"generation": self._generation, "ports": ports, "source": source}
        for rank, member in enumerate(self._world):
            self._tell([member], world={**world, "rank": rank})
        for each in requests:
            each.request = None

    def _tell(self, members: list[Member], **message: Any) -> None:
        for member in members:
            try:
                member.link.send(**message)
            except OSError:
                pass  # its end is read next


def train_alone() -> State:
    """The undisturbed run: the same steps in a world of one."""
    state = State.first()
    with Ring({"rank": 0, "ports": [0], "generation": 0}) as ring:
        while state.step < STEPS:
            state, _ = take_step(state, ring, vote=False)
    return state


def kill_some(coordinator: Coordinator, kills: int) -> None:
    """Train to the end, and kill a member of a world of three or more now and then."""
    rng, due = random.Random(SEED), 0.0
    while coordinator.result is None:
        coordinator.tend()
        members = coordinator.members()
        if kills == 0 or len(members) < 3:
            due = time.monotonic() + rng.uniform(0.05, 0.3)
        elif time.monotonic() > due:
            victim = rng.choice(members)
            say(f"killing worker {victim.worker}")
            os.kill(victim.process, signal.SIGKILL)
            kills, due = kills - 1, time.monotonic() + 0.5


def say(text: str) -> None:
    # One write, which `print` is not in a process without buffers: all processes share the output.
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description="Elastic training on numpy and plain processes.")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--kills", type=int, default=4, help="how many workers are killed on the way")
    parser.add_argument("--pause", type=float, default=0.03, help="seconds that a step takes in addition")
    parser.add_argument("--verbose", action="store_true", help="print each step of each worker")
    parser.add_argument("--save", metavar="FILE", help="write the final state to this file, for numpy.load")
    parser.add_argument("--join", nargs=2, type=int, metavar=("PORT", "WORKER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.join:
        work(*given.join, given.pause, given.verbose)
        return
    options = ["--pause", str(given.pause), *(["--verbose"] if given.verbose else [])]
    with Coordinator(given.workers, options, failures=20) as coordinator:
        kill_some(coordinator, given.kills)
    result, alone = coordinator.result, train_alone()
    assert result is not None
    if given.save:
        np.save(given.save, result.pack())
    rows = sorted(set(result.seen.astype(int).tolist()))
    say(f"{result.step} steps of {STEPS}; each row entered {rows} steps in {EPOCHS} epochs")
    say(f"weights differ from an undisturbed run's by {np.abs(result.weights - alone.weights).max():.0e}")


if __name__ == "__main__":
    main()
