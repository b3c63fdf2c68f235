"""A real Spark standalone cluster on loopback: one master, workers that tests start, lose and replace.

Every process is a plain child of the test process and is killed by the kernel when that dies, so that an
interrupted run leaves nothing. Start workers from the main thread: the kernel's rule is per thread.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pyspark
from pyspark.sql import SparkSession

from tests.sources import PYTHONPATH, ROOT

LOOPBACK = "127.0.0.1"
# Short-lived JVMs: the first compiler tier and the serial collector halve their start on a small machine.
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData"
# The classes that Spark loads, as class_archive.py writes them: a JVM maps them instead of reading them from jars.
CLASS_ARCHIVE = ROOT / "build" / "spark-classes.jsa"
START_SECONDS = 180.0
ENTRY, SERVER = "spark_elastic.worker.entry", "spark_elastic.worker.fork_server"
EXECUTOR = "CoarseGrainedExecutorBackend"  # a word of an executor's command line

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def cluster_environment(scratch: Path | None = None) -> dict[str, str]:
    """What the cluster and its drivers need: loopback, this interpreter, this repository.

    scratch: where they put what a killed JVM cannot remove; default is the system's folder.
    """
    found = {
        "JDK_JAVA_OPTIONS": JAVA_OPTIONS,
        "SPARK_LOCAL_IP": LOOPBACK,
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": PYTHONPATH,
    }
    if CLASS_ARCHIVE.exists():
        # A JVM that cannot use it, because its jars are others, does without and says nothing.
        found["JDK_JAVA_OPTIONS"] += f" -XX:SharedArchiveFile={CLASS_ARCHIVE}"
        found["JDK_JAVA_OPTIONS"] += " -Xlog:cds=off -Xlog:cds+dynamic=off"
    if scratch is not None:
        found["JDK_JAVA_OPTIONS"] += f" -Djava.io.tmpdir={scratch}"
        found["SPARK_LOCAL_DIRS"] = str(scratch)
    return found


def start_session(master: str, **settings: str) -> SparkSession:
    """A small session of a program that prints its own results. settings: `executor_cores` is spark.executor.cores."""
    usual = {"ui_enabled": "false", "driver_host": LOOPBACK}
    usual |= {"driver_memory": "512m", "executor_memory": "512m"}
    named = {f"spark.{name.replace('_', '.')}": value for name, value in (usual | settings).items()}
    spark = SparkSession.builder.master(master).config(map=named).getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    return spark


@dataclass(frozen=True)
class Worker:
    """A worker daemon of Spark: one host of the cluster."""

    number: int
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None


class StandaloneCluster:
    """`with StandaloneCluster(directory) as cluster: cluster.start_worker()`; state and logs lie in `directory`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.scratch = directory / "scratch"
        self._master: subprocess.Popen[bytes] | None = None
        self._started = 0
        self.workers: list[Worker] = []
        self.url = ""

    def __enter__(self) -> StandaloneCluster:
        self.scratch.mkdir(parents=True, exist_ok=True)
        log = self._directory / "master.log"
        self._master = self._spawn(log, "master.Master", "--port", "0")
        try:
            self.url = await_line(log, r"Starting Spark master at (spark://\S+)", self._master)
            await_line(log, r"(New state: ALIVE)", self._master)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def pids(self) -> list[int]:
        """The master and every worker daemon that was started."""
        daemons = [worker.process for worker in self.workers]
        return [process.pid for process in ([self._master, *daemons] if self._master else daemons)]

    def start_worker(self, cores: int = 1, memory: str = "1g", gpus: int = 0) -> Worker:
        """A new host; returns once the master has it. gpus: that it says it has."""
        worker = self._launch_worker(cores, memory, self._claim(gpus))
        await_line(worker.log, r"(Successfully registered with master)", worker.process)
        return worker

    def start_workers(self, count: int, cores: int = 1, memory: str = "1g") -> list[Worker]:
        """Several new hosts, their JVMs started side by side."""
        workers = [self._launch_worker(cores, memory) for _ in range(count)]
        for worker in workers:
            await_line(worker.log, r"(Successfully registered with master)", worker.process)
        return workers

    def kill_worker(self, worker: Worker) -> None:
        """Lose a host at once: its daemon, its executors and all that they run."""
        doomed = [*_children(worker.pid, recursive=True), psutil.Process(worker.pid)]
        for process in doomed:
            kill(process)
        worker.process.wait()
        await_true(lambda: not any(map(_is_running, doomed)), f"worker {worker.number} to be gone")
        self.workers.remove(worker)

    def executor_pids(self) -> list[int]:
        """The JVMs of live executors, of whatever application, in the order of their workers."""
        children = [child for worker in self.workers for child in _children(worker.pid)]
        return [child.pid for child in children if EXECUTOR in " ".join(read_command(child))]

    def busy_executors(self) -> list[int]:
        """Those that train."""
        return [pid for pid in self.executor_pids() if self.training_children(pid)]

    def kill_executor(self, pid: int) -> None:
        """SIGKILL to one executor's JVM, as the kernel does it when memory is short."""
        if pid not in self.executor_pids():
            raise ValueError(f"process {pid} is no executor of this cluster: {self.executor_pids()}")
        os.kill(pid, signal.SIGKILL)

    def slot_tasks(self, executor: int) -> list[psutil.Process]:
        """The Python workers in which Spark runs an executor's tasks: forks of its daemon."""
        return [task for daemon in _children(executor) for task in _children(daemon.pid) if _is_daemon(task)]

    def training_children(self, executor: int) -> list[psutil.Process]:
        """The training processes and warm spares of an executor. A slot task that is over may keep its fork server."""
        tasks = {task.pid for task in self.slot_tasks(executor)}
        everything = (process for process in psutil.process_iter() if ENTRY in read_command(process))
        return [process for process in everything if find_slot(process) in tasks]

    def stop(self) -> None:
        """End everything; raises if a process of the cluster is still there afterwards."""
        daemons = [*filter(None, [self._master]), *(worker.process for worker in self.workers)]
        everything = [child for daemon in daemons for child in _children(daemon.pid, recursive=True)]
        for daemon in daemons:
            daemon.kill()
        for daemon in daemons:
            daemon.wait()
        for process in everything:
            kill(process)
        self.workers, self._master = [], None
        await_true(lambda: not any(map(_is_running, everything)), "the cluster's processes to end")

    def _claim(self, gpus: int) -> tuple[str, ...]:
        """Arguments of a worker daemon that takes devices 0, 1 ... for its own."""
        if gpus == 0:
            return ()
        addresses = ", ".join(f'"{number}"' for number in range(gpus))
        script = self._directory / f"gpus{gpus}.sh"
        script.write_text(f'#!/bin/sh\necho \'{{"name": "gpu", "addresses": [{addresses}]}}\'\n')
        script.chmod(0o755)
        settings = self._directory / f"gpus{gpus}.conf"
        name = "spark.worker.resource.gpu"
        settings.write_text(f"{name}.amount {gpus}\n{name}.discoveryScript {script}\n")
        return "--properties-file", str(settings)

    def _launch_worker(self, cores: int, memory: str, more: tuple[str, ...] = ()) -> Worker:
        self._started += 1
        log = self._directory / f"worker{self._started}.log"
        place = str(self._directory / f"worker{self._started}")
        sizes = ("-c", str(cores), "-m", memory, "-d", place)
        process = self._spawn(log, "worker.Worker", *sizes, *more, self.url)
        worker = Worker(self._started, process, log)
        self.workers.append(worker)
        return worker

    def _spawn(self, log: Path, daemon: str, *arguments: str) -> subprocess.Popen[bytes]:
        home = Path(pyspark.__file__).parent
        command = [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{daemon}"]
        command += ["--host", LOOPBACK, "--webui-port", "0", *arguments]
        daemons = {"SPARK_HOME": str(home), "SPARK_DAEMON_MEMORY": "256m"}
        with log.open("wb") as output:
            return subprocess.Popen(
                command,
                cwd=self._directory,
                env=os.environ | cluster_environment(self.scratch) | daemons,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - one system call, no lock, no allocation
            )


def await_line(log: Path, pattern: str, process: subprocess.Popen[bytes]) -> str:
    """The first group of `pattern` in a daemon's log; its end or long silence is an error with the log."""
    found: list[str] = []

    def find_url() -> bool:
        ended = process.poll() is not None  # before the text: its last line may be the one
        text = log.read_text(errors="replace")
        found.extend(re.findall(pattern, text))
        if not found and ended:
            raise RuntimeError(f"a Spark daemon ended with {process.returncode}:\n{text[-4000:]}")
        return bool(found)

    await_true(find_url, f"{pattern!r} in {log.name}:\n{log.read_text(errors='replace')[-2000:]}")
    return found[0]


def await_true(condition: Callable[[], bool], what: str, seconds: float = START_SECONDS) -> None:
    """Wait until `condition()`; TimeoutError naming `what` otherwise."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:.0f} s for {what}")
        time.sleep(0.02)


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _children(pid: int, recursive: bool = False) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive)
    except psutil.NoSuchProcess:
        return []


def find_executor(process: psutil.Process) -> psutil.Process:
    """The executor's JVM in which a worker runs, or a slot task."""
    slot = psutil.Process(find_slot(process))
    return next(p for p in (slot, *slot.parents()) if EXECUTOR in " ".join(p.cmdline()))


def find_slot(process: psutil.Process) -> int:
    """The slot task of a training process, 0 if it has ended: the parent, or whom the fork server that is the parent
    serves, whose pidfd it holds."""
    try:
        parent = process.ppid()
        if SERVER not in read_command(psutil.Process(parent)):
            return parent
        places = Path(f"/proc/{parent}/fdinfo").iterdir()
        held = {int(pid) for place in places for pid in re.findall(r"^Pid:\s*(\d+)", place.read_text(), re.M)}
        return next(pid for pid in held if psutil.Process(pid).ppid() != parent)
    except (OSError, psutil.NoSuchProcess, StopIteration):
        return 0


def read_command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def _is_daemon(process: psutil.Process) -> bool:
    """Spark's Python daemon and, being its forks, the workers in which tasks run."""
    names = "pyspark.daemon", "pyspark/daemon", "warm_daemon"
    return any(name in word for word in read_command(process) for name in names)


def kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        pass  # it ended by itself


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
