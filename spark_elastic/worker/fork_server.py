"""Main of a fork server: `python -m spark_elastic.worker.fork_server PARENT MODULE...`, started by a slot's process.

Imports what is slow, then forks a training process for each request on the socket that is its standard input. A forked
process goes on as `worker.entry` does in a spawned one and is adopted by the slot's process, so that nothing of it
depends on the server. This has one thread and sees no job's key, program or rows, which come on the standard input of
the forked process. It ends with the slot's process, or after `IDLE` seconds without a process of its making.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import os
import select
import signal
import socket
import sys
import threading
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from spark_elastic.worker import entry

IDLE_SECONDS = 60.0  # seconds; as long as Spark keeps a Python worker without a task
DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel")
DESCRIPTORS = 6  # of a request: standard input and output, `entry.Handed`, and where the answer goes
FORK = b"fork"
ADOPT, STARTED = b"adopt", b"born"  # the slot's word that it will be the parent, and the server's that it is
_SPARE_DESCRIPTORS = 512  # the first descriptor that is tried for what has to make room


class _InForkedProcess(BaseException):
    """Raised in a forked process, to leave the server's frames and what they hold."""

    def __init__(self, request: _Request) -> None:
        super().__init__()
        self.descriptors = [_move_up(descriptor) for descriptor in request.descriptors]


@dataclass(frozen=True)
class _Request:
    """descriptors: the new process's input and output, and what it is handed. reply: to the slot, which cancels the
    request by closing its end."""

    descriptors: tuple[int, ...]
    reply: socket.socket

    def __enter__(self) -> _Request:
        return self

    def __exit__(self, *exception: object) -> None:
        self.reply.close()
        for descriptor in self.descriptors:
            os.close(descriptor)


def main() -> None:
    parent, *modules = sys.argv[1:]
    entry.die_with_parent(int(parent))
    slot = _detach_streams()
    descriptors = _serve_until_forked(slot, _import(modules))
    if descriptors:
        _run_training_process(descriptors)


def _detach_streams() -> socket.socket:
    """The slot's socket. What imports write is kept for each forked process to write in its turn."""
    slot = socket.socket(fileno=_move_up(0))
    nothing, words = os.open(os.devnull, os.O_RDONLY), os.memfd_create("elastic-words")
    os.dup2(nothing, 0)
    for stream in (1, 2):
        os.dup2(words, stream)
    os.close(nothing)
    os.close(words)
    return slot


def _move_up(descriptor: int) -> int:
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _SPARE_DESCRIPTORS)


def _import(modules: list[str]) -> str:
    """Why they could not be imported, "" if they were. What they are made of is never looked through again, so that the
    forked processes keep sharing its memory."""
    gc.disable()
    try:
        for module in modules:
            importlib.import_module(module)
    except Exception as error:  # the training process will raise the same, and tell the driver
        return f"importing failed: {error}"
    gc.freeze()
    return ""


def _serve_until_forked(slot: socket.socket, failure: str) -> list[int]:
    """The descriptors of each new process, in that; none in the server itself, once it is done."""
    try:
        with slot:
            _serve(slot, failure)
    except _InForkedProcess as born:  # left here, or whatever the process raises would have it as its context
        return born.descriptors
    return []


def _serve(slot: socket.socket, failure: str) -> None:
    """Until the slot's process is gone or the server idle. failure: of the imports."""
    listening = slot.fileno()
    alive: set[int] = set()  # a descriptor for each forked process
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
                    if refusal := failure or _find_obstacle():
                        _answer(request.reply, refusal.encode())
                    elif process := _fork(request):
                        alive.add(process)
    finally:
        for process in alive:
            os.close(process)


def _receive(slot: socket.socket) -> _Request | None:
    try:
        data, descriptors, _, _ = socket.recv_fds(slot, len(FORK), DESCRIPTORS)
    except OSError:
        return None
    if not data:
        return None
    *given, reply = descriptors
    return _Request(tuple(given), socket.socket(fileno=reply))


def _find_obstacle() -> str:
    """Why no process can be forked now, "" if one can."""
    if devices := find_open_devices():
        return f"what it imported has opened {devices[0]}, which a fork cannot use"
    if _count_threads() > 1:
        # OpenBLAS's end before a fork and are started again when they have something to do; no other kind is known.
        _fork_and_discard()
    if (threads := _count_threads()) > 1:
        return f"{threads} threads run in it"
    return ""


