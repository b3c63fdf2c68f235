"""`spark-elastic-run` over hosts that share nothing: workers of other hosts start through their real sshd."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from tests.hosts import PRIVATE, SSHD, Hosts, find_obstacle
from tests.leaks import SessionOwned
from tests.patience import until
from tests.sources import PYTHONPATH, ROOT

NO_SSHD = "" if shutil.which(SSHD) else f"{SSHD} is not installed (package openssh-server)"
MISSING = find_obstacle() or NO_SSHD
pytestmark = [pytest.mark.native, pytest.mark.timeout(120), pytest.mark.skipif(bool(MISSING), reason=MISSING)]

LOOP = Path(__file__).with_name("sum_loop.py")
MARK = "marked-41c7"
TMP = PRIVATE[0]  # of each host its own
SECONDS = 15.0  # in which a mistake is answered, on a busy machine


@pytest.fixture(scope="module")
def hosts(session_owned: SessionOwned) -> Iterator[Hosts]:
    """h0, where jobs are started, and h1 to h4, whose sshd listens at port 2222; h3 has none, h4 lacks the package."""
    with session_owned.adopt():
        made = Hosts(5)
        made.__enter__()
    try:
        for node in (1, 2, 4):
            made.start_sshd(node, 2222)
        # An `ssh` that knows these hosts' keys, before the system's.
        wrapper = made.file(0, f"{TMP}/bin/ssh")
        wrapper.parent.mkdir()
        known = "${KNOWN-/run/ssh/known_hosts}"
        wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -o UserKnownHostsFile={known} "$@"\n')
        wrapper.chmod(0o755)
        ask = [sys.executable, "-I", "-c", "import spark_elastic; print(spark_elastic.__path__[0])"]
        installed = subprocess.run(ask, capture_output=True, text=True, check=False).stdout.split()
        for folder in {str(ROOT / "spark_elastic"), *installed}:
            subprocess.run(made.build_command(4, "mount", "-t", "tmpfs", "tmpfs", folder), check=True)
        yield made
    finally:
        made.__exit__(None, None, None)


class Job:
    """One `spark-elastic-run` on h0."""

    def __init__(self, hosts: Hosts, *options: str, **variables: str) -> None:
        self._hosts = hosts
        search = f"{TMP}/bin:{os.environ['PATH']}"
        ours = {"PYTHONPATH": PYTHONPATH, "PATH": search, "MARK": MARK, **variables}
        enter = ("--ssh-port", "2222", "-i", "/run/ssh/key", "--elastic-timeout", "60")
        command = (sys.executable, "-m", "spark_elastic.clusters.cli", *enter, *options, "python", str(LOOP))
        for name in ("stop", "output", "errors"):
            hosts.file(0, f"{TMP}/{name}").unlink(missing_ok=True)
        with (
            hosts.file(0, f"{TMP}/output").open("wb") as out,
            hosts.file(0, f"{TMP}/errors").open("wb") as errors,
        ):
            self.process = subprocess.Popen(
                hosts.build_command(0, *command), stdout=out, stderr=errors, env={**os.environ, **ours}
            )

    def output(self) -> str:
        return self._hosts.file(0, f"{TMP}/output").read_text()

    def errors(self) -> str:
        return self._hosts.file(0, f"{TMP}/errors").read_text()

    def await_lines(self, *lines: str) -> None:
        def has_lines() -> bool:
            assert self.process.poll() is None, self.errors()
            return all(line in self.output() for line in lines)

        try:
            until(has_lines)
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.output()} {self.errors()}") from error

    def stop(self) -> int:
        self._hosts.file(0, f"{TMP}/stop").touch()
        return self.process.wait(40)

    def kill(self) -> None:
        """The process of the command on h0; `process` is nsenter, which started it."""
        for process, words in processes(self._hosts, 0).items():
            if words[1:3] == ["-m", "spark_elastic.clusters.cli"]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()


@contextmanager
def run_job(hosts: Hosts, *options: str, **variables: str) -> Iterator[Job]:
    job = Job(hosts, *options, **variables)
    try:
        yield job
    finally:
        job.kill()
        job.process.wait(20)


def processes(hosts: Hosts, node: int) -> dict[psutil.Process, list[str]]:
    """Those of a host besides its sshd, with their command lines. What has ended has none and is left out, although
    process 1 of these hosts reaps nothing."""
    commands = {}
    for pid in hosts.pids(node):
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            commands[process] = process.cmdline()
    own = ("sleep", "sshd:", SSHD)
    living = {process: words for process, words in commands.items() if words}
    return {p: words for p, words in living.items() if os.path.basename(words[0]) not in own}


def pythons(hosts: Hosts, *nodes: int) -> list[str]:
    commands = [words for node in nodes for words in processes(hosts, node).values()]
    return [" ".join(words) for words in commands if "python" in words[0]]


def test_a_job_over_three_hosts_shows_no_secret_and_ends_with_its_driver(hosts: Hosts) -> None:
    with run_job(hosts, "-H", "h0:1,h1:1,h2:1", "-np", "3") as job:
        job.await_lines(*(f"sum 6 of 3 on h{node} mark {MARK}" for node in (0, 1, 2)))
        commands = [words for node in (0, 1, 2) for words in processes(hosts, node).values()]
        entered = [words for words in commands if words[0].endswith("ssh")]
        assert sorted(words[words.index("--") + 1] for words in entered) == ["h1", "h2"], "h0 is this machine"
        assert not [words for words in commands if MARK in " ".join(words)]
        for node in (0, 1, 2):
            assert len(pythons(hosts, node)) >= 2, "a slot and its worker"
        job.kill()
        until(lambda: not pythons(hosts, 0, 1, 2))


def test_r13_of_two_hosts_with_a_link_that_is_dead_in_one_direction_one_is_left_out(hosts: Hosts) -> None:
    options = "-H h0:1,h1:1,h2:1 -np 3 --min-np 1 --gloo-timeout-seconds 2 --verbose"
    with run_job(hosts, *options.split(), SPARK_ELASTIC_DRIVER_TIMEOUT="8") as job:
        job.await_lines(*(f"sum 6 of 3 on h{node} mark {MARK}" for node in (0, 1, 2)))
        hosts.lose_packets(1, 2)
        try:
            until(lambda: "sum 3 of 2 on h0" in job.output())
            assert "machines h1 and h2 could not reach each other" in job.output() + job.errors()
            assert job.stop() == 0, job.errors()
        finally:
            hosts.restore_packets(1, 2)


def test_a_job_continues_while_hosts_refuse_join_disconnect_and_die(hosts: Hosts) -> None:
    listing, script = hosts.file(0, f"{TMP}/hosts"), hosts.file(0, f"{TMP}/find.sh")
    listing.write_text("h0:1\nh1:1\nh3:1\n")
    script.write_text(f"#!/bin/sh\ncat {TMP}/hosts\n")
    script.chmod(0o755)
    options = ("--host-discovery-script", f"{TMP}/find.sh", "-np", "2", "--min-np", "1", "--max-np", "3")
    with run_job(hosts, *options) as job:
        job.await_lines("sum 3 of 2 on h0", "sum 3 of 2 on h1")
        refusal = "host h3 cannot run workers: connect to host h3 port 2222: Connection refused"
        assert job.errors().count(refusal) == 1
        listing.write_text("h0:1\nh1:1\nh2:1\n")
        job.await_lines("sum 6 of 3 on h2")

        slot = [process for process, words in processes(hosts, 2).items() if "main" in words]
        (ssh,) = [p for p, words in processes(hosts, 0).items() if words[0].endswith("ssh") and "h2" in words]
        assert len(slot) == 1
        before = len(job.output())
        ssh.kill()
        until(lambda: slot[0] not in processes(hosts, 2))
        until(lambda: "sum 6 of 3 on h2" in job.output()[before:])

        before = len(job.output())
        hosts.kill(1)
        until(lambda: "sum 3 of 2 on h2" in job.output()[before:])
        assert job.stop() == 0, job.errors()
    until(lambda: not pythons(hosts, 0, 2))


# Of h2, since h1 is dead by now.
CANNOT = [
    ("-H h3:1", {}, "h3 port 2222: Connection refused: start an ssh server there"),
    ("-H nowhere:1", {}, "Could not resolve hostname nowhere"),
    ("-H h2:1 --ssh-user nobody", {}, "Permission denied"),
    ("-H h2:1", {"KNOWN": "/dev/null"}, "Host key verification failed"),
    ("-H h2:1", {"SPARK_ELASTIC_ADVERTISE_ADDRESS": "127.0.0.1"}, "it cannot reach the driver at 127.0.0.1:"),
    ("-H h4:1", {}, "has no spark_elastic there"),
]


@pytest.mark.parametrize(("options", "variables", "sentence"), CANNOT, ids=[case[2][:30] for case in CANNOT])
def test_a_host_that_cannot_run_workers_is_named_with_the_reason(
    hosts: Hosts, options: str, variables: dict[str, str], sentence: str
) -> None:
    with run_job(hosts, *options.split(), "-np", "1", **variables) as job:
        assert job.process.wait(SECONDS) == 1
        (line,) = job.errors().strip().splitlines()
        host = options.split()[1].partition(":")[0]
        assert line.startswith(f"spark-elastic-run: PreflightError: host {host} cannot run workers: ")
        assert sentence in line
