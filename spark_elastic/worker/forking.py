"""Starts training processes, forked from a fork server or spawned: a `ForkedProcess` has the same methods.

A slot's process keeps one `ForkServer`; later jobs use it, too, if Spark reuses its Python worker. An executor's first
slot starts it, and that forks the others' servers. If no process comes out of the server, for whatever reason, one is
spawned instead. The process's first lines say so to the user.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import IO

from spark_elastic.protocol.types import SLOT_LINE_PREFIX
from spark_elastic.runs.keeper import find_peer, read_start
from spark_elastic.worker import handover
from spark_elastic.worker.handover import ADOPT, ENTRY, FORK, FORK_SERVER, IMPORT_LATER, STARTED, ChildFds

Popen = subprocess.Popen[bytes]
log = logging.getLogger("spark_elastic.worker")

PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37
SPARK_SECRET = "PYTHON_WORKER_FACTORY_SECRET"  # which Spark's Python workers of an executor share


@dataclass(frozen=True)
class InheritedSettings:
    """What processes inherit from their server. They may hold secrets, and are not shown."""

    imports: tuple[str, ...] = field(repr=False)  # early ones of the program, made by the server
    environment: Mapping[str, str] = field(repr=False)  # of the server
    others: tuple[object, ...] = ()  # folder, umask, limits, signal mask, processors, process group and so on

    @classmethod
    def capture(cls, imports: tuple[str, ...], environment: Mapping[str, str]) -> InheritedSettings:
        """With what a process that this one starts now would inherit."""
        kinds = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
        limits = tuple(map(resource.getrlimit, kinds))
        mask = sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        processors = sorted(os.sched_getaffinity(0))
        status = Path("/proc/self/status").read_text(errors="replace").splitlines()
        umask = [line for line in status if line.startswith("Umask:")]
        others = sys.executable, os.getcwd(), *umask, limits, mask, processors, os.nice(0), os.getpgid(0)
        return cls(imports, environment, others)

    def find_address(self) -> str | None:
        """Where slots of one executor that have the same settings meet: an abstract name, which others cannot guess
        and which tells them nothing, for the environment holds a secret. None: this is no Python worker of Spark's."""
        if SPARK_SECRET not in self.environment:
            return None
        parent, variables = os.getppid(), sorted(self.environment.items())
        settings = parent, read_start(parent), os.getuid(), self.imports, variables, self.others
        return f"\0spark-elastic-{hashlib.sha256(repr(settings).encode()).hexdigest()}"


