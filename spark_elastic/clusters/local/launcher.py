"""Slots as processes of this machine: `driver.ports.Launcher` without a cluster, and the main of a slot's process.

The thread of a slot waits for room in a `HostSlots`, starts the slot's process (`python -m`) and waits for its end.
Standard input brings it a line with what the slot is, then the pickled program; standard output says why it ended. A
slot that ssh has started on another host ends with its standard input: with the connection or the launcher.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from spark_elastic.clock import Clock, SystemClock
from spark_elastic.driver.ports import Post, ThreadPerSlotLauncher
from spark_elastic.errors import ElasticError
from spark_elastic.protocol.types import SlotId, SlotIdentity, SlotOutcome, SlotSpec
from spark_elastic.rendezvous import codec
from spark_elastic.rendezvous.addresses import find_address_towards, is_own_address, split_address
from spark_elastic.rendezvous.client import CONNECT_SECONDS, RendezvousClient
from spark_elastic.worker.entry import die_with_parent, exit_with_stdin
from spark_elastic.worker.forking import fork_server_cache
from spark_elastic.worker.handover import describe_exit
from spark_elastic.worker.imports import list_early_imports
from spark_elastic.worker.pickling import pickle_for_workers
from spark_elastic.worker.slot_agent import SlotAgent

REFUSED = 3  # exit code of a host that cannot run slots; standard output says why


@dataclass(frozen=True)
class LocalSlot:
    """What the launcher tells a slot's process."""

    spec: SlotSpec  # the same for all slots of the job
    identity: SlotIdentity  # of this slot
    parent: int | None  # process id of the launcher; None: it is on another host
    size: int = 0  # bytes of the pickled program, which follow


class HostSlots:
    """Room for slots on hosts by name, which come and go; the threads of a launcher wait here.

    Hosts are filled in the order in which they are listed. Where a slot has ended, the driver may refuse new ones:
    other hosts come first, then the host whose last slot ended longest ago."""

    def __init__(self, hosts: Mapping[str, int] | None = None) -> None:
        self._change = threading.Condition()  # owns all other fields
        self._room = dict(hosts or {})  # host -> its slots
        self._taken: Counter[str] = Counter()  # host -> its slots that are in use
        self._ends: dict[str, int] = {}  # host -> the number of the last slot end there
        self._ended = 0
        self._closed = False

    def update(self, hosts: Mapping[str, int]) -> None:
        """Use discovery's newest list. Slots on hosts that are gone stay until the driver ends them."""
        with self._change:
            self._room = dict(hosts)
            self._change.notify_all()

    @property
    def has_hosts(self) -> bool:
        """Whether discovery has named hosts."""
        with self._change:
            return bool(self._room)

    def acquire(self, launch: int) -> str | None:
        """Wait for room. Returns the host that has it, or None once the pool is closed."""
        with self._change:
            while not self._closed:
                free = [host for host, room in self._room.items() if self._taken[host] < room]
                if free:
                    host = min(free, key=lambda host: self._ends.get(host, 0))
                    self._taken[host] += 1
                    return host
                self._change.wait()
            return None

    def release(self, host: str) -> None:
        with self._change:
            self._taken[host] -= 1
            self._ended += 1
            self._ends[host] = self._ended
            self._change.notify_all()

    def close(self) -> None:
        with self._change:
            self._closed = True
            self._change.notify_all()


def find_remote_hosts(hosts: Iterable[str]) -> list[str]:
    """The hosts that are not this machine."""
    own = ("localhost", socket.gethostname())
    return [host for host in hosts if host not in own and not is_own_address(host)]


