"""Starts slots as processes of this machine: `driver.ports.Launcher` without a cluster.

One thread per slot job: it waits for room, starts the slot's process and waits for its end, which it posts.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Protocol

import cloudpickle

from spark_elastic.clock import Clock
from spark_elastic.driver.ports import Contact, Post
from spark_elastic.local.slot import SlotOrder, SlotSettings
from spark_elastic.monitoring.progress import OutputListener
from spark_elastic.protocol.events import LaunchEnded
from spark_elastic.worker.forking import select_fork_imports

# Where slot processes go: hosts of this machine by name, each with a number of slots, coming and going.
#
# Shared by the threads of a launcher, which wait here for room, and discovery's, which says what hosts there are.


class SlotPool(Protocol):
    """Room for slots. `take` blocks until there is some and names the host, or returns None once closed."""

    def acquire(self, job: int) -> str | None: ...

    def release(self, host: str) -> None: ...

    def close(self) -> None: ...


class HostSlots:
    """Named hosts with so many slots each, filled in the order in which they are listed; but where a slot has ended, it
    may be that the driver lets none in, so other hosts come first, and the one where that is longest ago."""

    def __init__(self, hosts: Mapping[str, int] | None = None) -> None:
        self._room = dict(hosts or {})
        self._taken: Counter[str] = Counter()
        self._ends: dict[str, int] = {}  # the number of the last slot's end there
        self._ended = 0
        self._closed = False
        self._change = threading.Condition()

    def update(self, hosts: Mapping[str, int]) -> None:
        """Discovery's newest answer; slots of hosts that are gone stay where they are until the driver ends them."""
        with self._change:
            self._room = dict(hosts)
            self._change.notify_all()

    def acquire(self, job: int) -> str | None:
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


def find_remote_hosts(hosts: Mapping[str, int]) -> list[str]:
    """Those that are not this machine."""
    return [host for host in hosts if not _is_this_machine(host)]


def _is_this_machine(host: str) -> bool:
    if host in ("localhost", socket.gethostname()):
        return True
    try:
        answers = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False  # nobody knows it
    for family, kind, protocol, _, address in answers:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)  # works for this machine's own addresses only
            return True
        except OSError:
            continue
    return False


class LocalLauncher:
    """Killing a slot's process loses the slot and its worker, as losing an executor with one slot would."""

    def __init__(
        self,
        program: object,
        pool: SlotPool,
        clock: Clock,
        preload: tuple[str, ...] = (),
        settings: SlotSettings | None = None,
    ) -> None:
        self._payload = cloudpickle.dumps(program)
        self._pool = pool
        self._clock = clock
        self._preload = preload
        self._settings = settings or SlotSettings()
        self._imports = select_fork_imports(program, preload, self._settings.fork_workers)
        self._closing = threading.Event()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._threads: list[threading.Thread] = []
        self._contact: Contact | None = None
        self._post: Post | None = None

    def start(self, contact: Contact, post: Post) -> None:
        self._contact, self._post = contact, post

    def launch(self, job: int) -> None:
        thread = threading.Thread(target=self._carry, args=(job,), name=f"slot job {job}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def slots(self) -> dict[int, int]:
        """Living slot processes: job number -> process id."""
        return {job: process.pid for job, process in list(self._processes.items()) if process.poll() is None}

    def kill(self, job: int, sig: int = signal.SIGKILL) -> None:
        """Signal a slot process; its training child dies with it."""
        self._processes[job].send_signal(sig)

    def close(self, timeout: float) -> list[str]:
        deadline = self._clock.now() + timeout
        self._closing.set()
        self._pool.close()
        # Slots were released by message before: half of the time is theirs to end by themselves.
        for thread in self._threads:
            thread.join(max(0.0, deadline - timeout / 2 - self._clock.now()))
        for process in list(self._processes.values()):
            process.kill()
        for thread in self._threads:
            thread.join(max(0.0, deadline - self._clock.now()))
        return [thread.name for thread in self._threads if thread.is_alive()]

    def _carry(self, job: int) -> None:
        host = self._pool.acquire(job)
        if host is None:
            return
        try:
            reason = self._run(job, host)
        finally:
            self._pool.release(host)
        if not self._closing.is_set():
            assert self._post is not None
            self._post(LaunchEnded(self._clock.now(), job, reason))

    def _run(self, job: int, host: str) -> str:
        contact = self._contact
        assert contact is not None
        order = SlotOrder(
            address=contact.address,
            key=contact.key.hex(),
            attempt=contact.attempt,
            certificate=contact.certificate,
            job=job,
            host=host,
            preload=self._preload,
            imports=self._imports,
            parent=os.getpid(),
            settings=self._settings,
        )
        try:
            process = _process()
        except OSError as error:  # no memory, process or descriptor is left just now: the job asks again
            return f"the slot's process could not be started ({error})"
        self._processes[job] = process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with process.stdin as pipe:
                pipe.write(order.to_json().encode() + b"\n" + self._payload)
        except BrokenPipeError:
            pass  # it was killed meanwhile; its exit code says how
        with process.stdout as pipe:
            reason = pipe.read().decode(errors="replace")
        code = process.wait()
        return reason if code == 0 else f"the slot process ended with {code}"


def _process() -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "spark_elastic.local.slot"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,  # why it ended
        # As Spark does for its Python workers: several of them with a thread per core stand in each other's way.
        env={
            "OMP_NUM_THREADS": "1",
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        },
    )


# What workers of a local job print: as of any job, and in files, `rank.N/stdout`, whole.
#
# Called from the driver's threads; one lock owns the files.


class FileListener:
    """`launch.JobListener`. shown: on the screen. folder: where files go, one folder a rank; None for none."""

    def __init__(self, shown: OutputListener, folder: Path | None = None) -> None:
        self._shown = shown
        self._folder = folder
        self._files: dict[str, IO[str]] = {}
        self._lock = threading.Lock()

    def log(self, rank: int | None, line: str) -> None:
        self._shown.log(rank, line)
        with self._lock:
            if self._folder is not None:
                file = self._file("none" if rank is None else str(rank), self._folder)
                file.write(line + "\n")
                file.flush()

    def progress(self, numbers: Mapping[str, Any]) -> None:
        self._shown.progress(numbers)

    def world(self, size: int, reason: str) -> None:
        """It is told with its cost, once it stands."""

    def tell(self, text: str) -> None:
        self._shown.tell(f"[driver] {text}")

    def close(self) -> None:
        self._shown.close()
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()
            self._folder = None

    def _file(self, who: str, folder: Path) -> IO[str]:
        """Workers outside a world write to `rank.none`."""
        if who not in self._files:
            path = folder / f"rank.{who}"
            path.mkdir(parents=True, exist_ok=True)
            self._files[who] = (path / "stdout").open("a", encoding="utf-8")
        return self._files[who]
