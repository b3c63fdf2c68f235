"""A training process as its slot sees it: started warm, activated as a worker, its output passed on line by line.

Training runs in a child of the slot's task, which the kernel kills when the task ends: a crash, exhausted memory or a
stray thread stays in that child, and a warm spare takes its place.
"""

from __future__ import annotations

import io
import os
import pickle
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import IO

import cloudpickle

from spark_elastic.clock import Clock, SystemClock
from spark_elastic.data.scratch import remove_stale_folders
from spark_elastic.protocol.types import KILLED_EXIT_CODES, SlotId, SlotIdentity, SlotSpec, WorkerId
from spark_elastic.rendezvous import codec
from spark_elastic.worker.forking import ForkedProcess, InheritedSettings, fork_server_cache, start_process
from spark_elastic.worker.handover import Activation, ChildFds, Header, describe_exit
from spark_elastic.worker.imports import list_module_places
from spark_elastic.worker.stack_reader import DUMP_SIGNAL, StackReader, StackSample

CLOSE_WAIT = 2.0  # seconds for a killed process and its last lines
CRASH_LINES_WAIT = 0.5  # seconds for the last lines of a process that crashed
CRASH_FRAMES = 3  # innermost frames of a crash that are reported
LINE_AT_MOST = 1 << 18  # characters; longer lines are passed on in parts
PROGRESS_BAR_EVERY = 1.0  # seconds between two states of a progress bar that are passed on, besides its last
LOAD_SECONDS = 300.0  # for the imports and for loading, where a host tries to load an object
FAILED_TO_LOAD = "spark_elastic cannot load: "  # what the process prints before the error
_FRAME = re.compile(r'  File "(?:.*/)?(.*)", line (\d+) in (.*)')


@dataclass(eq=False, repr=False)
class Child:
    """A running training process, with daemon threads for its input, output, status pipe and end."""

    process: ForkedProcess | subprocess.Popen[bytes]
    reader: StackReader
    status: int  # the reading end of the process's status pipe
    on_line: Callable[[Child, str], None]
    on_warm: Callable[[Child], None]
    on_exit: Callable[[Child, int], None]

    def __post_init__(self) -> None:
        self.worker: WorkerId | None = None  # None: a spare
        self.warm = False  # set by the slot's main thread
        self._exited = threading.Event()
        self._crash = CrashLocation()
        self._input: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        targets: dict[str, Callable[[], None]] = {
            "input": self._write_input,
            "status": self._read_status,
            "lines": self._read_lines,
            "exit": self._await_exit,
        }
        name = "spark-elastic-child-"
        self._threads = [Thread(target=call, name=name + part, daemon=True) for part, call in targets.items()]

    @classmethod
    def start(
        cls,
        spec: SlotSpec,
        identity: SlotIdentity,
        payload: bytes,
        on_line: Callable[[Child, str], None],
        on_warm: Callable[[Child], None],
        on_exit: Callable[[Child, int], None],
    ) -> Child:
        """Start a process from the slot's main thread, with which the process ends (PR_SET_PDEATHSIG)."""
        imports = spec.imports if spec.fork_workers else None
        with ExitStack() as failed:  # a slot that lacks descriptors for a moment must not lose more each time
            reader = StackReader()
            failed.callback(reader.close)
            status_read, status_write = os.pipe()
            failed.callback(os.close, status_read)
            fds = ChildFds(status_write, reader.activity, reader.stacks)
            failed.callback(os.close, status_write)
            header = Header(spec, identity, os.getpid(), len(payload), fds)
            process = start_process(fds, imports, _build_environment(spec.cpus_per_worker))
            failed.pop_all()
        child = cls(process, reader, status_read, on_line, on_warm, on_exit)
        child._input.put(codec.to_line(header))
        child._input.put(payload)
        for thread in child._threads:
            thread.start()
        return child

    @property
    def pid(self) -> int:
        """Only of a warm child."""
        assert self.process.pid is not None
        return self.process.pid

    def activate(self, activation: Activation) -> None:
        """Make the process a worker. It starts to work when its imports are complete."""
        self.worker = activation.worker
        self._input.put(codec.to_line(activation))

    def read_successor(self) -> Activation | None:
        """What makes the process that takes this one's place this worker, if one has to. Before `close`."""
        line = self.reader.read_activation()
        return codec.from_line(Activation, line) if line else None

    def state(self) -> str:
        """The kernel's letter for the process's state (R, S, D, T, Z ...); "" while there is no process."""
        try:
            with open(f"/proc/{self.process.pid}/stat", encoding="ascii", errors="replace") as file:
                return file.read().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError, IndexError):
            return ""

    def read_sample(self, now: float, stopped: bool) -> StackSample:
        """What its main thread does. now: of this machine's monotonic clock. stopped: by a signal."""
        sample = self.reader.read(now, stopped)
        if sample.wants_dump:
            self.process.send_signal(DUMP_SIGNAL)  # the next sample contains the stack that it then writes
        return sample

    def kill(self) -> None:
        self.process.kill()

    def find_crash_location(self, code: int) -> str:
        """The Python frames above the native code in which it crashed; "" if it did not crash. code: its exit code."""
        return "" if code >= 0 or code in KILLED_EXIT_CODES else self._crash.wait(CRASH_LINES_WAIT)

    def wait(self, seconds: float) -> None:
        self._exited.wait(seconds)

    def close(self) -> None:
        """Kill the process, remove what it left behind, and pass on its last lines before this returns."""
        self.process.kill()
        self._input.put(None)
        for thread in self._threads:
            thread.join(CLOSE_WAIT)
        self.reader.close()
        remove_stale_folders()

    def _write_input(self) -> None:
        """In a thread, since a large program takes long through a pipe and the slot's main thread must not wait."""
        pipe = self.process.stdin
        assert pipe is not None
        with suppress(OSError):  # the process died; `on_exit` reports it
            while (data := self._input.get()) is not None:
                pipe.write(data)
                pipe.flush()
        with suppress(OSError):  # likewise, and buffered bytes cannot be written
            pipe.close()

    def _read_status(self) -> None:
        with os.fdopen(self.status, "rb") as pipe:
            if pipe.readline() == b"warm\n":
                if isinstance(self.process, ForkedProcess):  # it may be warm before this slot knows its pid
                    self.process.begun.wait(CLOSE_WAIT)
                self.on_warm(self)

    def _await_exit(self) -> None:
        code = self.process.wait()
        self._exited.set()
        self.on_exit(self, code)

    def _read_lines(self) -> None:
        pipe = self.process.stdout
        assert pipe is not None
        for line in read_lines(pipe, SystemClock()):
            self._crash.read_line(line)
            self.on_line(self, line)
        self._crash.close()


