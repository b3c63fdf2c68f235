"""The slot's side of forked training processes: its fork server, and a process that comes out of it.

A slot's process keeps one `ForkServer`, from which later jobs profit as well if Spark uses its Python worker again.
Where no process comes out of a server, for whatever reason, it is spawned instead; the log says so (DEBUG).
"""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO

from spark_elastic.worker import fork_server
from spark_elastic.worker.entry import ChildFds
from spark_elastic.worker.fork_server import ADOPT, FORK, STARTED
from spark_elastic.worker.program import get_environment

log = logging.getLogger("spark_elastic.worker")

# What a fork is known to do no harm to. TensorFlow is not: it starts threads when it is imported.
FORK_SAFE = frozenset({"torch", "torch._dynamo", "spark_elastic.torch"})
PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37


def select_fork_imports(program: object, preload: tuple[str, ...], wanted: bool) -> tuple[str, ...]:
    """What a fork server may import for a program that preloads this; nothing: it is to be spawned.

    wanted: `fork_workers`. An environment of the program's own must be there before anything is imported, and may hold
    secrets.
    """
    if not wanted or get_environment(program) or "torch" not in preload or not FORK_SAFE.issuperset(preload):
        return ()
    return preload


@dataclass(frozen=True)
class InheritedSettings:
    """What a server hands down to its processes: one serves only slots of the same."""

    modules: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    others: tuple[object, ...] = ()

    @classmethod
    def capture(cls, modules: tuple[str, ...], environment: Mapping[str, str]) -> InheritedSettings:
        """With what a process started here and now would take over from this one."""
        names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
        limits = tuple(resource.getrlimit(getattr(resource, name)) for name in names)
        mask = frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        processors = frozenset(os.sched_getaffinity(0))
        others = sys.executable, os.getcwd(), _read_umask(), limits, mask, processors, os.nice(0)
        return cls(modules, environment, others)


def _read_umask() -> str:
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        return next((line for line in file if line.startswith("Umask:")), "")


class ForkServer:
    """The running process."""

    def __init__(
        self, shape: InheritedSettings, process: subprocess.Popen[bytes], requests: socket.socket
    ) -> None:
        self.settings = shape
        self.failed = False  # somebody asked in vain: nobody is to ask again
        self._process = process
        self._requests = requests

    @classmethod
    def start(cls, shape: InheritedSettings) -> ForkServer:
        """In a thread that outlives it: it ends with that."""
        requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                process = subprocess.Popen(
                    [sys.executable, "-m", fork_server.__name__, str(os.getpid()), *shape.modules],
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=subprocess.STDOUT,
                    env=dict(shape.environment),
                )
            except OSError:
                requests.close()
                raise
        return cls(shape, process, requests)

    @property
    def pid(self) -> int | None:
        """None once it has ended."""
        return self._process.pid if self._process.poll() is None else None

    def ask(self, streams: tuple[int, int], handed: ChildFds, reply: int) -> None:
        """For a process with this standard input and output.

        Raises:
            OSError: it is gone.
        """
        socket.send_fds(self._requests, [FORK], [*streams, *handed, reply])

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._requests.close()


class ForkServerCache:
    """The fork server of this process; main thread only."""

    def __init__(self) -> None:
        self._server: ForkServer | None = None

    @property
    def pid(self) -> int | None:
        """None where no server runs."""
        return None if self._server is None else self._server.pid

    def get(self, shape: InheritedSettings) -> ForkServer | None:
        """One that suits; made now if there is none. None: such a one has failed."""
        if self._server is not None and self._server.settings == shape:
            if self._server.failed:
                return None
            if self._server.pid is not None:
                return self._server
        self.close()
        try:
            self._server = ForkServer.start(shape)
        except OSError as error:
            log.debug("no fork server could be started: %s", error)
        return self._server

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._server = None


fork_server_cache = ForkServerCache()


class AdoptedProcess:
    """A child of this process that it did not start itself. Any thread."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._lock = threading.Lock()
        self._ended = False

    def wait(self) -> int:
        """Its exit code, negative for a signal; one thread alone may call this."""
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with self._lock:  # its number may be another's as soon as it is collected
            self._ended = True
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def send_signal(self, number: int) -> None:
        with self._lock:
            if not self._ended:
                os.kill(self.pid, number)


class ForkedProcess:
    """A training process to come: out of a fork server, which may not be ready yet, or else spawned.

    The interface is that of `subprocess.Popen`, but it comes into being inside `wait`, for which there is a thread.
    """

    def __init__(
        self,
        server: ForkServer,
        handed: ChildFds,
        spawn: Callable[[int, int], subprocess.Popen[bytes]],
    ) -> None:
        """handed: the first of these is closed here once the process has it. spawn: with these streams."""
        self._server = server
        self._spawn = spawn
        self._lock = threading.Lock()
        self._process: AdoptedProcess | subprocess.Popen[bytes] | None = None
        self._killed = False
        self._reply, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._streams, self.stdin, self.stdout = _open_pipes()
        self._status = handed[0]
        with theirs:
            try:
                server.ask(self._streams, handed, theirs.fileno())
            except OSError:
                pass  # it is gone, and so the reply says nothing

    @property
    def pid(self) -> int | None:
        """None until it has come into being."""
        return None if self._process is None else self._process.pid

    def wait(self) -> int:
        """Its exit code; one thread alone may call this."""
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
                _shut_down(self._reply)

    def _begin(self) -> AdoptedProcess | subprocess.Popen[bytes] | None:
        """None: it was killed before."""
        process = self._adopt()
        with self._lock:
            if process is None and not self._killed:
                self._server.failed = True
                self._process = self._spawn(*self._streams)
            elif process is not None:
                self._process = process
                if self._killed:
                    process.send_signal(signal.SIGKILL)
            return self._process

    def _adopt(self) -> AdoptedProcess | None:
        said = _receive(self._reply)
        if not said.isdigit():
            log.debug("no process was forked: %s", said.decode(errors="replace") or "the fork server is gone")
            return None
        pid = int(said)
        with _adopting_orphans():
            _send(self._reply, ADOPT)
            born = _receive(self._reply) == STARTED
        process = AdoptedProcess(pid)
        try:
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return None  # not of this process: it ends by itself
        if not born:  # the server has died just now, and who knows whether this began to read its input
            process.send_signal(signal.SIGKILL)
        return process


_subreaper_lock = threading.Lock()


@contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Whatever below this process loses its parent inside the block becomes a child of its main thread."""
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
    """A process's standard input and output, and the other ends."""
    theirs_in, ours_in = os.pipe()
    ours_out, theirs_out = os.pipe()
    return (theirs_in, theirs_out), os.fdopen(ours_in, "wb"), os.fdopen(ours_out, "rb")


def _receive(reply: socket.socket) -> bytes:
    try:
        return reply.recv(1024)
    except OSError:
        return b""


def _send(reply: socket.socket, words: bytes) -> None:
    try:
        reply.send(words)
    except OSError:
        pass  # it is gone, which the next answer shows


def _shut_down(reply: socket.socket) -> None:
    try:
        reply.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the other end is closed
