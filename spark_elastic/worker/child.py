"""One training process as its slot sees it: spawned warm, activated as a worker, and its every line shipped.

Spawned from the slot's main thread, since the child dies with the thread that spawned it (PR_SET_PDEATHSIG); one that a
fork server made is that thread's as well. Daemon threads per child write its input, read its output and its status, and
wait for its end; the last of them begins by making the process where a server has to be waited for.
"""

from __future__ import annotations

import io
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO

from spark_elastic.clock import Clock, SystemClock
from spark_elastic.data.store import remove_stale_folders
from spark_elastic.protocol.slot_spec import SlotSpec, WorkerIdentity
from spark_elastic.protocol.types import KILLED_EXIT_CODES
from spark_elastic.worker.entry import ChildFds, Header
from spark_elastic.worker.forking import ForkedProcess, InheritedSettings, fork_server_cache
from spark_elastic.worker.stack_sampler import DUMP_SIGNAL, StackReader, StackSample

# Where in Python a process crashed in native code, read from what `faulthandler` prints among the process's lines.
#
# One thread hears the lines; any other may ask.


CRASH_FRAMES = 3  # frames
FRAME = re.compile(r'  File "(?:.*/)?(.*)", line (\d+) in (.*)')


class CrashLocation:
    """The innermost frames of the thread that crashed; the same on all hosts, whatever folders their files are in."""

    def __init__(self) -> None:
        self._frames: list[str] | None = None  # None: it has not crashed
        self._here = False  # the frames of the thread that crashed follow
        self._known = threading.Event()

    def read_line(self, line: str) -> None:
        if line.startswith("Fatal Python error: "):
            self._frames = []
        elif self._frames is not None and line.startswith("Current thread "):
            self._here = True
        elif self._frames is not None and self._here:
            frame = FRAME.fullmatch(line)
            if frame is not None:
                self._frames.append("{}, line {}, in {}".format(*frame.groups()))
            if frame is None or len(self._frames) == CRASH_FRAMES:
                self._here = False
                self._known.set()

    def close(self) -> None:
        """The process has no more lines."""
        self._known.set()

    def wait(self, within: float) -> str:
        """The frames, "" if it did not say. Waits for them for so many seconds."""
        self._known.wait(within)
        return "; called from ".join(self._frames or ())


# What a training process prints, in lines that a message takes: whatever it is, and however long it goes on.


LINE_AT_MOST = 1 << 18  # characters; what is longer comes in several lines
PROGRESS_BAR_EVERY = 1.0  # seconds between two states of a progress bar that are shown, beside its last


def read_lines(pipe: IO[bytes], clock: Clock) -> Iterator[str]:
    """Until its end, when it is closed. What ends with a carriage return is written over by what follows."""
    due, cut = float("-inf"), False
    hidden = ""  # the newest state of a progress bar, if it was not shown
    with io.TextIOWrapper(pipe, encoding="utf-8", errors="replace", newline="") as text:
        while raw := text.readline(LINE_AT_MOST):
            line, follows = raw.rstrip("\r\n"), cut
            cut = not raw.endswith("\n")
            if raw.endswith("\r"):
                if not line:
                    continue
                if clock.now() < due:
                    hidden = line
                    continue
                due = clock.now() + PROGRESS_BAR_EVERY
            elif not line:
                line = hidden
            hidden = ""
            if line or not follows:
                yield line
        if hidden:
            yield hidden


# Seconds for a killed process and its last lines; what it forked may keep its output open longer.
CLOSE_WAIT = 2.0
CRASH_LINES_WAIT = 0.5  # seconds for the last ones of a process that crashed