def _build_environment(threads: int | None) -> dict[str, str]:
    """This process's environment with its module path, which is absolute since user code may change the folder."""
    path = os.pathsep.join(os.path.abspath(place) for place in list_module_places() if place)
    environment = dict(os.environ, PYTHONUNBUFFERED="1", PYTHONPATH=path)
    if threads is not None:
        for library in ("OMP", "OPENBLAS", "MKL"):  # libraries read these when they are loaded
            environment[f"{library}_NUM_THREADS"] = str(threads)
    return environment


def read_lines(pipe: IO[bytes], clock: Clock) -> Iterator[str]:
    """The lines of a process, until the pipe ends and is closed; one that is too long in parts. Of the states of a
    progress bar, which end with a carriage return, some are yielded, the last one included."""
    next_state_at, cut = float("-inf"), False  # cut: the line before was not complete
    skipped = ""  # the newest state of a progress bar, if it was not yielded
    with io.TextIOWrapper(pipe, encoding="utf-8", errors="replace", newline="") as text:
        while raw := text.readline(LINE_AT_MOST):
            line, continues = raw.rstrip("\r\n"), cut
            cut = not raw.endswith("\n")
            if raw.endswith("\r"):
                if not line:
                    continue
                if clock.now() < next_state_at:
                    skipped = line
                    continue
                next_state_at = clock.now() + PROGRESS_BAR_EVERY
            elif not line:
                line = skipped
            skipped = ""
            if line or not continues:
                yield line
        if skipped:
            yield skipped


