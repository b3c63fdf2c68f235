"""The hosts of `tests/hosts.py` share nothing: what tests on them see is what machines would show."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from tests.hosts import PRIVATE, SSHD, Hosts, find_obstacle

MISSING = find_obstacle()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)


def say(hosts: Hosts, node: int, command: str) -> str:
    run = subprocess.run(
        hosts.build_command(node, "sh", "-c", command), check=False, capture_output=True, text=True
    )
    return (run.stdout + run.stderr).strip()


def can_reach(hosts: Hosts) -> bool:
    """Whether packets of host 0 come to host 1, where nobody listens."""
    dial = "import socket; socket.create_connection(('h1', 9), 0.5)"
    return "refused" in say(hosts, 0, f'{sys.executable} -c "{dial}"')


def test_hosts_share_no_file_no_process_and_no_network() -> None:
    with Hosts(2) as hosts:
        ids = {say(hosts, node, "cat /proc/sys/kernel/random/boot_id") for node in (0, 1)}
        assert len(ids) == 2
        for folder in PRIVATE:
            say(hosts, 0, f"echo mine >{folder}/mine")
            assert hosts.file(0, f"{folder}/mine").read_text() == "mine\n"
            assert "No such file" in say(hosts, 1, f"cat {folder}/mine")
        assert "Read-only" in say(hosts, 0, f"touch {__file__}")
        assert say(hosts, 1, "hostname; pwd; ps -e | grep -c sleep") == "h1\n/tmp\n1"
        assert can_reach(hosts)
        hosts.disconnect(1)
        assert not can_reach(hosts)
        hosts.kill(1)
        assert not hosts.pids(1)
        hosts.boot(1)
        assert say(hosts, 1, "ls /tmp; hostname") == "h1"
        assert say(hosts, 1, "cat /proc/sys/kernel/random/boot_id") not in ids
        assert can_reach(hosts)


@pytest.mark.skipif(not shutil.which(SSHD), reason=f"{SSHD} is not installed (package openssh-server)")
def test_ssh_enters_a_host_without_a_question() -> None:
    with Hosts(2) as hosts:
        hosts.start_sshd(1)
        enter = subprocess.run(
            hosts.build_command(0, "ssh", *hosts.ssh_options(), "h1", "hostname"),
            capture_output=True,
            text=True,
            check=False,
        )
        assert (enter.returncode, enter.stdout) == (0, "h1\n"), enter.stderr
        assert "refused" in say(hosts, 1, f"ssh {' '.join(hosts.ssh_options())} h0 hostname")
