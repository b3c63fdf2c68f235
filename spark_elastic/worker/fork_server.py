"""Main of a fork server: `python -m spark_elastic.worker.fork_server PARENT IMPORTS LEFT_OUT...`, started by a slot.

Makes a program's early imports, a JSON list in the file with the descriptor IMPORTS, then forks a training process for
each request on the socket that is its standard input; it continues like a spawned one (`worker.entry`), and the slot's
process adopts it. The server has one thread and sees no job's key, program or rows. It ends with the slot's process, or
after `IDLE_SECONDS` without a process that it forked. A package after whose import no process could be forked is left
out: the server begins anew without it, and each forked process imports it.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import json
import os
import select
import signal
import socket
import sys
import threading
import traceback
import warnings
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from spark_elastic.worker import entry
from spark_elastic.worker.handover import ADOPT, FORK, STARTED, ChildFds
from spark_elastic.worker.imports import import_early, import_followers

IDLE_SECONDS = 60.0  # as long as Spark keeps a Python worker without a task
DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel")
FORK_AWARE_THREADS = frozenset({"jemalloc_bg_thd"})  # pyarrow's, which is started anew
DESCRIPTORS = 6  # of a request: standard input and output, `ChildFds`, and where the answer goes
_HIGH_DESCRIPTOR = 512  # descriptors that must not occupy low numbers are moved to here and above


class _InForkedProcess(BaseException):
    """Raised in a forked process, to unwind the server's frames and free their objects."""

    def __init__(self, request: _Request) -> None:
        super().__init__()
        self.descriptors = [_move_up(descriptor) for descriptor in request.descriptors]


@dataclass(frozen=True)
class _Request(AbstractContextManager["_Request"]):
    descriptors: tuple[int, ...]  # standard input and output of the new process, then its `ChildFds`
    reply: socket.socket  # to the slot, which cancels the request by closing its end

    def __exit__(self, *exception: object) -> None:
        self.reply.close()
        for descriptor in self.descriptors:
            os.close(descriptor)


def main() -> None:
    parent, imports, *left_out = sys.argv[1:]
    entry.die_with_parent(int(parent))
    slot = _detach_streams()
    descriptors = _serve_until_forked(slot, _import(slot, int(imports), left_out))
    if descriptors:
        _run_training_process(descriptors)


def _detach_streams() -> socket.socket:
    """The slot's socket. The output of imports goes to a memory file; each forked process prints it again."""
    slot = socket.socket(fileno=_move_up(0))
    entry.empty_stdin()
    output = os.memfd_create("elastic-output")
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    return slot


def _move_up(descriptor: int) -> int:
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _HIGH_DESCRIPTOR)


@dataclass
class _Imported:
    obstacle: str = ""  # why no process can be forked, "" if one can
    notes: list[str] = field(default_factory=list)  # for the user, which the first process's slot passes on


def _import(slot: socket.socket, descriptor: int, left_out: list[str]) -> _Imported:
    """Make a file's imports, without the packages that are left out (`package=why`). No garbage collector visits their
    objects again, so forked processes keep sharing that memory."""
    imports: list[str] = json.loads(os.pread(descriptor, os.fstat(descriptor).st_size, 0))
    why = dict(package.split("=", 1) for package in left_out)
    imported = _Imported(_find_obstacle())
    imported.notes += [f"{package} is imported by each process anew: {why[package]}" for package in why]

    def check(module: str, failure: str) -> bool:
        if failure and not module.endswith("?"):
            imported.notes.append(f"{module} is imported once the program asks for it: {failure}")
        if obstacle := _find_obstacle():
            _begin_anew(slot, descriptor, f"{_get_package(module)}={obstacle}")
        return False

    gc.disable()
    if not imported.obstacle:
        import_followers()
        kept = [text for text in imports if "=" in text or _get_package(text) not in why]
        import_early(kept, os.environ, check)
    os.close(descriptor)
    gc.freeze()
    return imported


def _get_package(text: str) -> str:
    return text.rstrip("?").partition(":")[0].partition(".")[0]


def _begin_anew(slot: socket.socket, imports: int, left_out: str) -> NoReturn:
    """Replace this process by a server that leaves out one more package. It keeps its pid and the requests."""
    os.dup2(slot.fileno(), 0)
    os.closerange(3, imports)
    os.closerange(imports + 1, os.sysconf("SC_OPEN_MAX"))
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], left_out])


def _serve_until_forked(slot: socket.socket, imported: _Imported) -> list[int]:
    """Returns the descriptors of its request in each forked process, and none in the server, once that has ended."""
    try:
        with slot:
            _serve(slot, imported)
    except _InForkedProcess as forked:  # caught here, or it would be the context of later exceptions
        return forked.descriptors
    return []


def _serve(slot: socket.socket, imported: _Imported) -> None:
    listening = slot.fileno()
    alive: set[int] = set()  # pidfds of the forked processes
    try:
        while True:
            ready, _, _ = select.select([listening, *alive], [], [], None if alive else IDLE_SECONDS)
            if not ready:
                return
            for process in alive.intersection(ready):
                alive.remove(process)
                os.close(process)
            if listening in ready:
                request = _receive(slot)
                if request is None:
                    return
                with request:
                    if obstacle := imported.obstacle or _find_obstacle():
                        _answer(request.reply, obstacle.encode())
                    elif process := _fork_for(request, imported.notes):
                        alive.add(process)
                        imported.notes.clear()
    finally:
        for process in alive:
            os.close(process)