class CrashLocation:
    """The innermost Python frames above a crash in native code, without folders, from `faulthandler`'s lines. One
    thread feeds the lines; any thread may ask."""

    def __init__(self) -> None:
        self._frames: list[str] | None = None  # None: no crash so far
        self._in_stack = False  # whether the frames of the crashed thread come next
        self._complete = threading.Event()

    def read_line(self, line: str) -> None:
        if "Fatal Python error: " in line:  # it may follow a progress bar, which ends no line
            self._frames = []
        elif self._frames is not None and line.startswith("Current thread "):
            self._in_stack = True
        elif self._frames is not None and self._in_stack:
            frame = _FRAME.fullmatch(line)
            if frame is not None:
                self._frames.append("{}, line {}, in {}".format(*frame.groups()))
            if frame is None or len(self._frames) == CRASH_FRAMES:
                self._in_stack = False
                self._complete.set()

    def close(self) -> None:
        self._complete.set()

    def wait(self, within: float) -> str:
        self._complete.wait(within)
        return "; called from ".join(self._frames or ())


class OomKillCounter:
    """The kernel's counter of kills for lack of memory in this process's control group, or else in the machine. Main
    thread of the slot. root: of /proc and /sys; for tests."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._seen = self._read()

    def is_oom_kill(self, code: int) -> bool:
        """Whether the process that just ended with `code` was killed because memory ran out."""
        before, self._seen = self._seen, self._read()
        # After a move to another group, the first value of its counter is no rise.
        return code == -signal.SIGKILL and self._seen[0] == before[0] and self._seen[1] > before[1]

    def _read(self) -> tuple[Path | None, int]:
        file = find_oom_counter(self._root)
        return file, (file and _read_kills(file)) or 0


def find_oom_counter(root: Path) -> Path | None:
    """The file with the counter closest to this process; None if there is none."""
    groups, candidates = root / "proc/self/cgroup", list[Path]()
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        # In a container the path may be the host's; the container's own group is then mounted at the top.
        if controllers == "":
            mount, name = root / "sys/fs/cgroup", "memory.events"
        elif "memory" in controllers.split(","):
            mount, name = root / "sys/fs/cgroup/memory", "memory.oom_control"
        else:
            continue
        candidates += [mount / path.lstrip("/") / name, mount / name]
    candidates.append(root / "proc/vmstat")
    return next((file for file in candidates if _read_kills(file) is not None), None)


def _read_kills(file: Path) -> int | None:
    with suppress(OSError):
        for line in file.read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


# ---- whether a host can load an object


@dataclass(frozen=True)
class LoadingProgram:
    """Takes the place of a worker's program. Its preparation loads the object, or ends the process."""

    payload: bytes  # cloudpickle of the object

    def prepare(self) -> None:
        error = find_load_error(self.payload)
        if error is not None:
            sys.stdout.write(f"{FAILED_TO_LOAD}{' '.join(error.split())}\n")
            sys.stdout.flush()
            os._exit(1)


def find_load_error(payload: bytes) -> str | None:
    try:
        cloudpickle.loads(payload)
    except Exception as error:  # whatever user classes raise while they are unpickled
        return f"{type(error).__name__}: {error}"
    return None


def begin_imports(spec: SlotSpec) -> None:
    """Start the fork server that the slot's processes come from, and leave it to its imports. Main thread only."""
    fork_server_cache.get(InheritedSettings.capture(spec.imports, _build_environment(spec.cpus_per_worker)))


def find_load_error_in_fork(payload: bytes, spec: SlotSpec) -> str | None:
    """Load the object in a process that is forked as a worker is, so that this one makes no slow imports, and its fork
    server is ready. Main thread only. Raises TimeoutError: it was still loading after `LOAD_SECONDS`."""
    lines: list[str] = []
    ends: queue.SimpleQueue[int | None] = queue.SimpleQueue()  # the exit code; None: it is warm
    child = Child.start(
        spec,
        SlotIdentity(slot=SlotId.build(0, 0)),
        pickle.dumps(LoadingProgram(payload)),
        lambda child, line: lines.append(line),
        lambda child: ends.put(None),
        lambda child, code: ends.put(code),
    )
    try:
        code = ends.get(timeout=LOAD_SECONDS)
    except queue.Empty:
        raise TimeoutError from None
    finally:
        child.close()  # its last lines are here afterwards
    if code is None:
        return None
    said = (line.removeprefix(FAILED_TO_LOAD) for line in reversed(lines) if line.startswith(FAILED_TO_LOAD))
    return next(said, f"the process that loads it ended: {describe_exit(code)}")
