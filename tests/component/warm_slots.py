"""Slots whose processes stay for later jobs, as Spark keeps its Python workers: a slot forks training processes from a
server, which has imported for the jobs before what the next one needs, too.

`python -m tests.component.warm_slots` is such a process, until its standard input ends.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from typing import Any, ClassVar

from spark_elastic.clusters.local.launcher import LocalSlot, serve
from spark_elastic.driver.ports import Post
from spark_elastic.protocol.types import SlotSpec
from spark_elastic.rendezvous import codec
from spark_elastic.testing.fakes import ProcessLauncher
from spark_elastic.worker.forking import fork_server_cache
from spark_elastic.worker.handover import describe_exit
from tests.leaks import SessionOwned

MOST = 4  # processes that wait for a job
# What most jobs of torch import. After these, others of this package take no time: processes import them themselves.
WITH_TORCH = "numpy", "numpy.typing", "spark_elastic.torch", "spark_elastic.handwritten.object_state"
OURS = re.compile(r"spark_elastic\.[\w.]+")  # without the aliases, which are optional: with a "?"
# Variables that pytest and libraries set in this process: another environment would need another server.
LEFT_OUT = ("PYTEST_", "ACCELERATE_", "PYTORCH_", "TORCHINDUCTOR_")
Process = subprocess.Popen[bytes]


class WarmSlots:
    """The processes that wait for a job. Any thread."""

    def __init__(self, owned: SessionOwned) -> None:
        self._owned = owned
        self._lock = threading.Lock()
        self._idle: list[tuple[Process, tuple[str, ...]]] = []  # with the imports of its newest job
        self._modules: dict[tuple[str, ...], dict[str, None]] = {}  # that jobs with these variables import

    def widen(self, imports: tuple[str, ...]) -> tuple[str, ...]:
        """A job's imports, as modules, and those of the jobs before it with the same variables, so that servers need
        not begin anew."""
        variables = tuple(text for text in imports if "=" in text)
        known = self._modules.setdefault(variables, {})
        for name in (text.partition(":")[0] for text in imports if "=" not in text):
            is_quick = OURS.fullmatch(name) or name.partition(".")[0] in sys.stdlib_module_names
            if not is_quick and not any(f"{other}.".startswith(f"{name}.") for other in known):
                known.update(dict.fromkeys((name, *WITH_TORCH) if name.startswith("torch") else [name]))
        return (*variables, *known)

    def take(self, imports: tuple[str, ...]) -> Process:
        """One whose server has these imports, or a new one."""
        with self._lock:
            fitting = [each for each in self._idle if each[1] == imports]
            if fitting:
                self._idle.remove(fitting[-1])
                return fitting[-1][0]
        return self._start()

    def give_back(self, process: Process, imports: tuple[str, ...]) -> None:
        with self._lock:
            self._idle.append((process, imports))
            surplus, self._idle = self._idle[:-MOST], self._idle[-MOST:]
        for other, _ in surplus:
            end(other)

    def close(self) -> None:
        for process, _ in self._idle:
            end(process)

    def _start(self) -> Process:
        command = [sys.executable, "-m", "tests.component.warm_slots"]
        path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = subprocess.Popen(command, env=os.environ | path, **pipes)
        self._owned.processes.add(process.pid)
        for stream in filter(None, (process.stdin, process.stdout)):
            number = stream.fileno()
            self._owned.descriptors.add((number, os.readlink(f"/proc/self/fd/{number}")))
        return process


def end(process: Process) -> int:
    """Its exit code."""
    for stream in filter(None, (process.stdin, process.stdout)):
        stream.close()
    return process.wait()


class WarmLauncher(ProcessLauncher):
    """`ProcessLauncher` on those processes, where there is a pool of them."""

    pool: ClassVar[WarmSlots | None] = None

    def start(self, spec: SlotSpec, post: Post) -> None:
        super().start(spec, post)
        if self.pool is not None:
            self.spec = replace(self.spec, imports=self.pool.widen(self.spec.imports), fork_workers=True)

    def kill(self, launch: int, sig: int = signal.SIGKILL) -> None:
        if launch in self.processes:  # else it has ended, and its process may be another job's
            super().kill(launch, sig)

    def run_process(self, launch: int, host: str) -> str:
        if self.pool is None:
            return super().run_process(launch, host)
        process = self.processes[launch] = self.pool.take(self.spec.imports)
        variables = {name: value for name, value in os.environ.items() if not name.startswith(LEFT_OUT)}
        variables |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps({"OMP_NUM_THREADS": "1"} | variables).encode() + b"\n")
            process.stdin.write(self.describe(launch, host, os.getpid()))
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it was killed meanwhile; its exit code says how
        if not (said := process.stdout.readline()):
            return f"the slot process ended: {describe_exit(end(process))}"
        del self.processes[launch]
        self.pool.give_back(process, self.spec.imports)
        return str(json.loads(said))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    jobs = sys.stdin.buffer
    while variables := jobs.readline():
        os.environ.clear()
        os.environ.update(json.loads(variables))
        slot = codec.from_line(LocalSlot, jobs.readline())
        sys.stdout.write(json.dumps(serve(slot, jobs.read(slot.size))) + "\n")
        sys.stdout.flush()
    fork_server_cache.close()


if __name__ == "__main__":
    main()
