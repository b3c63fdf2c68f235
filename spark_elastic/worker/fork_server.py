"""Main of a fork server: `python -m spark_elastic.worker.fork_server SLOT SETTINGS LEFT_OUT...`, started by a slot.

Makes a program's early imports, then forks a training process for each request on the socket that is its standard
input; it continues like a spawned one (`worker.entry`), and the slot's process adopts it. The server has one thread and
sees no job's key, program or rows. It ends with the slot's process, or after `IDLE_SECONDS` without a process that it
forked. A package after whose import no process could be forked is left out: the server begins anew without it, and each
forked process imports it.

The file with the descriptor SETTINGS is JSON: the imports, and perhaps a listening socket's descriptor. There other
slots of the executor get servers that are forks of this one. As no such slot can adopt its server's processes, they
stay the server's children: it reports how they end, and they end with it.
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
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from io import FileIO
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from spark_elastic.runs.keeper import find_peer
from spark_elastic.worker import entry
from spark_elastic.worker.handover import ADOPT, ANSWER_WITHIN, FORK, SERVE, STARTED, ChildFds
from spark_elastic.worker.imports import import_early, import_followers

IDLE_SECONDS = 60.0  # as long as Spark keeps a Python worker without a task
DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel")
FORK_AWARE_THREADS = frozenset({"jemalloc_bg_thd"})  # pyarrow's, which is started anew
DESCRIPTORS = 6  # of a request: standard input and output, `ChildFds`, and where the answer goes
SLOT_DESCRIPTORS = 2  # of another slot: the server's end of the socket for its requests, and the slot's pidfd
Alive = dict[int, tuple[int, socket.socket]]  # by pidfd: pid of a child (else 0), where its exit code goes
_HIGH_DESCRIPTOR = 512  # descriptors that must not occupy low numbers are moved to here and above


class _InForkedProcess(BaseException):
    """Raised in a forked process with its descriptors, to unwind the server's frames and free their objects."""


@dataclass(frozen=True)
class _Request(AbstractContextManager["_Request"]):
    descriptors: tuple[int, ...]  # standard input and output of the new process, then its `ChildFds`
    reply: socket.socket  # to the slot, which cancels the request by closing its end

    def __exit__(self, *exception: object) -> None:
        self.reply.close()
        for descriptor in self.descriptors:
            os.close(descriptor)


def main() -> None:
    parent, settings, *left_out = sys.argv[1:]
    entry.die_with_parent(int(parent))
    requests = _detach_streams()
    imports, *listener = json.loads(os.pread(int(settings), os.fstat(int(settings)).st_size, 0))
    imported = _import(requests, imports, left_out, [int(settings), *listener])
    os.close(int(settings))
    imported.listener = socket.socket(fileno=listener[0]) if listener else None
    forked = _serve_until_forked(requests, imported)
    if len(forked) == SLOT_DESCRIPTORS:
        forked = _serve_other_slot(imported, *forked)
    if forked:
        _run_training_process(forked)


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
    listener: socket.socket | None = None  # where other slots ask for servers


def _import(requests: socket.socket, imports: list[str], left_out: list[str], kept: list[int]) -> _Imported:
    """Make the imports, without the packages that are left out (`package=why`). No garbage collector visits their
    objects again, so forked processes keep sharing that memory. kept: descriptors that a new beginning needs."""
    why = dict(package.split("=", 1) for package in left_out)
    imported = _Imported(_find_obstacle())
    imported.notes += [f"{package} is imported by each process anew: {why[package]}" for package in why]

    def check(module: str, failure: str) -> bool:
        if failure and not module.endswith("?"):
            imported.notes.append(f"{module} is imported once the program asks for it: {failure}")
        if obstacle := _find_obstacle():
            _begin_anew(requests, kept, f"{_get_package(module)}={obstacle}")
        return False

    gc.disable()
    if not imported.obstacle:
        import_followers()
        wanted = [text for text in imports if "=" in text or _get_package(text) not in why]
        import_early(wanted, os.environ, check)
    gc.freeze()
    return imported


def _get_package(text: str) -> str:
    return text.rstrip("?").partition(":")[0].partition(".")[0]


def _begin_anew(requests: socket.socket, kept: list[int], left_out: str) -> NoReturn:
    """Replace this process by a server that leaves out one more package. It keeps its pid and what was requested."""
    os.dup2(requests.fileno(), 0)
    for below, above in pairwise([2, *sorted(kept), os.sysconf("SC_OPEN_MAX")]):
        os.closerange(below + 1, above)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], left_out])


def _serve_other_slot(imported: _Imported, place: int, pidfd: int) -> list[int]:
    """Be the server of a slot that did not start this process. Returns in a forked process only: what was imported must
    not clean up for the others when this one ends."""
    with suppress(Exception):  # the slot notices the end
        requests, slot = socket.socket(fileno=place), FileIO(pidfd)
        if forked := _serve_until_forked(requests, replace(imported, listener=None), slot):
            return forked
    os._exit(0)


