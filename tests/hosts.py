"""Hosts on one machine: a `Network` of nodes with addresses of their own, and `Hosts`, which share no files either.

Both stand on Linux's namespaces, behind a bridge that has one, too: nothing is made in the machine's own network, and
names carry this process's number, so that several such networks do not meet. Linux, root, iproute2 and util-linux are
needed, and OpenSSH's server for `Hosts.start_sshd`; `find_obstacle` says what is missing.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import uuid
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from tests.patience import until

if TYPE_CHECKING:
    from typing_extensions import Self

NODES = 16  # at most; addresses are 10.77.0.1 and up
SSHD = "/usr/sbin/sshd"
# Folders that each host has for itself; all else is seen by all and can be written by none, as an image can.
PRIVATE = ("/tmp", "/var/tmp", "/dev/shm", "/run")
# Mounts that stay as they are beside these.
KERNEL = ("/proc", "/sys", "/dev")


class Network:
    """`with Network(4) as net:` nodes 0 to 3, node n at `net.address(n)`."""

    def __init__(self, nodes: int) -> None:
        if nodes > NODES:
            raise ValueError(f"a network has {NODES} nodes at most; {nodes} were asked for")
        self._nodes = range(nodes)
        self._mark = f"e{os.getpid() % 100000}"

    @staticmethod
    def address(node: int) -> str:
        return f"10.77.0.{node + 1}"

    def build_command(self, node: int, *command: str) -> list[str]:
        """The command line that runs `command` on a node."""
        return ["ip", "netns", "exec", self._space(node), *command]

    def disconnect(self, node: int) -> None:
        """Not a packet passes any more, in either direction, and nobody is told."""
        _ip("-n", self._bridge, "link", "set", self._port(node), "down")

    def heal(self, node: int) -> None:
        _ip("-n", self._bridge, "link", "set", self._port(node), "up")

    def lose_packets(self, node: int, to: int) -> None:
        """From now on a node's packets to another one arrive nowhere; those of the other direction do."""
        nobody = ("lladdr", "02:00:00:00:00:99", "nud", "permanent")
        device = ("dev", f"v{node}")
        _ip("-n", self._space(node), "neighbour", "replace", self.address(to), *nobody, *device)

    def restore_packets(self, node: int, to: int) -> None:
        _ip("-n", self._space(node), "neighbour", "del", self.address(to), "dev", f"v{node}")

    def isolate(self, node: int) -> None:
        """It reaches nodes that are not isolated, and no others: serverless compute is like that."""
        _ip("-n", self._bridge, "link", "set", self._port(node), "type", "bridge_slave", "isolated", "on")

    def pids(self, node: int) -> list[int]:
        text = _ip("netns", "pids", self._space(node))
        return [int(word) for word in text.split()]

    def __enter__(self) -> Self:
        try:
            self._create()
        except BaseException:
            self._destroy()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._destroy()

    @property
    def _bridge(self) -> str:
        return f"{self._mark}-bridge"

    def _space(self, node: int) -> str:
        return f"{self._mark}-n{node}"

    def _port(self, node: int) -> str:
        return f"p{node}"

    def _create(self) -> None:
        _ip("netns", "add", self._bridge)
        _ip("-n", self._bridge, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._bridge, "link", "set", "bridge", "up")
        for node in self._nodes:
            space, inner, outer = self._space(node), f"v{node}", self._port(node)
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
            peer = ("peer", "name", outer, "netns", self._bridge)
            _ip("link", "add", inner, "netns", space, "type", "veth", *peer)
            _ip("-n", space, "addr", "add", f"{self.address(node)}/24", "dev", inner)
            _ip("-n", space, "link", "set", inner, "up")
            _ip("-n", self._bridge, "link", "set", outer, "master", "bridge", "up")

    def _destroy(self) -> None:
        """Whatever still runs in a namespace is killed: it would keep it alive."""
        there = {line.split()[0] for line in _ip("netns", "list").splitlines() if line}
        for node in self._nodes:
            if self._space(node) in there:
                for pid in self.pids(node):
                    with suppress(ProcessLookupError):  # it ended by itself
                        os.kill(pid, signal.SIGKILL)
                _ip("netns", "del", self._space(node))
        if self._bridge in there:
            _ip("netns", "del", self._bridge)


