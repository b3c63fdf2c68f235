"""Starts slots on several machines: on this one as `LocalLauncher` does, on others through the system's `ssh`.

Each slot has one process of ssh, and one thread, which feeds and reads all of its pipes. What must not be seen on a
command line (the environment, and what the process reads) travels over standard input."""

from __future__ import annotations

import json
import logging
import os
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import spark_elastic
from spark_elastic.clock import Clock
from spark_elastic.clusters.local.launcher import REFUSED, HostSlots, LocalLauncher, find_remote_hosts
from spark_elastic.config import ElasticConfig
from spark_elastic.errors import DriverUnreachable, InvalidInput, PreflightError
from spark_elastic.rendezvous.addresses import find_address_towards, is_own_address

log = logging.getLogger("spark_elastic")

CONNECT_WITHIN = 10  # seconds for the connection and its handshake
READY_WITHIN = 30.0  # seconds until the host's Python runs, a slow login included
RESOLVE_WITHIN = 5.0  # seconds for ssh to read its configuration
END_CHECK_EVERY = 0.5  # seconds between two checks whether ssh has ended
ALIVE_EVERY = 5  # seconds between two questions of ssh to a silent host
ALIVE_COUNT = 3  # of them without an answer end the connection
LINES_KEPT = 20  # last lines of standard error
READY = b"spark-elastic is ready\n"  # what the host's login prints ends here
OWN_FAILURE = 255  # exit code of ssh if ssh itself failed
# The first thing that runs on the host, on any Python. No single quote and no "!": each login shell takes it.
BOOTSTRAP = (
    f"import json,os,sys;os.write(1,{READY!r});".replace("'", '"')
    + 's=json.loads(b"".join(iter(lambda:os.read(0,1)or sys.exit(1),b"\\n")));'
    + 'os.access(s["folder"],os.X_OK)and os.path.isdir(s["folder"])and os.chdir(s["folder"]);'
    + 'os.execve(sys.executable,[sys.executable]+s["arguments"],dict(os.environ,**s["environment"]))'
)
LOOPBACK = "127.0.0.1"
ANY_ADDRESS = "0.0.0.0"
SOMEWHERE = "192.0.2.1"  # reserved for documentation: the way to it is the default route
LOGINS_AT_ONCE = 5  # of one host; an sshd refuses some of more than ten that are not authenticated yet
CHECKS_AT_ONCE = 32
# Runs on the other host with the job's environment. Arguments: what to do, the package's version, Python's or "".
_START = f"""
import sys
def refuse(why):
    sys.stdout.write(why)
    sys.exit({REFUSED})
what, version, python = sys.argv[1:]
here = "%d.%d" % sys.version_info[:2]
if python and python != here:
    refuse(f"{{sys.executable}} is Python {{here}} there and {{python}} here: all hosts need the same")
try:
    from spark_elastic import __version__ as found
except ImportError as error:
    refuse(f"{{sys.executable}} has no spark_elastic there ({{error}}): install spark_elastic {{version}} on that host")
if found != version:
    refuse(f"it has spark_elastic {{found}}, and this machine has {{version}}: install the same")
try:
    from spark_elastic.clusters.local import launcher
except ImportError as error:
    refuse(f"spark_elastic cannot be imported there ({{error}}): install it on that host with all that it needs")
getattr(launcher, what)()
"""
# Variables that describe this machine or this login.
_MACHINE = ("DISPLAY", "HOST", "HOSTNAME", "TERM", "TMPDIR", "TZ")
_LOGIN = ("_", "HOME", "LOGNAME", "MAIL", "OLDPWD", "PWD", "SHELL", "SHLVL", "USER")
NOT_EXPORTED = frozenset((*_MACHINE, *_LOGIN))
NOT_EXPORTED_PREFIXES = ("BASH_FUNC_", "DBUS_", "SSH_", "XDG_")
_SILENCE = ("timed out", "No route to host", "unreachable")
# What ssh says, and what to do about it.
ADVICE: tuple[tuple[str, str], ...] = (
    ("Could not resolve hostname", "check the name"),
    ("Connection refused", "start an ssh server there, or give its port with --ssh-port"),
    (
        "Permission denied",
        "give a key that the host accepts with --ssh-identity-file (or load it into ssh-agent), and a user with "
        "--ssh-user",
    ),
    ("Host key verification failed", "connect once by hand and check its key, or add it to known_hosts"),
    *((said, "check that it is up and that its ssh port can be reached from here") for said in _SILENCE),
)


