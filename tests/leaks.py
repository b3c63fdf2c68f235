"""What a test left behind: Python threads, child processes and open descriptors of this process.

A snapshot is taken before a test and compared after it. Things that end a moment later are waited for; what
stays is a failure. Session fixtures (a JVM, a cluster) adopt what is theirs in a `SessionOwned`, whose processes,
ports and thread modules are then not counted.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from pathlib import Path

import psutil

SETTLE_SECONDS = 20.0  # a leak stays for ever
# A collection takes a second where frameworks are loaded, and a thread that is about to end gets no turn meanwhile.
COLLECT_AFTER, COLLECT_EVERY = 0.1, 2.0


@dataclass
class SessionOwned:
    """What session fixtures keep for later tests: never a leak of the test that happened to make it grow."""

    processes: set[int] = field(default_factory=set)
    ports: set[int] = field(default_factory=set)
    thread_modules: set[str] = field(default_factory=set)
    threads: set[int] = field(default_factory=set)
    descriptors: set[tuple[int, str]] = field(default_factory=set)

    @contextmanager
    def adopt(self) -> Iterator[None]:
        """Adopt everything that appears inside the block."""
        before = take(self)
        yield
        after = take(self)
        self.processes |= after.processes.keys() - before.processes.keys()
        self.threads |= after.threads.keys() - before.threads.keys()
        self.descriptors |= after.descriptors.keys() - before.descriptors.keys()


@dataclass(frozen=True)
class Snapshot:
    """What this process has open."""

    threads: dict[int, str]
    processes: dict[int, str]
    descriptors: dict[tuple[int, str], str]


def take(owned: SessionOwned) -> Snapshot:
    """Everything that counts, now."""
    return Snapshot(_threads(owned), _processes(owned), _descriptors(owned))


def leaked(before: Snapshot, owned: SessionOwned, settle: float = SETTLE_SECONDS) -> list[str]:
    """One line for each thing that is new since `before` and still there after `settle` seconds."""
    now = time.monotonic()
    deadline, collect = now + settle, now + COLLECT_AFTER
    found = _difference(before, take(owned))
    while found and time.monotonic() < deadline:
        if time.monotonic() >= collect:
            gc.collect()
            collect = time.monotonic() + COLLECT_EVERY
        time.sleep(0.02)
        found = _difference(before, take(owned))
    return found


def _difference(before: Snapshot, after: Snapshot) -> list[str]:
    lines = [f"thread {name}" for key, name in after.threads.items() if key not in before.threads]
    lines += [f"child process {name}" for key, name in after.processes.items() if key not in before.processes]
    new = after.descriptors.keys() - before.descriptors.keys()
    return lines + [f"descriptor {after.descriptors[key]}" for key in sorted(new)]


def _threads(owned: SessionOwned) -> dict[int, str]:
    # fsspec keeps one I/O loop for the life of the process, by design.
    kept = ("fsspec", *sorted(owned.thread_modules))
    return {
        id(thread): f"{thread.name!r} (daemon={thread.daemon})"
        for thread in threading.enumerate()
        if thread.is_alive()
        and id(thread) not in owned.threads
        and not any(name.startswith(kept) for name in _origins(thread))
    }


def _origins(thread: threading.Thread) -> set[str]:
    """The modules of a thread's class, of the function that it runs and of that function's object; its name."""
    target = getattr(thread, "_target", None)
    owner = type(getattr(target, "__self__", None))
    modules = {type(thread).__module__, getattr(target, "__module__", None) or "", owner.__module__}
    return {*modules, thread.name}


def _processes(owned: SessionOwned) -> dict[int, str]:
    found = {}
    for child in _children():
        try:
            if child.pid in owned.processes or child.status() == psutil.STATUS_ZOMBIE:
                continue
            command = " ".join(child.cmdline())
        except psutil.NoSuchProcess:
            continue
        # multiprocessing starts one tracker on first use and keeps it until the interpreter ends.
        if "multiprocessing.resource_tracker" not in command:
            found[child.pid] = f"{child.pid}: {command[:200]}"
    return found


def _children() -> list[psutil.Process]:
    children = []
    for listing in Path("/proc/self/task").glob("*/children"):
        try:
            pids = listing.read_text().split()
        except OSError:
            continue  # the thread ended while we looked
        for pid in pids:
            try:
                children.append(psutil.Process(int(pid)))
            except psutil.NoSuchProcess:
                continue
    return children


def _descriptors(owned: SessionOwned) -> dict[tuple[int, str], str]:
    shared = _descriptors_to(owned.ports)
    tracker = getattr(resource_tracker._resource_tracker, "_fd", None)
    found = {}
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the listing's own descriptor
        if number not in shared and number != tracker and (number, target) not in owned.descriptors:
            found[(number, target)] = f"{number} -> {target}"
    return found


def _descriptors_to(ports: set[int]) -> set[int]:
    if not ports:
        return set()
    connections = psutil.Process().net_connections(kind="tcp")
    return {c.fd for c in connections if (c.raddr and c.raddr.port in ports) or c.laddr.port in ports}


def find_marked(mark: str) -> list[psutil.Process]:
    """Live processes, wherever they hang in the tree, whose environment came down from one that held `mark`: an orphan
    is no child of ours any more, and Spark's workers pass their environment on to all that they start."""
    word, found = mark.encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if word in (folder / "environ").read_bytes().split(b"\0"):
                found.append(psutil.Process(int(folder.name)))
        except (OSError, psutil.NoSuchProcess):
            continue  # it ended while we looked, or is another user's
    return [process for process in found if process.pid != os.getpid()]


def describe_process(process: psutil.Process) -> str:
    """Its command, parent and age, what the kernel has its threads wait for, and the test that started it."""
    try:
        with process.oneshot():
            words = f"{process.pid}: {' '.join(process.cmdline())[:200]}"
            age = f"{time.time() - process.create_time():.0f} s old, {process.status()}"
            test = process.environ().get("PYTEST_CURRENT_TEST", "?")
            threads = Path(f"/proc/{process.pid}/task").glob("*")
            waits = [(place / "wchan").read_text() or "user code" for place in threads]
            return f"{words}, child of {process.ppid()}, {age}, threads in {waits}, of {test}"
    except (psutil.NoSuchProcess, OSError):
        return f"{process.pid}: has just ended"