class Hosts(Network):
    """`with Hosts(4) as hosts:` nodes that are hosts h0 to h3: each has its own network, host name, boot id, processes,
    shared memory and `PRIVATE` folders, and knows the others by name.

    A test reads and writes a host's files through `file(node, "/tmp/...")`. What it starts on a host by
    `subprocess.Popen(hosts.build_command(...))` is nsenter, whose death the command outlives; `kill` and the end of the
    hosts end everything.
    """

    def __init__(self, nodes: int) -> None:
        super().__init__(nodes)
        self._running: dict[int, subprocess.Popen[str]] = {}  # by node: what ends with its last process
        self._keys: tuple[bytes, bytes] | None = None  # private and public, of all users and sshds here

    @staticmethod
    def name(node: int) -> str:
        return f"h{node}"

    def build_command(self, node: int, *command: str) -> list[str]:
        """The command line that runs `command` on a host, in its /tmp."""
        return ["nsenter", "-t", str(self._init(node)), "-m", "-u", "-i", "-n", "-p", "--wd", *command]

    def file(self, node: int, path: str) -> Path:
        """A host's file, as the machine's own processes see it; as long as the host is up."""
        return Path(f"/proc/{self._init(node)}/root", path.lstrip("/"))

    def kill(self, node: int) -> None:
        """A power cut: every process ends at once, and not a packet says so. `boot` starts the host anew."""
        self.disconnect(node)
        self._end(node)

    def boot(self, node: int) -> None:
        """Start a host: its private folders are empty."""
        script = f"""
            set -e
            hostname {self.name(node)}
            awk '{{print $5}}' /proc/self/mountinfo | grep -vE '^({"|".join(KERNEL)})(/|$)' |
                while read -r place; do mount -o remount,bind,ro "$place" 2>/dev/null || true; done
            for place in {" ".join(PRIVATE)}; do mount -t tmpfs -o mode=1777 tmpfs $place; done
            cat >/run/hosts; mount --bind /run/hosts /etc/hosts
            echo {uuid.uuid4()} >/run/boot_id; mount --bind /run/boot_id /proc/sys/kernel/random/boot_id
            cd /tmp; echo up; exec sleep infinity"""
        unshare = ("unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
        # setpriv: the kernel kills it with the thread that started it, and --kill-child the host with it.
        enter = ("setpriv", "--pdeathsig", "KILL", *super().build_command(node))
        command = [*enter, *unshare, "sh", "-c", script]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(command, text=True, **pipes)  # type: ignore[call-overload]
        self._running[node] = process
        names = [f"{self.address(each)} {self.name(each)}" for each in self._nodes]
        with process.stdin as pipe:
            pipe.write("\n".join(["127.0.0.1 localhost", *names, ""]))
        with process.stdout as pipe, process.stderr as errors:
            if pipe.readline() != "up\n":
                raise RuntimeError(f"host {self.name(node)} did not start: {errors.read()}")
        self.heal(node)

    def start_sshd(self, node: int, port: int = 22) -> None:
        """A real OpenSSH server, as root; any host reaches it, by /run/ssh/key. Its log is /run/sshd.log."""
        private, public = self._keys = self._keys or _make_keys()
        for each in self._running:
            for name, content in (("key", private), ("key.pub", public), ("known_hosts", b"* " + public)):
                file = self.file(each, f"/run/ssh/{name}")
                file.parent.mkdir(exist_ok=True)
                file.write_bytes(content)
                file.chmod(0o600)
        self.file(node, "/run/sshd").mkdir(mode=0o755, exist_ok=True)
        options = ["UsePAM=no", "PasswordAuthentication=no", "StrictModes=no", "PidFile=none"]
        options += ["AuthorizedKeysFile=/run/ssh/key.pub", "LogLevel=VERBOSE"]
        words = [SSHD, "-f", "/dev/null", "-h", "/run/ssh/key", "-E", "/run/sshd.log", "-p", str(port)]
        for option in options:
            words += ["-o", option]
        subprocess.run(self.build_command(node, *words), check=True, stdin=subprocess.DEVNULL)
        log = self.file(node, "/run/sshd.log")
        until(lambda: log.exists() and "Server listening" in log.read_text())

    def _create(self) -> None:
        super()._create()
        for node in self._nodes:
            self.boot(node)

    def _destroy(self) -> None:
        for node in list(self._running):
            self._end(node)
        super()._destroy()

    def _init(self, node: int) -> int:
        """Process 1 of a host, by its number in the machine."""
        (child,) = psutil.Process(self._running[node].pid).children()
        return child.pid

    def _end(self, node: int) -> None:
        process = self._running.pop(node)
        process.kill()
        process.wait()
        until(lambda: not self.pids(node))


def find_obstacle() -> str:
    """Why hosts cannot be made here, "" where they can."""
    for command, package in (("ip", "iproute2"), ("nsenter", "util-linux"), ("setpriv", "util-linux")):
        if shutil.which(command) is None:
            return f"hosts of their own need the command `{command}` (package {package})"
    if os.geteuid() != 0:
        return "hosts of their own need root"
    hidden = [place for place in PRIVATE if Path(place) in Path(__file__).resolve().parents]
    if hidden:
        return f"this checkout is in {hidden[0]}, which each host has for itself: clone it elsewhere"
    words = "unshare --mount --uts --ipc --pid --fork mount -t tmpfs tmpfs /tmp"
    made = subprocess.run(words.split(), check=False, capture_output=True, text=True)
    if made.returncode != 0:
        return f"namespaces of files and processes cannot be made here: {made.stderr.strip()}"
    name = f"e{os.getpid() % 100000}-probe"
    made = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True, text=True)
    if made.returncode != 0:
        return f"network namespaces cannot be made here: {made.stderr.strip()}"
    _ip("netns", "del", name)
    return ""


def _make_keys() -> tuple[bytes, bytes]:
    folder = Path("/dev/shm", f"keys-{uuid.uuid4().hex}")
    folder.mkdir(mode=0o700)
    try:
        key = folder / "key"
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(key)], check=True)
        return key.read_bytes(), key.with_suffix(".pub").read_bytes()
    finally:
        shutil.rmtree(folder)


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