@dataclass(frozen=True, kw_only=True)
class SshOptions:
    """How ssh logs in to other hosts. None: ssh's own configuration decides."""

    port: int | None = None  # of the other hosts' ssh servers
    user: str | None = None  # on the other hosts
    identity_file: str | None = None  # path of a private key

    def build_command(self, host: str, *command: str) -> list[str]:
        """The command line of `ssh` that runs a command on a host."""
        settings = {
            "BatchMode": "yes",  # never ask
            "ConnectTimeout": str(CONNECT_WITHIN),
            "ServerAliveInterval": str(ALIVE_EVERY),
            "ServerAliveCountMax": str(ALIVE_COUNT),
            "ControlMaster": "no",  # one connection for each process, which ends with it
            "ControlPath": "none",
            "ClearAllForwardings": "yes",
            "RemoteCommand": "none",
        }
        words = ["ssh", "-T", "-a", "-x"]
        for name, value in settings.items():
            words += ["-o", f"{name}={value}"]
        return [*words, *self._login(), "--", host, *([f"exec {shlex.join(command)}"] if command else [])]

    def resolve(self, host: str) -> str:
        """The name or address that ssh's configuration has for a host."""
        words = ["ssh", "-G", *self._login(), "--", host]
        try:
            done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=RESOLVE_WITHIN)
        except FileNotFoundError as error:
            raise InvalidInput(
                f"the host {host} is not this machine, and this machine has no ssh to start workers there: install "
                "OpenSSH's client (on Debian and Ubuntu: openssh-client)."
            ) from error
        except (OSError, subprocess.TimeoutExpired):
            return host  # connecting says what is wrong
        named = [line.split(" ", 1)[1] for line in done.stdout.splitlines() if line.startswith("hostname ")]
        return named[0] if named else host

    def _login(self) -> list[str]:
        words = [] if self.port is None else ["-p", str(self.port)]
        words += [] if self.user is None else ["-l", self.user]
        return words + ([] if self.identity_file is None else ["-i", self.identity_file])


def export_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What other hosts get of this process's environment: all but what describes this machine or this login."""
    return {
        name: value
        for name, value in environment.items()
        if name not in NOT_EXPORTED and not name.startswith(NOT_EXPORTED_PREFIXES)
    }


@dataclass(frozen=True)
class RemoteEnd:
    """How a process on another host ended."""

    code: int  # of the process; `OWN_FAILURE` if the connection failed
    was_ready: bool  # the host's Python ran
    output: str  # what the process printed
    errors: tuple[str, ...]  # the last lines of standard error, which the login and ssh write to as well

    def explain(self) -> str:
        """Why the process did not do its work, without a full stop."""
        if self.was_ready and self.code == OWN_FAILURE:
            return f"the ssh connection ended ({self.errors[-1] if self.errors else 'nothing was said'})"
        if self.was_ready:
            said = self.output.strip() or (self.errors[-1] if self.errors else "it printed nothing")
            return f"Python ended there with code {self.code} ({said})"
        for pattern, advice in ADVICE:
            for line in self.errors:
                if pattern in line:
                    return f"{line.removeprefix('ssh: ')}: {advice}"
        said = self.errors[-1] if self.errors else f"ssh ended with code {self.code}"
        if self.code in (126, 127):
            return f"{said}: all hosts need Python and spark_elastic at the same path"
        return f"{said}: `ssh` to it, by hand, must run a command without a question"