class Child:
    """A running training process. `worker` is None while it is a spare; `warm` is kept by the slot's main thread."""

    def __init__(
        self,
        process: subprocess.Popen[bytes] | ForkedProcess,
        window: StackReader,
        status: int,
        on_line: Callable[[Child, str], None],
        on_warm: Callable[[Child], None],
        on_exit: Callable[[Child, int], None],
    ) -> None:
        """status: the reading end of the process's status pipe."""
        self.worker: str | None = None
        self.warm = False
        self._process = process
        self._window = window
        self._ended = threading.Event()
        self._crash = CrashLocation()
        self._input: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        work: dict[str, Callable[[], None]] = {
            "input": self._write_input,
            "status": partial(self._read_status, status, on_warm),
            "lines": partial(self._read_lines, on_line),
            "exit": partial(self._await_exit, on_exit),
        }
        self._threads = [
            threading.Thread(target=target, name=f"spark-elastic-child-{name}", daemon=True)
            for name, target in work.items()
        ]

    @classmethod
    def spawn(
        cls,
        spec: SlotSpec,
        identity: WorkerIdentity,
        payload: bytes,
        on_line: Callable[[Child, str], None],
        on_warm: Callable[[Child], None],
        on_exit: Callable[[Child, int], None],
    ) -> Child:
        """Start a child of a slot. identity: the slot's, without a worker."""
        status_read, status_write = os.pipe()
        window = StackReader()
        watch = window.activity, window.stacks
        header = Header(spec, identity, os.getpid(), len(payload), status_write, watch)
        process = _process((status_write, *watch), spec)
        child = cls(process, window, status_read, on_line, on_warm, on_exit)
        child._input.put(header.to_line())
        child._input.put(payload)
        for thread in child._threads:
            thread.start()
        return child

    @property
    def pid(self) -> int:
        """Of a child that is warm."""
        assert self._process.pid is not None
        return self._process.pid

    def activate(self, worker: str) -> None:
        """Make the process a worker; it may still be importing and starts as soon as it can."""
        self.worker = worker
        self._input.put((json.dumps({"worker": worker}) + "\n").encode())

    def state(self) -> str:
        """The letter of the process's state (R, S, D, T, Z ...); "" before there is one and once it is gone."""
        try:
            with open(f"/proc/{self._process.pid}/stat", encoding="ascii", errors="replace") as file:
                return file.read().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError, IndexError):
            return ""

    def read_sample(self, now: float, stopped: bool) -> StackSample:
        """What its main thread does; `now` by this machine's monotonic clock. stopped: it does not run now."""
        seen = self._window.read(now, stopped)
        if seen.wants_dump:
            self._process.send_signal(DUMP_SIGNAL)  # the next look shows what it writes
        return seen

    def record_driver_seen(self, at: float) -> None:
        """By this machine's monotonic clock, the driver heard the slot at that time."""
        self._window.record_driver_seen(at)

    def kill(self) -> None:
        self._process.kill()

    def find_crash_location(self, code: int) -> str:
        """Where, in Python, it was in native code that ended it; "" where it ended otherwise. code: its exit code."""
        return "" if code >= 0 or code in KILLED_EXIT_CODES else self._crash.wait(CRASH_LINES_WAIT)

    def wait(self, seconds: float) -> None:
        """Of a process that was told to end, for so long at most."""
        self._ended.wait(seconds)

    def close(self) -> None:
        """Kill and collect the process, and what it left; its last lines have been handed over when this returns."""
        self._process.kill()
        self._input.put(None)
        for thread in self._threads:
            thread.join(CLOSE_WAIT)
        self._window.close()
        remove_stale_folders()

    def _write_input(self) -> None:
        """A large program takes its time through a pipe; the slot's main thread must not wait for it."""
        pipe = self._process.stdin
        assert pipe is not None
        try:
            while (data := self._input.get()) is not None:
                pipe.write(data)
                pipe.flush()
        except OSError:
            pass  # it died; `on_exit` tells
        finally:
            _close_quietly(pipe)

    def _read_status(self, descriptor: int, on_warm: Callable[[Child], None]) -> None:
        with os.fdopen(descriptor, "rb") as pipe:
            if pipe.readline() == b"warm\n":
                on_warm(self)

    def _await_exit(self, on_exit: Callable[[Child, int], None]) -> None:
        code = self._process.wait()
        self._ended.set()
        on_exit(self, code)

    def _read_lines(self, on_line: Callable[[Child, str], None]) -> None:
        pipe = self._process.stdout
        assert pipe is not None
        for line in read_lines(pipe, SystemClock()):
            self._crash.read_line(line)
            on_line(self, line)
        self._crash.close()


def _process(handed: ChildFds, spec: SlotSpec) -> subprocess.Popen[bytes] | ForkedProcess:
    """handed: the first of these is closed here once the process has it."""
    environment = _build_environment(spec.cpus_per_worker)

    def spawn(stdin: int, stdout: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "spark_elastic.worker.entry"],
            stdin=stdin,
            stdout=stdout,
            stderr=subprocess.STDOUT,
            pass_fds=handed,
            env=environment,
        )

    server = (
        fork_server_cache.get(InheritedSettings.capture(spec.imports, environment)) if spec.imports else None
    )
    if server is not None:
        return ForkedProcess(server, handed, spawn)
    process = spawn(subprocess.PIPE, subprocess.PIPE)
    os.close(handed[0])
    return process


def _build_environment(threads: int | None) -> dict[str, str]:
    """This process's own, with its path of modules; absolute, since user code may change the directory."""
    path = os.pathsep.join(os.path.abspath(place) for place in sys.path if place)
    found = dict(os.environ, PYTHONUNBUFFERED="1", PYTHONPATH=path)
    if threads is not None:
        # Libraries look at it when they are loaded, some before the program is.
        found |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    return found


def _close_quietly(pipe: IO[bytes]) -> None:
    """Closes the descriptor though the process at its other end is gone and what is left cannot be written."""
    try:
        pipe.close()
    except OSError:
        pass


# Whether a child was killed because memory ran out: the kernel counts such kills per control group.
#
# Reads the counter of this process's own group, in which its children are, too (cgroup v2's memory.events, v1's
# memory.oom_control), else the whole machine's in /proc/vmstat. Called from the slot's main thread.


class OomKillCounter:
    """Remembers the counter, so that a kill is noticed by its rise. root: where /proc and /sys are; for tests."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._seen = self._read()

    def is_oom_kill(self, code: int) -> bool:
        """Whether the process that just ended with `code` was killed because memory ran out."""
        before, self._seen = self._seen, self._read()
        # A process may be moved to another group, whose counter tells nothing yet.
        return code == -signal.SIGKILL and self._seen[0] == before[0] and self._seen[1] > before[1]

    def _read(self) -> tuple[Path | None, int]:
        file = find_oom_counter(self._root)
        try:
            lines = file.read_text().splitlines() if file is not None else []
        except OSError:
            lines = []  # the group was removed meanwhile
        return file, sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def find_oom_counter(root: Path) -> Path | None:
    """The file with the counter that is nearest to this process; None where there is none."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        groups = []
    found: list[Path] = []
    for line in groups:
        _, controllers, path = line.split(":", 2)
        # In a container the path may be the host's; its own group is then mounted at the top.
        if controllers == "":
            mount, name = root / "sys/fs/cgroup", "memory.events"
        elif "memory" in controllers.split(","):
            mount, name = root / "sys/fs/cgroup/memory", "memory.oom_control"
        else:
            continue
        found += [mount / path.lstrip("/") / name, mount / name]
    found.append(root / "proc/vmstat")
    return next((file for file in found if _has_counter(file)), None)


def _has_counter(file: Path) -> bool:
    try:
        return any(line.startswith("oom_kill ") for line in file.read_text().splitlines())
    except OSError:
        return False
