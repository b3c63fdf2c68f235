"""Starts slots as processes of this machine: `driver.ports.Launcher` without a cluster.

One thread per slot job: it waits for room, starts the slot's process and waits for its end, which it posts.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import cloudpickle

from spark_elastic.clock import Clock
from spark_elastic.driver.ports import Contact, Post
from spark_elastic.local.order import SlotOrder, SlotSettings
from spark_elastic.local.places import Places
from spark_elastic.protocol.events import SlotJobEnded
from spark_elastic.worker.forking import importable


class LocalLauncher:
    """Killing a slot's process loses the slot and its worker, as losing an executor with one slot would."""

    def __init__(
        self,
        program: object,
        places: Places,
        clock: Clock,
        preload: tuple[str, ...] = (),
        settings: SlotSettings | None = None,
    ) -> None:
        self._payload = cloudpickle.dumps(program)
        self._places = places
        self._clock = clock
        self._preload = preload
        self._settings = settings or SlotSettings()
        self._imports = importable(program, preload, self._settings.fork_workers)
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
        self._places.close()
        # Slots were released by message before: half of the time is theirs to end by themselves.
        for thread in self._threads:
            thread.join(max(0.0, deadline - timeout / 2 - self._clock.now()))
        for process in list(self._processes.values()):
            process.kill()
        for thread in self._threads:
            thread.join(max(0.0, deadline - self._clock.now()))
        return [thread.name for thread in self._threads if thread.is_alive()]

    def _carry(self, job: int) -> None:
        host = self._places.take(job)
        if host is None:
            return
        try:
            reason = self._run(job, host)
        finally:
            self._places.give_back(host)
        if not self._closing.is_set():
            assert self._post is not None
            self._post(SlotJobEnded(self._clock.now(), job, reason))

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