class LocalLauncher(ThreadPerSlotLauncher):
    """Killing a slot's process loses the slot and its worker, as losing an executor with one slot would."""

    grace = 1 / 2

    def __init__(
        self,
        program: object,
        pool: HostSlots,
        clock: Clock,
        preload: tuple[str, ...] = (),
        interpreter: str = sys.executable,
    ) -> None:
        """interpreter: path of the Python that slots run with."""
        super().__init__(clock)
        self._program = program
        self._payload = pickle_for_workers(program)
        self._pool, self._preload, self.interpreter = pool, preload, interpreter
        self.processes: dict[int, subprocess.Popen[bytes]] = {}  # by the number of the slot launch

    def start(self, spec: SlotSpec, post: Post) -> None:
        imports = list_early_imports(self._program, self._preload)
        super().start(replace(spec, preload=self._preload, imports=imports), post)

    def slots(self) -> dict[int, int]:
        """Living slot processes: number of the launch -> process id."""
        started = list(self.processes.items())
        return {launch: process.pid for launch, process in started if process.poll() is None}

    def kill(self, launch: int, sig: int = signal.SIGKILL) -> None:
        """Signal a slot process; its training child dies with it."""
        self.processes[launch].send_signal(sig)

    def close(self, timeout: float) -> list[str]:
        self._closing.set()
        self._pool.close()
        return super().close(timeout)

    def cancel(self) -> None:
        for process in list(self.processes.values()):
            process.kill()

    def run_slot(self, launch: int) -> SlotOutcome | None:
        host = self._pool.acquire(launch)
        if host is None:
            return None
        try:
            return SlotOutcome(self.run_process(launch, host))
        finally:
            self._pool.release(host)

    def describe(self, launch: int, host: str, parent: int | None) -> bytes:
        """What standard input brings to a slot's process, the program included. parent: as of `LocalSlot`."""
        identity = SlotIdentity(slot=SlotId.build(launch, attempt=0), host=host)
        return codec.to_line(LocalSlot(self.spec, identity, parent, len(self._payload))) + self._payload

    def run_process(self, launch: int, host: str) -> str:
        """Returns why the slot ended."""
        # Another Python has packages of its own.
        is_own = self.interpreter == sys.executable
        path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} if is_own else {}
        # One thread, as Spark sets: several workers with a thread per core slow each other down.
        variables = {"OMP_NUM_THREADS": "1", **os.environ, **path}
        command, pipe = [self.interpreter, "-m", "spark_elastic.clusters.local.launcher"], subprocess.PIPE
        try:
            process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=variables)
        except OSError as error:
            # Memory, processes or descriptors are used up: the driver launches another slot
            return f"the slot's process could not be started ({error})"
        self.processes[launch] = process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with process.stdin as stream:
                stream.write(self.describe(launch, host, os.getpid()))
        except BrokenPipeError:
            pass  # it was killed meanwhile; its exit code says how
        with process.stdout as output:
            reason = output.read().decode(errors="replace")
        code = process.wait()
        return reason if code == 0 else f"the slot process ended: {describe_exit(code)}"


# ---- a slot's process


def main() -> None:
    slot = codec.from_line(LocalSlot, sys.stdin.buffer.readline())
    payload = sys.stdin.buffer.read(slot.size)
    if slot.parent is None:
        exit_with_stdin()
        _check_way_to_driver(slot.spec.address)
    else:
        # The death signal follows the thread that started this process: the launcher's, which lives as long as its
        # slot.
        die_with_parent(slot.parent)
    # Ctrl-C reaches all processes of a terminal, but the driver ends the job. Child processes inherit this setting.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        sys.stdout.write(serve(slot, payload))
    finally:
        fork_server_cache.close()


def serve(slot: LocalSlot, payload: bytes) -> str:
    """Be the slot until it ends; returns why it has."""
    spec, clock = slot.spec, SystemClock()
    known = spec.address, spec.key, spec.attempt, clock
    with RendezvousClient(*known, certificate=spec.certificate) as client:
        try:
            identity = replace(slot.identity, address=find_address_towards(*split_address(spec.address)))
            return SlotAgent(spec, identity, payload, client, clock).run()
        except ElasticError as error:
            return str(error)


def check() -> None:
    """End with `REFUSED` if slots of this host could not reach the driver whose address standard input brings."""
    _check_way_to_driver(sys.stdin.readline().strip())


def _check_way_to_driver(address: str) -> None:
    """A slot would try for as long as a driver may be silent; at the start the first failure is the answer."""
    try:
        socket.create_connection(split_address(address), CONNECT_SECONDS).close()
    except OSError as error:
        sys.stdout.write(
            f"it cannot reach the driver at {address} ({error}): open the port between the hosts "
            "(SPARK_ELASTIC_DRIVER_PORT makes it a fixed one), or set SPARK_ELASTIC_ADVERTISE_ADDRESS to an address of "
            "the driver that all hosts reach"
        )
        sys.stdout.flush()
        os._exit(REFUSED)


if __name__ == "__main__":
    main()
