"""Starts training processes, forked from a fork server or spawned: a `ForkedProcess` has the same methods.

A slot's process keeps one `ForkServer`; later jobs use it, too, if Spark reuses its Python worker. If no process comes
out of the server, for whatever reason, one is spawned instead. The process's first lines say so to the user.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import resource
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

from spark_elastic.rendezvous.messages import SLOT_LINE_PREFIX
from spark_elastic.worker.handover import ADOPT, ENTRY, FORK, FORK_SERVER, IMPORT_LATER, STARTED, ChildFds

log = logging.getLogger("spark_elastic.worker")

PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37


@dataclass(frozen=True)
class InheritedSettings:
    """What processes inherit from their server. They may hold secrets, and are not shown."""

    imports: tuple[str, ...] = field(repr=False)  # early ones of the program, made by the server
    environment: Mapping[str, str] = field(repr=False)  # of the server
    others: tuple[object, ...] = ()  # folder, umask, limits, signal mask, processors and so on

    @classmethod
    def capture(cls, imports: tuple[str, ...], environment: Mapping[str, str]) -> InheritedSettings:
        """With what a process that this one starts now would inherit."""
        kinds = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]
        limits = tuple(map(resource.getrlimit, kinds))
        mask = frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        processors = frozenset(os.sched_getaffinity(0))
        status = Path("/proc/self/status").read_text(errors="replace").splitlines()
        umask = [line for line in status if line.startswith("Umask:")]
        others = sys.executable, os.getcwd(), *umask, limits, mask, processors, os.nice(0)
        return cls(imports, environment, others)


@dataclass(eq=False, repr=False)
class ForkServer:
    settings: InheritedSettings
    process: subprocess.Popen[bytes]
    requests: socket.socket
    failed: bool = False  # a request failed: no more are sent

    @classmethod
    def start(cls, settings: InheritedSettings) -> ForkServer:
        """Start it. It ends with the calling thread, which must outlive it."""
        requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, os.fdopen(os.memfd_create("elastic-imports"), "wb") as imports:
            imports.write(json.dumps(settings.imports).encode())
            imports.flush()
            arguments = [str(os.getpid()), str(imports.fileno())]
            try:
                process = subprocess.Popen(
                    [sys.executable, "-m", FORK_SERVER, *arguments],
                    stdin=theirs.fileno(),
                    pass_fds=[imports.fileno()],
                    stdout=theirs.fileno(),
                    stderr=subprocess.STDOUT,
                    env=dict(settings.environment),
                )
            except OSError:
                requests.close()
                raise
        return cls(settings, process, requests)

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process.poll() is None else None

    def request(self, descriptors: tuple[int, ...]) -> None:
        """Request a process, with its standard input and output, its `ChildFds`, and the server's end of a socket."""
        socket.send_fds(self.requests, [FORK], descriptors)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.requests.close()


class ForkServerCache:
    """The fork server of this process; main thread only."""

    def __init__(self) -> None:
        self._server: ForkServer | None = None

    @property
    def pid(self) -> int | None:
        return None if self._server is None else self._server.pid

    def get(self, settings: InheritedSettings) -> ForkServer | None:
        """A server with these settings, started now if necessary. None: such a server has failed."""
        if self._server is not None and self._server.settings == settings:
            if self._server.failed:
                return None
            if self._server.pid is not None:
                return self._server
        self.close()
        try:
            self._server = ForkServer.start(settings)
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
) -> ForkedProcess | subprocess.Popen[bytes]:
    """Start a process that runs `entry`. Main thread only. imports: of the fork server; None: spawn.
    fds: the process's; `fds.status` is closed in this process once the new one has it."""

    def spawn(stdin: int, stdout: int, *arguments: str) -> subprocess.Popen[bytes]:
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


class AdoptedProcess:
    """A child of this process that another process started. Any thread."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._lock = threading.Lock()
        self._ended = False

    def wait(self) -> int:
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:  # its pid may be reused as soon as it is reaped
            self._ended = True
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def send_signal(self, number: int) -> None:
        with self._lock:
            if not self._ended:
                os.kill(self.pid, number)


class ForkedProcess:
    """A process from a fork server, or a spawned one if that fails, with the methods of `subprocess.Popen`. It begins
    to exist inside `wait`, for the server may be importing; one that is killed before is never started."""

    def __init__(
        self, server: ForkServer, fds: ChildFds, spawn: Callable[..., subprocess.Popen[bytes]]
    ) -> None:
        """spawn: starts a process with this standard input and output, and further arguments."""
        self._server = server
        self._spawn = spawn
        self._lock = threading.Lock()
        self._process: AdoptedProcess | subprocess.Popen[bytes] | None = None
        self._killed = False
        self._died_importing = False  # the server, as another process might
        self._reply, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._streams, self.stdin, self.stdout = _open_pipes()
        self._status = fds.status
        with theirs, suppress(OSError):  # the server is gone; `wait` will read end of file as its reply
            server.request((*self._streams, *astuple(fds), theirs.fileno()))

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

    def _begin(self) -> AdoptedProcess | subprocess.Popen[bytes] | None:
        process = self._adopt()
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

    def _adopt(self) -> AdoptedProcess | None:
        answer, *notes = _receive(self._reply).decode(errors="replace").split("\n")
        forked = answer.isdigit()
        self._died_importing = not answer
        if not forked and not self._killed:
            notes = [f"no process can be forked, so each starts anew: {answer or 'the fork server is gone'}"]
        for note in notes:
            os.write(self._streams[1], f"{SLOT_LINE_PREFIX}{note}\n".encode())
        if not forked:
            return None
        pid = int(answer)
        with _adopt_orphans():
            with suppress(OSError):  # the server is gone; then nothing is received
                self._reply.send(ADOPT)
            started = _receive(self._reply) == STARTED
        process = AdoptedProcess(pid)
        try:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
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


def _receive(reply: socket.socket) -> bytes:
    with suppress(OSError):
        return reply.recv(1 << 16)
    return b""