@dataclass
class SshProcess:
    """A started `ssh`. One thread calls `run`; any thread may kill `process`."""

    process: subprocess.Popen[bytes]  # its three standard streams are pipes
    clock: Clock  # for the deadline of the login
    on_ready: Callable[[], None] = lambda: None  # called once the host's Python runs
    _output: bytearray = field(default_factory=bytearray)  # standard output, once ready what follows READY
    _errors: deque[str] = field(default_factory=lambda: deque(maxlen=LINES_KEPT))  # lines of standard error
    _partial: bytes = b""  # of the last line of standard error
    _was_ready: bool = False  # READY came: the login succeeded, and the host's Python runs

    @classmethod
    def start(cls, command: list[str], clock: Clock) -> SshProcess:
        """Raises OSError: processes or descriptors are used up."""
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        # A session of its own: Ctrl-C in a terminal is not for it, since the driver ends the job.
        return cls(
            subprocess.Popen(command, bufsize=0, start_new_session=True, **pipes),  # type: ignore[call-overload]
            clock,
        )

    def run(self, data: bytes, ready_within: float = READY_WITHIN) -> RemoteEnd:
        """Write `data` to the process and read it to its end. Its input stays open so long: it ends with us."""
        process, unsent = self.process, memoryview(data)
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        deadline = self.clock.now() + ready_within
        with process.stdin, process.stdout, process.stderr, selectors.DefaultSelector() as selector:
            os.set_blocking(process.stdin.fileno(), False)
            selector.register(process.stdin, selectors.EVENT_WRITE)
            readers = {process.stdout: self._take_output, process.stderr: self._take_errors}
            for pipe in readers:
                selector.register(pipe, selectors.EVENT_READ)
            while readers:
                has_ended = process.poll() is not None
                left = END_CHECK_EVERY
                if not self._was_ready:
                    left = min(left, max(0.0, deadline - self.clock.now()))
                events = selector.select(left)
                if has_ended and not events:
                    break  # a helper of ssh keeps the pipes open
                for key, _ in events:
                    if key.fileobj is process.stdin:
                        unsent = _write(process.stdin.fileno(), unsent)
                        if not unsent:
                            selector.unregister(process.stdin)
                        continue
                    received = os.read(key.fd, 1 << 16)
                    readers[key.fileobj](received)  # type: ignore[index]
                    if not received:
                        selector.unregister(key.fileobj)
                        del readers[key.fileobj]  # type: ignore[arg-type]
                if not self._was_ready and self.clock.now() >= deadline and process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)  # with a helper, which may hold the pipes
                    self._errors.append(f"its login timed out after {ready_within:g} s")
                    break
        output = bytes(self._output).decode(errors="replace") if self._was_ready else ""
        return RemoteEnd(process.wait(), self._was_ready, output, tuple(self._errors))

    def _take_output(self, received: bytes) -> None:
        self._output += received
        if not self._was_ready and READY in self._output:
            self._was_ready = True
            self._output = self._output.partition(READY)[2]
            self.on_ready()

    def _take_errors(self, received: bytes) -> None:
        """Lines of the process are shown; those of ssh and of the login only if they explain a failure."""
        *lines, self._partial = (self._partial + received).split(b"\n") if received else (self._partial, b"")
        for line in lines:
            text = line.decode(errors="replace").strip()
            if text:
                self._errors.append(text)
                if self._was_ready and received:
                    sys.stderr.write(text + "\n")


def _write(descriptor: int, data: memoryview) -> memoryview:
    """Returns what is left to write: nothing if the process does not read any more."""
    try:
        return data[os.write(descriptor, data) :]
    except BlockingIOError:
        return data
    except BrokenPipeError:
        return data[:0]