@dataclass(eq=False, repr=False)
class ForkServer:
    settings: InheritedSettings
    requests: socket.socket
    process: Popen | None  # None: another slot's server forks it
    failed: bool = False  # a request failed: no more are sent
    pid: int | None = None  # None: not known before its first process

    @classmethod
    def start(cls, settings: InheritedSettings, may_ask: bool) -> ForkServer:
        """Start it. It ends with the calling thread, which must outlive it. may_ask: or ask another slot's server."""
        requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        process, address = None, settings.find_address()
        with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            try:
                is_first = address is not None and _listen(listener, address)
                if is_first or address is None or not may_ask or not _ask_other_slot(theirs, address):
                    process = _start_process(settings, theirs, [listener.fileno()] if is_first else [])
            except OSError:
                requests.close()
                raise
        return cls(settings, requests, process, pid=None if process is None else process.pid)

    def is_running(self) -> bool:
        if self.process is not None:
            return self.process.poll() is None
        try:
            return bool(self.requests.recv(1, socket.MSG_DONTWAIT))
        except OSError as error:
            return isinstance(error, BlockingIOError)

    def close(self) -> None:
        """Its processes live on."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.requests.close()


def _listen(listener: socket.socket, address: str) -> bool:
    """Whether this slot is the first one there."""
    with suppress(OSError):
        listener.bind(address)
        listener.listen()
        return True
    return False


def _ask_other_slot(requests: socket.socket, address: str) -> bool:
    """Ask its server for one that serves these requests and ends with this process."""
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.settimeout(handover.ANSWER_WITHIN)
        other.connect(address)
        if find_peer(other)[1] == os.getuid():
            with open(os.pidfd_open(os.getpid()), "rb", 0) as slot:
                socket.send_fds(other, [handover.SERVE], [requests.fileno(), slot.fileno()])
            return True
    return False


def _start_process(settings: InheritedSettings, requests: socket.socket, listener: list[int]) -> Popen:
    with os.fdopen(os.memfd_create("elastic-settings"), "wb") as file:
        file.write(json.dumps([settings.imports, *listener]).encode())
        file.flush()
        return subprocess.Popen(
            [sys.executable, "-m", FORK_SERVER, str(os.getpid()), str(file.fileno())],
            stdin=requests.fileno(),
            pass_fds=[file.fileno(), *listener],
            stdout=requests.fileno(),
            stderr=subprocess.STDOUT,
            env=dict(settings.environment),
        )


class ForkServerCache:
    """The fork server of this process; main thread only."""

    def __init__(self) -> None:
        self._server: ForkServer | None = None

    @property
    def pid(self) -> int | None:
        """Of a server that runs; another slot's is known with its first process."""
        return self._server.pid if self._server is not None and self._server.is_running() else None

    def get(self, settings: InheritedSettings) -> ForkServer | None:
        """A server with these settings, started now if necessary. None: such a server has failed."""
        may_ask = True
        if self._server is not None and self._server.settings == settings:
            if self._server.failed and self._server.process is not None:
                return None
            may_ask = not self._server.failed
            if may_ask and self._server.is_running():
                return self._server
        self.close()
        try:
            self._server = ForkServer.start(settings, may_ask)
        except OSError as error:
            log.debug("no fork server could be started: %s", error)
        return self._server

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._server = None


fork_server_cache = ForkServerCache()  # it outlives the slots and jobs of this process


def start_process(
    fds: ChildFds, imports: tuple[str, ...] | None, environment: Mapping[str, str]
) -> ForkedProcess | Popen:
    """Start a process that runs `entry`. Main thread only. imports: of the fork server; None: spawn.
    fds: the process's; `fds.status` is closed in this process once the new one has it."""

    def spawn(stdin: int, stdout: int, *arguments: str) -> Popen:
        return subprocess.Popen(
            [sys.executable, "-m", ENTRY, *arguments],
            stdin=stdin,
            stdout=stdout,
            stderr=subprocess.STDOUT,
            pass_fds=astuple(fds),
            env=environment,
        )

    if imports is not None:
        server = fork_server_cache.get(InheritedSettings.capture(imports, environment))
        if server is not None:
            return ForkedProcess(server, fds, spawn)
    process = spawn(subprocess.PIPE, subprocess.PIPE)
    os.close(fds.status)
    return process


class ServedProcess:
    """A process that a fork server has forked. Any thread."""

    def __init__(self, pid: int, pidfd: int, reply: socket.socket | None) -> None:
        """reply: where its server reports its end; None: it is a child of this process."""
        self.pid = pid
        self._pidfd, self._reply = pidfd, reply
        self._lock = threading.Lock()

    def wait(self) -> int:
        if self._reply is None:
            code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        else:
            with self._reply:
                code = int(_receive(self._reply)[0] or -signal.SIGKILL)
            self.send_signal(signal.SIGKILL)  # if its server has died without a word
            ended = select.poll()
            ended.register(self._pidfd, select.POLLIN)
            ended.poll()
        with self._lock:
            os.close(self._pidfd)
            self._pidfd = -1  # it has ended
        return code

    def send_signal(self, number: int) -> None:
        with self._lock, suppress(ProcessLookupError):
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, number)


