"""The machine's own slots and those behind ssh: their places, their processes, what is said to ssh."""

from __future__ import annotations

import json
import os
import queue
import shlex
import signal
import socket
import subprocess
import threading
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any
from unittest.mock import Mock

import pytest

from spark_elastic.clock import SystemClock
from spark_elastic.clusters.local.launcher import HostSlots, LocalLauncher, find_remote_hosts
from spark_elastic.clusters.local.ssh import (
    BOOTSTRAP,
    READY,
    RemoteEnd,
    SshLauncher,
    SshOptions,
    SshProcess,
    export_environment,
)
from spark_elastic.errors import PreflightError
from spark_elastic.protocol.events import DriverEvent, LaunchEnded
from spark_elastic.protocol.types import SlotSpec
from tests.patience import until


def test_a_host_whose_slots_end_does_not_get_all_others() -> None:
    hosts = HostSlots({"a": 2, "b": 1})
    assert [hosts.acquire(job) for job in (1, 2, 3)] == ["a", "a", "b"]
    hosts = HostSlots({"a": 2, "b": 2, "c": 1})
    tried = []
    for job in range(4):
        host = hosts.acquire(job)
        assert host is not None
        tried.append(host)
        hosts.release(host)
    assert tried == ["a", "b", "c", "a"]


def test_a_waiting_slot_gets_a_place_that_is_released_or_added() -> None:
    hosts = HostSlots({"a": 1})
    got: SimpleQueue[str | None] = SimpleQueue()
    assert hosts.acquire(1) == "a"
    threads = [threading.Thread(target=lambda job=job: got.put(hosts.acquire(job))) for job in (2, 3, 4)]
    for thread in threads:
        thread.start()
    with pytest.raises(Empty):
        got.get(timeout=0.1)
    hosts.release("a")
    assert got.get(timeout=10) == "a"
    hosts.update({"b": 1})
    assert got.get(timeout=10) == "b"
    hosts.close()
    assert got.get(timeout=10) is None
    for thread in threads:
        thread.join(10)


def test_only_names_of_this_machine_count_as_this_machine() -> None:
    here = {"localhost": 1, "127.0.0.2": 1, socket.gethostname(): 1}
    assert find_remote_hosts(here) == []
    assert find_remote_hosts({**here, "192.0.2.7": 1}) == ["192.0.2.7"]


