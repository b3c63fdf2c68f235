"""The leak check itself must be able to fail."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

from tests.leaks import SessionOwned, find_marked, leaked, take


def test_thread_is_found_and_forgotten_when_it_ends() -> None:
    owned, stop = SessionOwned(), threading.Event()
    before = take(owned)
    thread = threading.Thread(target=stop.wait, name="left-over")
    thread.start()
    try:
        assert leaked(before, owned, settle=0) == ["thread 'left-over' (daemon=False)"]
    finally:
        stop.set()
        thread.join()
    assert leaked(before, owned) == []


def test_child_process_is_found_unless_adopted() -> None:
    owned = SessionOwned()
    before = take(owned)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        found = leaked(before, owned, settle=0)
        assert any(line.startswith(f"child process {child.pid}:") for line in found)
        owned.processes.add(child.pid)
        assert not any(line.startswith("child process") for line in leaked(before, owned, settle=0))
    finally:
        child.communicate(b"\n")
    assert leaked(before, owned) == []


def test_descriptor_is_found() -> None:
    owned = SessionOwned()
    before = take(owned)
    read, write = os.pipe()
    try:
        assert len(leaked(before, owned, settle=0)) == 2
    finally:
        os.close(read)
        os.close(write)
    assert leaked(before, owned) == []


def test_orphan_is_found_by_the_mark(no_orphan_of_the_session: str) -> None:
    start = "Popen([sys.executable, '-c', 'input()'], stdin=0, stdout=DEVNULL, stderr=DEVNULL)"
    program = f"import sys; from subprocess import DEVNULL, Popen; print({start}.pid)"
    read, write = os.pipe()
    command = [sys.executable, "-c", program]
    parent = subprocess.run(command, stdin=read, stdout=subprocess.PIPE, check=True, timeout=30)
    os.close(read)
    try:
        assert int(parent.stdout) in {process.pid for process in find_marked(no_orphan_of_the_session)}
    finally:
        os.close(write)