def _serve_until_forked(
    requests: socket.socket, imported: _Imported, slot: FileIO | None = None
) -> list[int]:
    """Returns the descriptors of its request in each forked process, and none in the server, once that has ended. slot:
    its pidfd, if it did not start this process."""
    alive: Alive = {}
    try:
        with requests, imported.listener or nullcontext(), slot or nullcontext():
            _serve(requests, imported, slot, alive)
    except _InForkedProcess as forked:  # caught here, or it would be the context of later exceptions
        return list(forked.args)
    finally:
        for descriptor, (_, reply) in alive.items():
            os.close(descriptor)
            reply.close()
    return []


def _serve(requests: socket.socket, imported: _Imported, slot: FileIO | None, alive: Alive) -> None:
    notes, listener = imported.notes.copy(), imported.listener
    sources: set[Any] = {requests, listener, slot} - {None}
    while alive or requests in sources:
        ready, _, _ = select.select([*sources, *alive], [], [], None if alive else IDLE_SECONDS)
        if not ready or slot in ready:
            return
        for process in alive.keys() & ready:
            pid, reply = alive.pop(process)
            os.close(process)
            with reply:
                if pid:
                    _answer(reply, str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
        if listener is not None and listener in ready:
            alive |= _accept_slot(listener, imported.obstacle)
        if requests in ready:
            if (request := _receive(requests)) is None:
                sources.remove(requests)  # its processes live on
                continue
            with request:
                try:
                    if obstacle := imported.obstacle or _find_obstacle():
                        _answer(request.reply, obstacle)
                    else:
                        alive |= _fork_for(request, notes, slot is None)
                except OSError as error:  # others must not suffer
                    _answer(request.reply, str(error))


def _accept_slot(listener: socket.socket, obstacle: str) -> Alive:
    """Fork the server of another slot, in which this raises. The slot notices if there is none."""
    received: list[int] = []
    with suppress(OSError), listener.accept()[0] as connection:
        try:
            connection.settimeout(ANSWER_WITHIN)
            if find_peer(connection)[1] == os.getuid():
                _, received, _, _ = socket.recv_fds(connection, len(SERVE), SLOT_DESCRIPTORS)
            if len(received) == SLOT_DESCRIPTORS and not (obstacle or _find_obstacle()):
                if (pid := _fork()) == 0:
                    raise _InForkedProcess(*map(_move_up, received))
                return {os.pidfd_open(pid): (pid, connection.dup())}
        finally:
            for descriptor in received:
                os.close(descriptor)
    return {}


def _receive(requests: socket.socket) -> _Request | None:
    with suppress(OSError):
        data, descriptors, _, _ = socket.recv_fds(requests, len(FORK), DESCRIPTORS)
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


def _fork_for(request: _Request, notes: list[str], is_adopted: bool) -> Alive:
    """Fork the process of a request, in which this raises. is_adopted: by the slot; else it stays a child."""
    parent = os.getppid() if is_adopted else os.getpid()
    begin_read, begin_write = os.pipe()
    with open(begin_read, "rb", 0) as begun, open(begin_write, "wb", 0) as begin:
        pid, intermediate = _fork_adoptable() if is_adopted else (_fork(), 0)
        if pid == 0:
            begin.close()
            if not begun.read(1):
                os._exit(1)  # another process will read its input
            entry.die_with_parent(parent)
            raise _InForkedProcess(*map(_move_up, request.descriptors))
        is_wanted = False  # else the new process reads the end of its pipe
        try:
            process = os.pidfd_open(pid)
            with suppress(OSError):  # the slot has cancelled
                socket.send_fds(
                    request.reply, ["\n".join([f"{pid} {os.getpid()}", *notes]).encode()], [process]
                )
                is_wanted = request.reply.recv(16) == ADOPT
        finally:
            if is_adopted:
                os.kill(intermediate, signal.SIGKILL)
                os.waitpid(intermediate, 0)
        if is_wanted:
            notes.clear()
            begin.write(b"\n")
            _answer(request.reply, STARTED)
    return {process: (0 if is_adopted else pid, request.reply.dup())}


def _fork_adoptable() -> tuple[int, int]:
    """Fork a process that the slot's process can adopt: an intermediate process forks it, and when that is killed, the
    slot's process inherits its child. Returns the pids of both, and (0, 0) in the new process."""
    server = os.getpid()
    pid_read, pid_write = os.pipe()
    with open(pid_read, "rb", 0) as told, open(pid_write, "wb", 0) as tell:
        intermediate = _fork()
        if intermediate == 0:
            try:
                entry.die_with_parent(server)
                if (pid := _fork()) == 0:
                    return 0, 0
                tell.write(str(pid).encode())
                while True:
                    signal.pause()
            finally:
                if os.getppid() == server:
                    os._exit(1)  # the second fork failed
        tell.close()
        if pid := int(told.read(32) or 0):
            return pid, intermediate
    os.waitpid(intermediate, 0)
    raise OSError("no process can be forked")


def _answer(reply: socket.socket, message: str) -> None:
    with suppress(OSError):  # the slot has cancelled
        reply.send(message.encode())


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
    if "numpy.random" in modules:  # numpy imports it once it is used
        modules["numpy.random"].seed()
    if "torch" in modules:
        modules["torch"].default_generator.seed()
    if "multiprocessing" in modules:
        modules["multiprocessing"].current_process().authkey = os.urandom(32)


if __name__ == "__main__":
    main()
