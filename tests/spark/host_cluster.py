"""A Spark standalone cluster over hosts that share nothing: the master, drivers and an S3 server are on host 0.

Spark gets no address: its daemons, drivers and executors go by the names of their hosts, as on machines. Executors have
what the package depends on, and not the package itself: jobs ship it.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyspark

from tests.hosts import Hosts
from tests.sources import LIGHT_START, ROOT
from tests.spark.cluster import EXECUTOR, await_true, cluster_environment, kill, read_command

S3 = ROOT / "build" / "s3"  # what S3 needs beside .venv
SPARK = Path(pyspark.__file__).parent
MASTER = "spark://h0:7077"
PRIVATE = Path("/tmp")  # a folder that each host has for itself
SETTINGS = {
    "spark.executor.cores": "1",
    "spark.executor.memory": "512m",
    "spark.driver.memory": "512m",
    "spark.ui.enabled": "false",
    "spark.decommission.enabled": "true",
}


class Job:
    """A program under spark-submit on a host. Each line of its output that is a JSON object is what it tells."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        self._log = log
        self._told: queue.Queue[dict[str, Any]] = queue.Queue()
        self.output: list[str] = []
        self._thread = threading.Thread(target=self._listen, name="job")
        self._thread.start()

    def await_message(self, seconds: float = 400.0, **wanted: object) -> dict[str, Any]:
        """What it tells next with these values; a value of `...` may be any."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                told = self._told.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise TimeoutError(f"nothing with {wanted} in {seconds:.0f} s:\n{self.tail()}") from None
            if "ended" in told and "ended" not in wanted:
                raise RuntimeError(f"it ended with {told['ended']} and did not tell {wanted}:\n{self.tail()}")
            if all(name in told and value in (..., told[name]) for name, value in wanted.items()):
                return told

    def end(self, seconds: float = 400.0) -> int:
        """Its exit status."""
        return int(self.await_message(seconds, ended=...)["ended"])

    def tail(self) -> str:
        return "\n".join(self.output[-40:]) + "\n" + self._log.read_text(errors="replace")[-6000:]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._thread.join()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            for line in pipe:
                text = line.decode(errors="replace").rstrip()
                if text.startswith("{"):
                    self._told.put(json.loads(text))
                else:
                    self.output.append(text)
        self._told.put({"ended": self._process.wait()})


class HostCluster:
    """`with HostCluster(4, folder) as cluster:` hosts h1 to h4 have a Spark worker of one core each, h5 has none."""

    def __init__(self, workers: int, folder: Path) -> None:
        """folder: of the machine, for logs."""
        self.hosts = Hosts(workers + 2)
        self.nodes = range(1, workers + 1)
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._jobs: list[Job] = []

    def __enter__(self) -> HostCluster:
        self.hosts.__enter__()
        try:
            moto = ["-m", "moto.server", "-H", "0.0.0.0", "-p", "5000"]
            self._spawn(0, "s3", self._environment(0), sys.executable, *moto)
            self._start_daemon(0, "master.Master", "--host", "h0", "--port", "7077", "--webui-port", "0")
            self._await_line(0, "master.Master", "New state: ALIVE")
            for node in self.nodes:
                self.start_worker(node, wait=False)
            for node in self.nodes:
                self._await_line(node, "worker.Worker", "Successfully registered")
            self._await_line(0, "s3", "Running on")
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start_worker(self, node: int, wait: bool = True) -> None:
        """A Spark worker on a host; each of them has a log of its own."""
        place = ("--host", self.hosts.name(node), "--webui-port", "0", "-d", str(PRIVATE / "work"))
        self._start_daemon(node, "worker.Worker", *place, "-c", "1", "-m", "1g", MASTER)
        if wait:
            self._await_line(node, "worker.Worker", "Successfully registered")

    def submit(self, program: Path, *arguments: str, node: int = 0, settings: Mapping[str, str] = {}) -> Job:
        """spark-submit in client mode, on that host."""
        words = [str(SPARK / "bin" / "spark-submit"), "--master", MASTER]
        for name, value in (SETTINGS | settings).items():
            words += ["--conf", f"{name}={value}"]
        log = self._folder / f"job{len(self._jobs)}.log"
        with log.open("wb") as errors:
            process = subprocess.Popen(
                self.hosts.build_command(node, *words, str(program), *arguments),
                env=self._environment(node, driver=True),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        self._jobs.append(Job(process, log))
        return self._jobs[-1]

    def processes(self, node: int, word: str) -> list[psutil.Process]:
        """Those of a host whose command line has that word, in the order of their start."""
        found = [psutil.Process(pid) for pid in sorted(self.hosts.pids(node))]
        return [process for process in found if any(word in each for each in read_command(process))]

    def kill_executor(self, node: int) -> None:
        self._kill(node, EXECUTOR)

    def kill_training(self, node: int) -> None:
        """The training process and the spare of a host; its slot stays."""
        self._kill(node, "spark_elastic.worker.entry")

    def decommission(self, node: int) -> None:
        """Notice, as a spot instance gives it: Spark's worker tells its executors."""
        found = self.processes(node, "org.apache.spark.deploy.worker.Worker")
        (worker,) = [process for process in found if process.name() == "java"]
        worker.send_signal(signal.SIGPWR)

    def end_slow_steps(self) -> None:
        """From now on steps of `host_job.py` take no time."""
        for node in self.nodes:
            self.hosts.file(node, str(PRIVATE / "over")).touch()

    def stop(self) -> None:
        self.hosts.__exit__(None, None, None)
        for job in self._jobs:
            job.close()
        for process in self._processes:
            process.kill()
            process.wait()

    def _kill(self, node: int, word: str) -> None:
        victims = self.processes(node, word)
        if not victims:
            raise ValueError(f"host {node} has no process {word}")
        for process in victims:
            kill(process)  # it may have ended with the one before

    def _start_daemon(self, node: int, name: str, *arguments: str) -> None:
        command = [str(SPARK / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}", *arguments]
        self._spawn(node, name, self._environment(node), *command)

    def _spawn(self, node: int, name: str, environment: Mapping[str, str], *command: str) -> None:
        with self._log(node, name).open("wb") as log:
            process = subprocess.Popen(
                self.hosts.build_command(node, *command),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self._processes.append(process)

    def _log(self, node: int, name: str) -> Path:
        return self._folder / f"{self.hosts.name(node)}-{name}.log"

    def _await_line(self, node: int, name: str, text: str) -> None:
        log = self._log(node, name)
        await_true(lambda: text in log.read_text(errors="replace"), f"{text!r} in {log}", 120.0)

    def _environment(self, node: int, driver: bool = False) -> dict[str, str]:
        """What a host's image has: Python with the dependencies, and for a driver also the package and the tests."""
        packages = [str(S3), str(Path(np.__file__).parents[1]), str(LIGHT_START)]
        own = [str(ROOT), str(ROOT / "python")] if driver else []
        environment = os.environ | cluster_environment()
        del environment["SPARK_LOCAL_IP"]
        return environment | {
            "HOME": "/tmp",
            "SPARK_HOME": str(SPARK),
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_WORKER_OPTS": "-Dspark.decommission.enabled=true",
            # The Python behind the virtual environment does not read its .pth files, which name this repository.
            "PYSPARK_PYTHON": str(Path(sys.executable).resolve()),
            "PYSPARK_DRIVER_PYTHON": sys.executable,
            "PYTHONPATH": os.pathsep.join([*own, *packages]),
            "AWS_ENDPOINT_URL": "http://h0:5000",
            "AWS_ACCESS_KEY_ID": "someone",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "OMP_NUM_THREADS": "1",
        }