def find_open_devices(descriptors: Path = Path("/proc/self/fd")) -> list[str]:
    """The accelerators that this process uses. Importing a framework opens none; to ask whether there are any may."""
    found = []
    for descriptor in descriptors.iterdir():
        try:
            found.append(os.readlink(descriptor))
        except OSError:
            continue  # the listing's own
    return sorted(name for name in found if name.startswith(DEVICES))


def _count_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _fork_and_discard() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the threads
        pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def _fork(request: _Request) -> int:
    """A descriptor of the new process, which the slot's process has adopted; 0: the slot has no more use for it.

    Forked by a process in between: when that is killed, the slot's process inherits its child.

    Raises:
        _Born: in the new process.
    """
    told_read, told_write = os.pipe()
    begin_read, begin_write = os.pipe()
    slot, server = os.getppid(), os.getpid()
    between = os.fork()
    if between == 0:
        os.close(begin_write)
        _fork_grandchild(server, told_write)  # returns in the new process alone
        # Before it waits: the server is to see the end of one in between that says nothing.
        os.close(told_read)
        os.close(told_write)
        if not os.read(begin_read, 1) or os.getppid() != slot:
            os._exit(1)  # nobody adopted it; another process will read what there is to read
        os.close(begin_read)
        raise _InForkedProcess(request)
    os.close(told_write)
    os.close(begin_read)
    try:
        pid = int(os.read(told_read, 32) or 0)
        process = os.pidfd_open(pid) if pid else 0
        adopted = pid != 0 and _await_adoption(request.reply, pid)
        os.kill(between, signal.SIGKILL)
        os.waitpid(between, 0)
        if adopted:
            _let_begin(begin_write)
            _answer(request.reply, STARTED)
            return process
        if process:
            os.close(process)
        return 0
    finally:
        os.close(told_read)
        os.close(begin_write)


def _let_begin(process: int) -> None:
    try:
        os.write(process, b"\n")
    except OSError:
        pass  # it was killed already, as the slot will see


def _fork_grandchild(server: int, told: int) -> None:
    try:
        entry.die_with_parent(server)
        pid = os.fork()
        if pid == 0:
            return
        os.write(told, str(pid).encode())
        while True:
            signal.pause()
    finally:
        if os.getppid() == server:
            os._exit(1)  # no process could be forked


def _await_adoption(reply: socket.socket, pid: int) -> bool:
    _answer(reply, str(pid).encode())
    try:
        return reply.recv(16) == ADOPT
    except OSError:
        return False


def _answer(reply: socket.socket, words: bytes) -> None:
    try:
        reply.send(words)
    except OSError:
        pass  # the slot has cancelled


def _run_training_process(descriptors: list[int]) -> NoReturn:
    """As a process that was spawned to run `entry`, in what others can see of it and in what it has of its own."""
    try:
        words = os.pread(1, os.fstat(1).st_size, 0)
        stdin, stdout, *handed = descriptors
        os.dup2(stdin, 0)
        os.dup2(stdout, 1)
        os.dup2(stdout, 2)
        status, activity, stacks = map(os.dup, handed)  # the lowest numbers that are free
        for descriptor in descriptors:
            os.close(descriptor)
        _look_like_entry()
        _reseed()
        sys.stdout.buffer.write(words)
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    entry.run((status, activity, stacks))


def _look_like_entry() -> None:
    """To lists of processes, to the program that it runs, and to the Python processes that this starts."""
    threading.main_thread()._set_native_id()  # type: ignore[attr-defined] # CPython before 3.13 forgets it
    sys.modules["__main__"] = entry
    sys.argv = [str(entry.__file__)]
    sys.orig_argv = [*sys.orig_argv[: sys.orig_argv.index("-m") + 1], entry.__name__]
    fields = Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()
    first, end = int(fields[45]), int(fields[46])  # where the kernel reads the command line
    shown = b"\0".join(os.fsencode(word) for word in sys.orig_argv)
    if 0 < len(shown) < end - first:
        ctypes.memmove(first, shown.ljust(end - first, b"\0"), end - first)


def _reseed() -> None:
    """What a process draws by chance when it imports these; `random` does so at each fork."""
    modules: dict[str, Any] = dict(sys.modules)
    if "numpy" in modules:
        modules["numpy"].random.seed()
    if "torch" in modules:
        modules["torch"].default_generator.seed()
    if "multiprocessing" in modules:
        modules["multiprocessing"].current_process().authkey = os.urandom(32)


if __name__ == "__main__":
    main()