def test_a_process_that_cannot_be_started_ends_its_slot_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else could tell: the driver would wait for that slot for ever."""
    error = BlockingIOError(11, "Resource temporarily unavailable")
    monkeypatch.setattr(subprocess, "Popen", Mock(side_effect=error))
    posted: queue.SimpleQueue[DriverEvent] = queue.SimpleQueue()
    hosts = HostSlots({"localhost": 1})
    launcher = LocalLauncher(None, hosts, SystemClock())
    launcher.start(SlotSpec(address="127.0.0.1:1", key=b"k" * 32, attempt=1), posted.put)
    for job in (1, 2):
        launcher.launch(job)
        ended = posted.get(timeout=10.0)
        assert isinstance(ended, LaunchEnded)
        assert ended.launch == job
        assert "could not be started ([Errno 11] Resource temporarily unavailable)" in ended.reason
    assert launcher.close(1.0) == []


# ---- hosts behind ssh; the last two tests start processes


KEY = b"7" * 32


def _launcher() -> SshLauncher:
    ssh = SshOptions(port=2222, user="train", identity_file="/keys/job")
    launcher = SshLauncher(None, HostSlots(), SystemClock(), ssh)
    launcher.start(SlotSpec(address="10.0.0.1:7000", key=KEY, attempt=1), lambda event: None)
    return launcher


def test_the_key_and_the_environment_travel_over_standard_input_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "marked-51")
    monkeypatch.setenv("SSH_AUTH_SOCK", "/run/agent")
    launcher = _launcher()
    command = launcher._build_command("h1")
    assert command[-2] == "h1"
    assert command[-3] == "--", "a host's name is never an option"
    given = {"-p": "2222", "-l": "train", "-i": "/keys/job"}
    assert {option: command[command.index(option) + 1] for option in given} == given
    whole, slot = " ".join(command), launcher.describe(1, "h1", None)
    encoded = json.loads(slot.split(b"\n")[0])["spec"]["key"]
    assert len(encoded) > 8
    assert encoded not in whole
    assert "marked-51" not in whole
    header: dict[str, Any] = json.loads(launcher._make_header("main"))
    assert header["environment"]["TOKEN"] == "marked-51"
    assert "SSH_AUTH_SOCK" not in header["environment"]
    own, sent = (
        {"HOME": "/h", "XDG_RUNTIME_DIR": "/run/1", "BASH_FUNC_x%%": ""},
        {"PATH": "/bin", "LR": "0.1"},
    )
    assert export_environment({**own, **sent}) == sent


def test_every_login_shell_can_quote_the_first_program() -> None:
    assert not set("'!\n\r") & set(BOOTSTRAP)
    assert shlex.quote(BOOTSTRAP) == f"'{BOOTSTRAP}'"
    compile(BOOTSTRAP, "bootstrap", "exec")


@pytest.mark.parametrize(
    ("end", "sentence"),
    [
        ((255, False, "banner", "ssh: connect to h: No route to host"), "check that it is up"),
        ((127, False, "sh: exec: /x/python: not found"), "Python and spark_elastic at the same path"),
        ((1, False), "ssh ended with code 1: `ssh` to it, by hand"),
        ((255, True, "Timeout, server h not responding."), "the ssh connection ended (Timeout"),
        ((1, True, "ImportError: x"), "Python ended there with code 1 (ImportError: x)"),
    ],
)
def test_the_exit_code_of_ssh_is_explained(end: tuple[Any, ...], sentence: str) -> None:
    code, was_ready, *errors = end
    assert sentence in RemoteEnd(code, was_ready, "", tuple(errors)).explain()


def test_a_missing_host_may_be_needed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launcher = _launcher()
    monkeypatch.setattr(launcher, "_check", lambda host: "host b.invalid cannot run workers: it is off")
    listed = {"localhost": 2, "b.invalid": 2}
    launcher.check_hosts(listed, 2)
    launcher.check_hosts(listed, 2)
    assert [record.getMessage() for record in caplog.records] == [
        "host b.invalid cannot run workers: it is off; the job uses the host as soon as it can."
    ]
    with pytest.raises(PreflightError, match="it is off; the other hosts have 2 slots, and the job needs 3"):
        launcher.check_hosts(listed, 3)
    launcher.check_hosts({"b.invalid": 2}, 3)  # more hosts are to come


def test_a_login_that_takes_too_long_ends_with_what_ssh_has_started() -> None:
    """A ProxyCommand, for instance, which holds the standard error of ssh."""
    login = SshProcess.start(
        ["/bin/sh", "-c", "sleep 60 </dev/null >/dev/null & echo $! >&2; exec sleep 60"], SystemClock()
    )
    end = login.run(b"x", ready_within=1.0)
    child, reason = end.errors
    assert reason == "its login timed out after 1 s"
    commands = Path(f"/proc/{child}/cmdline")
    until(lambda: not commands.exists() or not commands.read_bytes())


def test_an_ssh_that_has_ended_is_not_awaited_while_a_helper_holds_its_pipes() -> None:
    commands = {"sleep 60 & exit 255": False, f"sleep 60 & echo '{READY.decode().strip()}'": True}
    for command, was_ready in commands.items():
        login = SshProcess.start(["/bin/sh", "-c", command], SystemClock())
        try:
            end = login.run(b"", ready_within=1.0)
        finally:
            os.killpg(login.process.pid, signal.SIGKILL)
        assert (end.code, end.was_ready) == (0 if was_ready else 255, was_ready)
