"""One process on another host, started through the system's `ssh`: its command line, its pipes, and why it failed.

Each process has one thread, which feeds and reads all of its pipes. What must not be seen on a command line (the
environment, and what the process reads) travels over standard input.
"""

from __future__ import annotations

import json
import os
import selectors
import shlex
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from spark_elastic.clock import Clock
from spark_elastic.errors import InvalidInput

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
# Variables that describe this machine or this login.
_MACHINE = ("DISPLAY", "HOST", "HOSTNAME", "TERM", "TMPDIR", "TZ")
_LOGIN = ("_", "HOME", "LOGNAME", "MAIL", "OLDPWD", "PWD", "SHELL", "SHLVL", "USER")
NOT_EXPORTED = frozenset((*_MACHINE, *_LOGIN))
NOT_EXPORTED_PREFIXES = ("BASH_FUNC_", "DBUS_", "SSH_", "XDG_")
# What ssh says, and what to do about it.
ADVICE: tuple[tuple[str, str], ...] = (
    ("Could not resolve hostname", "check the name"),
    ("Connection refused", "start an ssh server there, or give its port with --ssh-port"),
    (
        "Permission denied",
        "give a key that the host accepts with --ssh-identity-file (or load it into ssh-agent), and a user with "
        "--ssh-user",
    ),
    (
        "Host key verification failed",
        "connect once by hand and check the host's key, or add it to known_hosts",
    ),
    ("timed out", "check that it is up and that its ssh port can be reached from here"),
    ("No route to host", "check that it is up and that its ssh port can be reached from here"),
    ("unreachable", "check that it is up and that its ssh port can be reached from here"),
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
            # One connection for each process, which ends with it.
            "ControlMaster": "no",
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


def make_header(folder: str, arguments: list[str], environment: Mapping[str, str]) -> bytes:
    """The input of `BOOTSTRAP`, whose Python continues with these arguments and variables, in the folder if it is
    there."""
    text = json.dumps({"folder": folder, "arguments": arguments, "environment": dict(environment)})
    return text.encode() + b"\n"


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
    # The last lines of standard error, without empty ones.
    _errors: deque[str] = field(default_factory=lambda: deque(maxlen=LINES_KEPT))
    _partial: bytes = b""  # of the last line of standard error
    _was_ready: bool = False  # READY came: the login succeeded, and the host's Python runs

    @classmethod
    def start(cls, command: list[str], clock: Clock) -> SshProcess:
        """
        Raises:
            OSError: processes or descriptors are used up.
        """
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        # A session of its own: Ctrl-C in a terminal is not for it, since the driver ends the job.
        return cls(
            subprocess.Popen(command, bufsize=0, start_new_session=True, **pipes),  # type: ignore[call-overload]
            clock,
        )

    def run(self, data: bytes, ready_within: float = READY_WITHIN) -> RemoteEnd:
        """Write `data` to the process and read it to its end. Its standard input stays open so long:
        if this process dies, it ends."""
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
