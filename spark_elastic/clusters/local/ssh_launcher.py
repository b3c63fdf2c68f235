"""Starts slots on several machines: on this one as `LocalLauncher` does, on others through ssh, one process per slot.

The thread of a slot runs its ssh. At the start of a job the hosts are checked side by side, in threads that end with
the check.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import spark_elastic
from spark_elastic.clock import Clock
from spark_elastic.clusters.local.launcher import LocalLauncher, SlotPool, find_remote_hosts
from spark_elastic.clusters.local.slot import REFUSED
from spark_elastic.clusters.local.ssh import (
    BOOTSTRAP,
    RemoteEnd,
    SshOptions,
    SshProcess,
    export_environment,
    make_header,
)
from spark_elastic.config import ElasticConfig
from spark_elastic.errors import DriverUnreachable, PreflightError
from spark_elastic.rendezvous.addresses import find_address_towards, is_own_address

LOOPBACK = "127.0.0.1"
ANY_ADDRESS = "0.0.0.0"
SOMEWHERE = "192.0.2.1"  # reserved for documentation: the way to it is the default route
LOGINS_AT_ONCE = (
    5  # of one host; an sshd refuses some of more than ten that have not authenticated themselves yet
)
CHECKS_AT_ONCE = 32
# Runs on the other host with the job's environment. Arguments: what to do, the package's version, Python's or "".
_START = f"""
import sys
def refuse(why):
    sys.stdout.write(why)
    sys.exit({REFUSED})
what, version, python = sys.argv[1:]
here = "%d.%d" % sys.version_info[:2]
if python and python != here:
    refuse(f"{{sys.executable}} is Python {{here}} there and {{python}} here: all hosts need the same")
try:
    from spark_elastic import __version__ as found
except ImportError as error:
    refuse(f"{{sys.executable}} has no spark_elastic there ({{error}}): install spark_elastic {{version}} on that host")
if found != version:
    refuse(f"it has spark_elastic {{found}}, and this machine has {{version}}: install the same")
try:
    from spark_elastic.clusters.local import slot
except ImportError as error:
    refuse(f"spark_elastic cannot be imported there ({{error}}): install it on that host with all that it needs")
getattr(slot, what)()
"""

log = logging.getLogger("spark_elastic")


class SshLauncher(LocalLauncher):
    """`LocalLauncher` whose hosts may be other machines."""

    def __init__(
        self,
        program: object,
        pool: SlotPool,
        clock: Clock,
        ssh: SshOptions,
        preload: tuple[str, ...] = (),
        interpreter: str = sys.executable,
    ) -> None:
        super().__init__(program, pool, clock, preload, interpreter)
        self._ssh = ssh
        self._logins: defaultdict[str, threading.Semaphore] = defaultdict(
            lambda: threading.Semaphore(LOGINS_AT_ONCE)
        )
        self._lock = threading.Lock()  # owns _logins and the two below
        self._told: dict[str, str] = {}  # host -> why it last failed
        self._checks: set[subprocess.Popen[bytes]] = set()

    def check_hosts(self, hosts: Mapping[str, int], needed: int) -> None:
        """Try each of the other hosts; log why one cannot run workers.

        Args:
            needed: slots without which the job cannot begin.

        Raises:
            PreflightError: the hosts that can run workers have fewer slots, though all of them have enough.
        """
        others = find_remote_hosts(hosts)
        if not others:
            return
        failures: dict[str, str] = {}
        with ThreadPoolExecutor(CHECKS_AT_ONCE, "spark-elastic-check") as threads:
            try:
                for host, why in zip(others, threads.map(self._check, others), strict=True):
                    if why:
                        failures[host] = why
            except BaseException:  # such as Ctrl-C: the job is over
                self._closing.set()
                self._kill_checks()
                threads.shutdown(wait=False, cancel_futures=True)
                raise
        left = sum(slots for host, slots in hosts.items() if host not in failures)
        if left < needed <= sum(hosts.values()):
            rest = f"the other hosts have {left} slots, and the job needs {needed}."
            raise PreflightError("; ".join((*failures.values(), rest)))
        for host, why in failures.items():
            self._tell(host, why)

    def cancel(self) -> None:
        self._kill_checks()
        super().cancel()

    def run_process(self, launch: int, host: str) -> str:
        if not find_remote_hosts({host: 1}):
            return super().run_process(launch, host)
        with self._lock:
            logins = self._logins[host]
        logins.acquire()
        logged_in = threading.Event()

        def free_login() -> None:
            if not logged_in.is_set():
                logged_in.set()
                logins.release()

        try:
            if self._closing.is_set():
                return "the job is over"
            process = SshProcess.start(self._build_command(host), self._clock)
            self.processes[launch] = process.process
            process.on_ready = free_login
            end = process.run(self._make_header("main") + self.describe(launch, host, parent=None))
        except OSError as error:  # as of `LocalLauncher.run_process`
            return f"ssh could not be started ({error})"
        finally:
            free_login()
        if end.code == 0:
            return end.output
        if end.was_ready and end.code != REFUSED:
            return f"the slot on host {host} ended: {end.explain()}"
        why = _explain(host, end)
        if not self._closing.is_set():
            self._tell(host, why)
        return why

    def _check(self, host: str) -> str:
        """Why the host cannot run workers, "" if it can."""
        with self._lock:
            if self._closing.is_set():
                return ""
            try:
                process = SshProcess.start(self._build_command(host), self._clock)
            except OSError as error:
                return f"ssh could not be started ({error})"
            self._checks.add(process.process)
        end = process.run(self._make_header("check") + f"{self.spec.address}\n".encode())
        with self._lock:
            self._checks.discard(process.process)
        return "" if end.code == 0 else _explain(host, end)

    def _kill_checks(self) -> None:
        with self._lock:
            for process in self._checks:
                process.kill()

    def _tell(self, host: str, why: str) -> None:
        """Once for each new reason: its slots are launched again and again."""
        with self._lock:
            if self._told.get(host) == why:
                return
            self._told[host] = why
        log.warning("%s; the job uses the host as soon as it can.", why)

    def _build_command(self, host: str) -> list[str]:
        return self._ssh.build_command(host, self.interpreter, "-I", "-S", "-c", BOOTSTRAP)

    def _make_header(self, what: str) -> bytes:
        """what: a function of `local.slot`."""
        own = f"{sys.version_info.major}.{sys.version_info.minor}"
        python = own if self.interpreter == sys.executable else ""
        environment = {"OMP_NUM_THREADS": "1", **export_environment(os.environ)}
        return make_header(os.getcwd(), ["-c", _START, what, spark_elastic.__version__, python], environment)


def _explain(host: str, end: RemoteEnd) -> str:
    why = end.output.strip() if end.was_ready and end.code == REFUSED else end.explain()
    return f"host {host} cannot run workers: {why}"


def choose_addresses(config: ElasticConfig, others: list[str], ssh: SshOptions) -> tuple[str, str]:
    """Where the driver's server listens, and what the workers of all hosts dial.

    Args:
        others: hosts that are not this machine; empty if they are not known yet.
    """
    advertise = config.advertise_address or _find_own_address([ssh.resolve(host) for host in others])
    bind = advertise if is_own_address(advertise) else ANY_ADDRESS
    return config.bind_address or bind, advertise


def _find_own_address(others: list[str]) -> str:
    """This machine's address on the way to other hosts, or to anywhere; the loopback address if it has no other."""
    for host in [*others, SOMEWHERE, socket.gethostname()]:
        try:
            found = find_address_towards(host, 1)
        except DriverUnreachable:
            continue
        if not found.startswith("127."):
            return found
    return LOOPBACK