def _receive(slot: socket.socket) -> _Request | None:
    with suppress(OSError):
        data, descriptors, _, _ = socket.recv_fds(slot, len(FORK), DESCRIPTORS)
        if data:
            *descriptors, reply = descriptors
            return _Request(tuple(descriptors), socket.socket(fileno=reply))
    return None


def _find_obstacle() -> str:
    """Why no process can be forked now, "" if one can."""
    if devices := find_open_devices():
        return f"what it imported has opened {devices[0]}, which a fork cannot use"
    if _find_threads():
        if (pid := _fork()) == 0:  # OpenBLAS's end before a fork
            os._exit(0)
        os.waitpid(pid, 0)
    if threads := _find_threads():
        return f"a forked process would lack its thread {threads[0]!r}"
    return ""


def find_open_devices(descriptors: Path = Path("/proc/self/fd")) -> list[str]:
    """The accelerators that this process uses. Importing a framework opens none; asking for their number may."""
    names = []
    for descriptor in descriptors.iterdir():
        with suppress(OSError):  # the listing's own is closed
            names.append(os.readlink(descriptor))
    return sorted(name for name in names if name.startswith(DEVICES))


def _find_threads() -> list[str]:
    names = []
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):  # it has ended
            name = Path(f"/proc/self/task/{thread}/comm").read_text(errors="replace").strip()
            if int(thread) != os.getpid() and name not in FORK_AWARE_THREADS:
                names.append(name)
    return names


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the threads that may run
        return os.fork()


def _fork_for(request: _Request, notes: list[str]) -> int:
    """Fork the process of a request, in which this raises. Returns its pidfd once the slot has adopted it; 0: it has
    not. An intermediate process forks it: when that is killed, the slot's process inherits its child."""
    pid_read, pid_write = os.pipe()
    begin_read, begin_write = os.pipe()
    slot, server = os.getppid(), os.getpid()
    intermediate = _fork()
    if intermediate == 0:
        os.close(begin_write)
        _fork_grandchild(server, pid_write)  # returns in the new process only
        os.close(pid_read)  # the server must see end of file if this process dies
        os.close(pid_write)
        if not os.read(begin_read, 1) or os.getppid() != slot:
            os._exit(1)  # it was not adopted; another process will read its input
        os.close(begin_read)
        raise _InForkedProcess(request)
    os.close(pid_write)
    os.close(begin_read)
    try:
        pid = int(os.read(pid_read, 32) or 0)
        process = os.pidfd_open(pid) if pid else 0
        adopted = False
        if pid:
            _answer(request.reply, "\n".join([str(pid), *notes]).encode())
            with suppress(OSError):
                adopted = request.reply.recv(16) == ADOPT
        os.kill(intermediate, signal.SIGKILL)
        os.waitpid(intermediate, 0)
        if adopted:
            with suppress(OSError):  # it was killed already, as the slot will see
                os.write(begin_write, b"\n")
            _answer(request.reply, STARTED)
            return process
        if process:
            os.close(process)
        return 0
    finally:
        os.close(pid_read)
        os.close(begin_write)


def _fork_grandchild(server: int, pid_write: int) -> None:
    """Fork, write the pid, and wait to be killed. Returns in the new process only."""
    try:
        entry.die_with_parent(server)
        pid = _fork()
        if pid == 0:
            return
        os.write(pid_write, str(pid).encode())
        while True:
            signal.pause()
    finally:
        if os.getppid() == server:
            os._exit(1)  # the fork failed


def _answer(reply: socket.socket, message: bytes) -> None:
    with suppress(OSError):  # the slot has cancelled
        reply.send(message)


def _run_training_process(descriptors: list[int]) -> NoReturn:
    try:
        output = os.pread(1, os.fstat(1).st_size, 0)  # of the imports
        stdin, stdout, *fds = descriptors
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        os.dup2(stdout, 2)
        status, activity, stacks = map(os.dup, fds)  # to the lowest free numbers
        for descriptor in descriptors:
            os.close(descriptor)
        _look_like_entry()
        _reseed()
        sys.stdout.buffer.write(output)
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    entry.run(ChildFds(status, activity, stacks))


def _look_like_entry() -> None:
    """Look like `entry` in process lists, to the program, and to Python processes that the program starts."""
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined] # CPython before 3.13 forgets it
    sys.modules["spark_elastic.worker.fork_server"] = sys.modules["__main__"]  # a sign that it was forked
    sys.modules["__main__"] = entry
    sys.argv = [str(entry.__file__)]
    sys.orig_argv = [*sys.orig_argv[: sys.orig_argv.index("-m") + 1], entry.__name__]
    fields = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()
    first, end = int(fields[45]), int(fields[46])  # where the kernel finds the command line
    shown = b"\0".join(os.fsencode(word) for word in sys.orig_argv)
    if 0 < len(shown) < end - first:
        ctypes.memmove(first, shown.ljust(end - first, b"\0"), end - first)


def _reseed() -> None:
    """Seed anew what modules seeded when they were imported, but `random`, which does so itself, and `hash()`."""
    modules: dict[str, Any] = dict(sys.modules)
    if "numpy" in modules:
        modules["numpy"].random.seed()
    if "torch" in modules:
        modules["torch"].default_generator.seed()
    if "multiprocessing" in modules:
        modules["multiprocessing"].current_process().authkey = os.urandom(32)


if __name__ == "__main__":
    main()