class ForkedProcess:
    """A process from a fork server, or a spawned one if that fails, with the methods of `subprocess.Popen`. It begins
    to exist inside `wait`, for the server may be importing; one that is killed before is never started."""

    def __init__(self, server: ForkServer, fds: ChildFds, spawn: Callable[..., Popen]) -> None:
        """spawn: starts a process with this standard input and output, and further arguments."""
        self._server = server
        self._spawn = spawn
        self._lock = threading.Lock()
        self._process: ServedProcess | Popen | None = None
        self.begun = threading.Event()  # its process id is known, or there will be no process
        self._killed = False
        self._died_importing = False  # the server, as another process might
        self._reply, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._streams, self.stdin, self.stdout = _open_pipes()
        self._status = fds.status
        with theirs, suppress(OSError):  # the server is gone; `wait` will read end of file as its reply
            socket.send_fds(server.requests, [FORK], [*self._streams, *astuple(fds), theirs.fileno()])

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def wait(self) -> int:
        try:
            process = self._begin()
        except OSError as error:
            os.write(self._streams[1], f"the training process could not be started: {error}\n".encode())
            return 1
        finally:
            self.begun.set()
            self._reply.close()
            for descriptor in (*self._streams, self._status):
                os.close(descriptor)
        return -signal.SIGKILL if process is None else process.wait()

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        with self._lock:
            if self._process is not None:
                self._process.send_signal(number)
            elif number == signal.SIGKILL and not self._killed:
                self._killed = True
                with suppress(OSError):  # the other end is closed
                    self._reply.shutdown(socket.SHUT_RDWR)

    def _begin(self) -> ServedProcess | Popen | None:
        process = self._take_over()
        with self._lock:
            if process is None and not self._killed:
                self._server.failed = True
                arguments = [IMPORT_LATER] if self._died_importing else []
                self._process = self._spawn(*self._streams, *arguments)
            elif process is not None:
                self._process = process
                if self._killed:
                    process.send_signal(signal.SIGKILL)
            return self._process

    def _take_over(self) -> ServedProcess | None:
        said, pidfds = _receive(self._reply)
        answer, *notes = said.split("\n")
        self._died_importing = not answer
        if not pidfds and not self._killed:
            notes = [f"no process can be forked, so each starts anew: {answer or 'the fork server is gone'}"]
        for note in notes:
            os.write(self._streams[1], f"{SLOT_LINE_PREFIX}{note}\n".encode())
        if not pidfds:
            return None
        pid, self._server.pid = map(int, answer.split())
        is_adopted = self._server.process is not None
        with _adopt_orphans():
            with suppress(OSError):  # the server is gone; then nothing is received
                self._reply.send(ADOPT)
            started = _receive(self._reply)[0] == STARTED
        process = ServedProcess(pid, pidfds[0], None if is_adopted else self._reply.dup())
        try:
            if is_adopted:
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            os.close(pidfds[0])
            return None  # it was not adopted and ends by itself
        if not started:  # the server died meanwhile; the process may have begun to read its input
            process.send_signal(signal.SIGKILL)
        return process


_subreaper_lock = threading.Lock()  # being a subreaper is an attribute of the process


@contextmanager
def _adopt_orphans() -> Iterator[None]:
    """Inside the block, descendants of this process that lose their parent become children of its main thread."""
    prctl: Callable[..., int] = ctypes.CDLL(None, use_errno=True).prctl
    before = ctypes.c_int()
    with _subreaper_lock:
        prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            yield
        finally:
            prctl(PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def _open_pipes() -> tuple[tuple[int, int], IO[bytes], IO[bytes]]:
    """((standard input, standard output) of the new process, this process's end of its input, of its output)"""
    theirs_in, ours_in = os.pipe()
    try:
        ours_out, theirs_out = os.pipe()
    except OSError:
        os.close(theirs_in)
        os.close(ours_in)
        raise
    return (theirs_in, theirs_out), os.fdopen(ours_in, "wb"), os.fdopen(ours_out, "rb")


def _receive(reply: socket.socket) -> tuple[str, list[int]]:
    """A message, "" at the end, and the descriptors with it."""
    with suppress(OSError):
        said, descriptors, _, _ = socket.recv_fds(reply, 1 << 16, 1, socket.MSG_CMSG_CLOEXEC)
        return said.decode(errors="replace"), descriptors
    return "", []