class SshLauncher(LocalLauncher):
    """`LocalLauncher` whose hosts may be other machines."""

    def __init__(
        self,
        program: object,
        pool: HostSlots,
        clock: Clock,
        ssh: SshOptions,
        preload: tuple[str, ...] = (),
        interpreter: str = sys.executable,
    ) -> None:
        super().__init__(program, pool, clock, preload, interpreter)
        self._ssh = ssh
        self._logins = defaultdict[str, Any](lambda: threading.Semaphore(LOGINS_AT_ONCE))
        self._lock = threading.Lock()  # owns _logins and the two below
        self._told: dict[str, str] = {}  # host -> why it last failed
        self._checks: set[subprocess.Popen[bytes]] = set()

    def check_hosts(self, hosts: Mapping[str, int], needed: int) -> None:
        """Try each of the other hosts, side by side; log why one cannot run workers. needed: slots for a beginning.
        Raises PreflightError: the hosts that can run workers have fewer, though all of them have enough."""
        others = find_remote_hosts(hosts)
        if not others:
            return
        failures: dict[str, str] = {}
        with ThreadPoolExecutor(CHECKS_AT_ONCE, "spark-elastic-check") as threads:
            try:
                for host, why in zip(others, threads.map(self._check, others), strict=True):
                    if why:
                        failures[host] = why
            except BaseException:  # such as Ctrl-C: the job is over
                self._closing.set()
                self._kill_checks()
                threads.shutdown(wait=False, cancel_futures=True)
                raise
        left = sum(slots for host, slots in hosts.items() if host not in failures)
        if left < needed <= sum(hosts.values()):
            rest = f"the other hosts have {left} slots, and the job needs {needed}."
            raise PreflightError("; ".join((*failures.values(), rest)))
        for host, why in failures.items():
            self._tell(host, why)

    def cancel(self) -> None:
        self._kill_checks()
        super().cancel()

    def run_process(self, launch: int, host: str) -> str:
        if not find_remote_hosts([host]):
            return super().run_process(launch, host)
        with self._lock:
            logins = self._logins[host]
        logins.acquire()
        logged_in = threading.Event()

        def free_login() -> None:
            if not logged_in.is_set():
                logged_in.set()
                logins.release()

        try:
            if self._closing.is_set():
                return "the job is over"
            process = SshProcess.start(self._build_command(host), self._clock)
            self.processes[launch] = process.process
            process.on_ready = free_login
            end = process.run(self._make_header("main") + self.describe(launch, host, parent=None))
        except OSError as error:  # as of `LocalLauncher.run_process`
            return f"ssh could not be started ({error})"
        finally:
            free_login()
        if end.code == 0:
            return end.output
        if end.was_ready and end.code != REFUSED:
            return f"the slot on host {host} ended: {end.explain()}"
        why = _explain(host, end)
        if not self._closing.is_set():
            self._tell(host, why)
        return why

    def _check(self, host: str) -> str:
        """Why the host cannot run workers, "" if it can."""
        with self._lock:
            if self._closing.is_set():
                return ""
            try:
                process = SshProcess.start(self._build_command(host), self._clock)
            except OSError as error:
                return f"ssh could not be started ({error})"
            self._checks.add(process.process)
        end = process.run(self._make_header("check") + f"{self.spec.address}\n".encode())
        with self._lock:
            self._checks.discard(process.process)
        return "" if end.code == 0 else _explain(host, end)

    def _kill_checks(self) -> None:
        with self._lock:
            for process in self._checks:
                process.kill()

    def _tell(self, host: str, why: str) -> None:
        """Once for each new reason: its slots are launched again and again."""
        with self._lock:
            if self._told.get(host) == why:
                return
            self._told[host] = why
        log.warning("%s; the job uses the host as soon as it can.", why)

    def _build_command(self, host: str) -> list[str]:
        return self._ssh.build_command(host, self.interpreter, "-I", "-S", "-c", BOOTSTRAP)

    def _make_header(self, what: str) -> bytes:
        """The input of `BOOTSTRAP`. what: a function of `local.launcher`, with which its Python continues."""
        own = f"{sys.version_info.major}.{sys.version_info.minor}"
        python = own if self.interpreter == sys.executable else ""
        arguments = ["-c", _START, what, spark_elastic.__version__, python]
        environment = {"OMP_NUM_THREADS": "1", **export_environment(os.environ)}
        text = json.dumps({"folder": os.getcwd(), "arguments": arguments, "environment": environment})
        return text.encode() + b"\n"


def _explain(host: str, end: RemoteEnd) -> str:
    why = end.output.strip() if end.was_ready and end.code == REFUSED else end.explain()
    return f"host {host} cannot run workers: {why}"


def choose_addresses(config: ElasticConfig, others: list[str], ssh: SshOptions) -> tuple[str, str]:
    """Where the driver's server listens, and what workers dial. others: hosts that are other machines, if known."""
    advertise = config.advertise_address or _find_own_address([ssh.resolve(host) for host in others])
    bind = advertise if is_own_address(advertise) else ANY_ADDRESS
    return config.bind_address or bind, advertise


def _find_own_address(others: list[str]) -> str:
    """This machine's address on the way to other hosts, or to anywhere; the loopback address if it has no other."""
    for host in [*others, SOMEWHERE, socket.gethostname()]:
        try:
            found = find_address_towards(host, 1)
        except DriverUnreachable:
            continue
        if not found.startswith("127."):
            return found
    return LOOPBACK
