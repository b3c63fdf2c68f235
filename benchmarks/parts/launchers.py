"""How each peer of the head to head is started, and how its hosts come, leave and die. It measures nothing.

A host has one worker. `start` brings all of them; host 1 may be taken away and come back, host 0 stays: torchrun's and
Ray's coordinators live there, and ours.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / "benchmarks" / "peers"
HOSTS = 2
# Installed in this order into build/peers/NAME; a peer without them runs in this program's own environment.
REQUIREMENTS = {
    "ray": ("torch==2.13.0", "numpy==2.4.6", "ray[train]==2.60.0"),
    # The release 0.2.0 fails together with its peer: `assert fut._fut` in its DDP hook. This one goes on.
    "torchft": ("torch==2.13.0", "numpy==2.4.6", "torchft-nightly==2026.10.26", "torchdata==0.11.0"),
    # Of benchmarks/row_loader.py.
    "row_loader": ("torch==2.13.0", "numpy==2.4.6", "litdata==0.2.76", "pylance==14.0.2"),
}


def install(name: str) -> Path:
    """The Python of a peer's environment, which is made at the first call."""
    if name not in REQUIREMENTS:
        return Path(sys.executable)
    python = ROOT / "build" / "peers" / name / "bin" / "python"
    finished, wanted = python.parents[1] / "finished", "\n".join(REQUIREMENTS[name]) + "\n"
    if not finished.exists() or finished.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", str(python.parents[1])], check=True)
        for requirement in REQUIREMENTS[name]:
            subprocess.run([python, "-m", "pip", "install", "-q", requirement], check=True)
        finished.write_text(wanted)
    return python


