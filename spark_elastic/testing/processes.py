"""Slots as plain processes of this machine: the whole elastic machinery without Spark or a JVM.

`ProcessLauncher` implements `driver.ports.Launcher`. Every slot is a process of its own and plays one host unless
told otherwise; killing it loses the host. Run as a module, this file is such a slot.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading

import cloudpickle

from spark_elastic.clock import Clock, SystemClock
from spark_elastic.driver.ports import Contact, Post
from spark_elastic.protocol.events import SlotJobEnded
from spark_elastic.rendezvous.client import RendezvousClient
from spark_elastic.worker.entry import Header, die_with_parent
from spark_elastic.worker.slot_agent import SlotAgent, SlotPlan


class ProcessLauncher:
    """Starts slots as processes. `slots_per_host` of them share a host name."""

    def __init__(
        self,
        program: object,
        clock: Clock,
        preload: tuple[str, ...] = (),
        slots_per_host: int = 1,
        room: int = 1000,
    ) -> None:
        """room: how many slots this make-believe cluster has; further jobs stay pending, as at Spark."""
        self._payload = cloudpickle.dumps(program)
        self._clock = clock
        self._preload = preload
        self._per_host = slots_per_host
        self._room = threading.Semaphore(room)
        self._closing = threading.Event()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._threads: list[threading.Thread] = []
        self._contact: Contact | None = None
        self._post: Post | None = None

    def start(self, contact: Contact, post: Post) -> None:
        self._contact, self._post = contact, post

    def launch(self, job: int, delay: float) -> None:
        thread = threading.Thread(target=self._carry, args=(job, delay), name=f"slot job {job}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def add_room(self, slots: int) -> None:
        """New hosts arrive: pending slot jobs start."""
        for _ in range(slots):
            self._room.release()

    def slots(self) -> dict[int, int]:
        """Living slot processes: job number -> process id."""
        return {job: process.pid for job, process in list(self._processes.items()) if process.poll() is None}

    def kill(self, job: int, sig: int = signal.SIGKILL) -> None:
        """Signal a slot process; its training child dies with it."""
        self._processes[job].send_signal(sig)

    def close(self, timeout: float) -> list[str]:
        deadline = self._clock.now() + timeout
        for thread in self._threads:
            thread.join(max(0.0, (deadline - self._clock.now()) / 2) if not self._closing.is_set() else 0.0)
        self._closing.set()
        self._room.release(len(self._threads) or 1)
        for process in list(self._processes.values()):
            process.kill()
        for thread in self._threads:
            thread.join(max(0.0, deadline - self._clock.now()))
        return [thread.name for thread in self._threads if thread.is_alive()]

    def _carry(self, job: int, delay: float) -> None:
        if self._closing.wait(delay):
            return
        self._room.acquire()
        try:
            if not self._closing.is_set():
                reason = self._run(job)
                assert self._post is not None
                self._post(SlotJobEnded(self._clock.now(), job, reason))
        finally:
            self._room.release()

    def _run(self, job: int) -> str:
        contact = self._contact
        assert contact is not None
        order = {
            "address": contact.address,
            "key": contact.key.hex(),
            "attempt": contact.attempt,
            "job": job,
            "host": f"host-{job // self._per_host}",
            "preload": self._preload,
            "parent": os.getpid(),
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "spark_elastic.testing.processes"],
            stdin=subprocess.PIPE,
            # As Spark does for its Python workers: several of them with a thread per core stand in each other's way.
            env={
                "OMP_NUM_THREADS": "1",
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            },
        )
        self._processes[job] = process
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(json.dumps(order).encode() + b"\n" + self._payload)
        code = process.wait()
        return "the slot ended" if code == 0 else f"the slot process ended with {code}"


def main() -> None:
    """Be a slot: the order and the program come on standard input."""
    order = json.loads(sys.stdin.buffer.readline())
    payload = sys.stdin.buffer.read()
    # A death signal follows the spawning thread; the launcher's thread outlives its slot.
    die_with_parent(order["parent"])
    host, key, attempt, clock = "127.0.0.1", order["key"], order["attempt"], SystemClock()

    def header(status_fd: int, payload_bytes: int) -> Header:
        return Header(
            parent=os.getpid(),
            address=order["address"],
            key=key,
            attempt=attempt,
            slot=f"{order['job']}-0",
            bind=host,
            port_range=None,
            preload=tuple(order["preload"]),
            collective_timeout=20.0,
            driver_timeout=20.0,
            payload_bytes=payload_bytes,
            status_fd=status_fd,
        )

    plan = SlotPlan(f"{order['job']}-0", order["job"], order["host"], {}, payload, header, 20.0)
    with RendezvousClient(order["address"], bytes.fromhex(key), attempt, clock) as client:
        SlotAgent(plan, client, clock).run()


if __name__ == "__main__":
    main()