class Launcher:
    """A job of one peer in a folder of its own, where its logs stay."""

    name = ""
    driver = "driver"  # the process that coordinates the others

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._python = install(self.name)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._commands: dict[str, tuple[list[object], dict[str, str]]] = {}
        self._is_supervised = False
        own = {"HEAD_TO_HEAD": str(folder), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self._environment = {**os.environ, **own}

    def start(self) -> None:
        for host in range(HOSTS):
            self.add_host(host)

    def add_host(self, host: int) -> None:
        raise NotImplementedError

    def remove_host(self, host: int) -> None:
        """It leaves with notice: SIGTERM."""
        self._processes.pop(f"host-{host}").terminate()

    def kill_host(self, host: int, worker: int) -> None:
        """All of its processes get SIGKILL at once. worker: the process id of its worker."""
        kill_tree(self._processes.pop(f"host-{host}").pid)

    def find_host(self, host: int, worker: int) -> psutil.Process:
        """The process of which all others of the host descend."""
        return psutil.Process(self._processes[f"host-{host}"].pid)

    def kill_driver(self) -> None:
        """SIGKILL to what coordinates. From now on what dies is started again, as a cluster's manager does it."""
        self._is_supervised = True
        os.kill(self._processes[self.driver].pid, signal.SIGKILL)

    def supervise(self) -> None:
        for key, process in list(self._processes.items()) if self._is_supervised else []:
            if process.poll():
                command, variables = self._commands[key]
                self._run(key, command, **variables)

    def find_worker(self, host: int, members: list[int]) -> int:
        """Which of the job's worker processes runs on that host."""
        owner = self._processes[f"host-{host}"].pid
        return next(pid for pid in members if owner in [p.pid for p in psutil.Process(pid).parents()])

    def has_ended(self) -> bool:
        """No process of the job is left to wait for."""
        return all(map(self._is_over, self._processes))

    def _is_over(self, key: str) -> bool:
        """It ended, and is not about to be started again."""
        code = self._processes[key].poll()
        return code is not None and not (self._is_supervised and code)

    def close(self) -> None:
        for process in self._processes.values():
            kill_tree(process.pid)
            process.wait(30)

    def _run(self, key: str, command: list[object], **variables: str) -> None:
        self._commands[key] = command, variables
        words, environment = [str(word) for word in command], {**self._environment, **variables}
        with (self.folder / f"{key}.log").open("ab") as log:
            self._processes[key] = subprocess.Popen(words, env=environment, stdout=log, stderr=log)


class SparkElastic(Launcher):
    """`spark-elastic-run`, whose discovery script lists one or two slots of this machine."""

    name = "spark_elastic"
    arguments: tuple[str, ...] = ()

    def start(self) -> None:
        self._list(HOSTS)
        script = self.folder / "hosts.sh"
        script.write_text(f"#!/bin/sh\ncat '{self.folder}/hosts'\n")
        script.chmod(0o755)
        code = "import sys; from spark_elastic.clusters.cli import main; sys.exit(main())"
        command = [self._python, "-c", code, "-np", HOSTS, "--min-np", 1, "--max-np", HOSTS, "--verbose"]
        command += ["--run-id", "run", "--store", self.folder / "store", "--restarts", 3]
        command += ["--host-discovery-script", script, "python"]
        command += [PEERS / "elastic_loop.py", *self.arguments]
        path = os.pathsep.join(map(str, (ROOT, ROOT / "python", PEERS)))
        self._run("driver", command, PYTHONPATH=path)

    def kill_driver(self) -> None:
        """What `--restarts` starts again."""
        self._find_driver().kill()

    def _find_driver(self) -> psutil.Process:
        (driver,) = psutil.Process(self._processes["driver"].pid).children()
        return driver

    def find_worker(self, host: int, members: list[int]) -> int:
        return members[host]

    def add_host(self, host: int) -> None:
        self._list(HOSTS)

    def remove_host(self, host: int) -> None:
        self._list(HOSTS - 1)

    def find_host(self, host: int, worker: int) -> psutil.Process:
        """The slot's process; the driver has other children, too."""
        driver = self._find_driver().pid
        line = [psutil.Process(worker), *psutil.Process(worker).parents()]
        return next(process for process in line if process.ppid() == driver)

    def kill_host(self, host: int, worker: int) -> None:
        slot = self.find_host(host, worker)
        self._list(HOSTS - 1)
        kill_tree(slot.pid)

    def _list(self, slots: int) -> None:
        (self.folder / "hosts.new").write_text(f"localhost:{slots}\n")
        os.replace(self.folder / "hosts.new", self.folder / "hosts")


class SparkElasticBitwise(SparkElastic):
    """The same, with the same bits after any faults."""

    name = "spark_elastic_bitwise"
    arguments = ("bitwise",)


class Torchrun(Launcher):
    """An agent per host, `--nnodes=1:2`, rendezvous by c10d on host 0."""

    name = "torchrun"
    driver = "host-0"

    def add_host(self, host: int) -> None:
        command = [self._python, "-m", "torch.distributed.run", f"--nnodes=1:{HOSTS}", "--nproc-per-node=1"]
        command += ["--max-restarts=100", "--rdzv-id=job", "--rdzv-backend=c10d"]
        command += ["--rdzv-endpoint=127.0.0.1:29544", "--local-addr=127.0.0.1"]
        # All hosts have this machine's name, so that torchrun would let whoever comes first keep the store.
        command += [f"--rdzv-conf=is_host={str(host == 0).lower()}", PEERS / "torchrun_ddp.py"]
        # Without it, restarted workers dial the addresses of the world before and the job does not recover.
        self._run(f"host-{host}", command, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")

    def kill_driver(self) -> None:
        """The agent of host 0, which is the first process of its container: its worker dies with it."""
        self._is_supervised = True
        kill_tree(self._processes[self.driver].pid)


class Ray(Launcher):
    """A head without CPUs and a node with one CPU per host; the driver connects to the head."""

    name = "ray"
    _address = "127.0.0.1:6399"

    def start(self) -> None:
        self._node("head", "--head", "--port=6399", "--num-cpus=0", "--include-dashboard=false")
        self._await_node("head")
        for host in range(HOSTS):
            self.add_host(host)
            self._await_node(f"host-{host}")  # so that the job begins with all workers
        self._run("driver", [self._python, PEERS / "ray_train.py"], RAY_ADDRESS=self._address)

    def add_host(self, host: int) -> None:
        self._node(f"host-{host}", f"--address={self._address}", "--num-cpus=1")

    def _await_node(self, key: str) -> None:
        log, deadline = self.folder / f"{key}.log", time.time() + 90
        while "Ray runtime started" not in log.read_text():
            if time.time() > deadline or self._processes[key].poll() is not None:
                sys.exit(f"a node of Ray did not start: see {log}")
            time.sleep(0.2)

    def has_ended(self) -> bool:
        return self._is_over("driver")

    def _node(self, key: str, *options: str) -> None:
        ray = self._python.parent / "ray"
        usual = ["--block", "--disable-usage-stats", "--object-store-memory=100000000"]
        self._run(key, [ray, "start", *usual, *options])


class Torchft(Launcher):
    """A lighthouse, and torchrun with one worker per replica group."""

    name = "torchft"
    driver = "lighthouse"

    def start(self) -> None:
        lighthouse = [self._python.parent / "torchft_lighthouse", "--min_replicas=1", "--quorum_tick_ms=100"]
        self._run("lighthouse", [*lighthouse, "--join_timeout_ms=10000", "--bind=127.0.0.1:29510"])
        super().start()

    def add_host(self, host: int) -> None:
        command = [self._python, "-m", "torch.distributed.run", f"--master-port={29600 + host}", "--nnodes=1"]
        command += ["--nproc-per-node=1", "--max-restarts=100", PEERS / "torchft_ddp.py"]
        variables = {"REPLICA_GROUP_ID": str(host), "NUM_REPLICA_GROUPS": str(HOSTS)}
        self._run(f"host-{host}", command, TORCHFT_LIGHTHOUSE="http://127.0.0.1:29510", **variables)

    def has_ended(self) -> bool:
        return all(self._is_over(key) for key in self._processes if key != "lighthouse")


LAUNCHERS: dict[str, type[Launcher]] = {
    launcher.name: launcher for launcher in (SparkElastic, SparkElasticBitwise, Torchrun, Ray, Torchft)
}


def kill_tree(pid: int) -> None:
    """SIGKILL to a process and all that it has started."""
    try:
        process = psutil.Process(pid)
        victims = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for victim in victims:
        try:
            victim.kill()
        except psutil.NoSuchProcess:
            continue
