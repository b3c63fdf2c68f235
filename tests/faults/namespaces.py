"""Hosts with addresses of their own on one machine: network namespaces behind a bridge, to cut off, heal and slow down.

Linux, root and iproute2 are needed; `why_not` says what is missing. Nothing is made in the machine's own namespace, and
everything carries this process's number, so that several such networks do not meet.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from types import TracebackType

NODES = 16  # at most; addresses are 10.77.0.1 and up


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

    def within(self, node: int, *command: str) -> list[str]:
        """The command line that runs `command` on a node."""
        return ["ip", "netns", "exec", self._space(node), *command]

    def cut(self, node: int) -> None:
        """Not a packet passes any more, in either direction, and nobody is told."""
        _ip("-n", self._bridge, "link", "set", self._port(node), "down")

    def heal(self, node: int) -> None:
        _ip("-n", self._bridge, "link", "set", self._port(node), "up")

    def isolate(self, node: int) -> None:
        """It reaches nodes that are not isolated, and no others: serverless compute is like that."""
        _ip("-n", self._bridge, "link", "set", self._port(node), "type", "bridge_slave", "isolated", "on")

    def slow_down(self, node: int, milliseconds: int) -> bool:
        """Delay all that the node sends; False where the kernel has no such queue."""
        command = ["tc", "qdisc", "replace", "dev", f"v{node}", "root", "netem", "delay", f"{milliseconds}ms"]
        return subprocess.run(self.within(node, *command), check=False, capture_output=True).returncode == 0

    def pids(self, node: int) -> list[int]:
        text = _ip("netns", "pids", self._space(node))
        return [int(word) for word in text.split()]

    def __enter__(self) -> Network:
        try:
            self._up()
        except BaseException:
            self._down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._down()

    @property
    def _bridge(self) -> str:
        return f"{self._mark}-bridge"

    def _space(self, node: int) -> str:
        return f"{self._mark}-n{node}"

    def _port(self, node: int) -> str:
        return f"p{node}"

    def _up(self) -> None:
        _ip("netns", "add", self._bridge)
        _ip("-n", self._bridge, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self._bridge, "link", "set", "bridge", "up")
        for node in self._nodes:
            space, inner, outer = self._space(node), f"v{node}", self._port(node)
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
            _ip(
                "link",
                "add",
                inner,
                "netns",
                space,
                "type",
                "veth",
                "peer",
                "name",
                outer,
                "netns",
                self._bridge,
            )
            _ip("-n", space, "addr", "add", f"{self.address(node)}/24", "dev", inner)
            _ip("-n", space, "link", "set", inner, "up")
            _ip("-n", self._bridge, "link", "set", outer, "master", "bridge", "up")

    def _down(self) -> None:
        """Whatever still runs in a namespace is killed: it would keep it alive."""
        there = {line.split()[0] for line in _ip("netns", "list").splitlines() if line}
        for node in self._nodes:
            if self._space(node) in there:
                for pid in self.pids(node):
                    _kill(pid)
                _ip("netns", "del", self._space(node))
        if self._bridge in there:
            _ip("netns", "del", self._bridge)


def why_not() -> str:
    """Why namespaces cannot be made here, "" where they can."""
    if shutil.which("ip") is None:
        return "network namespaces need the command `ip` (package iproute2)"
    name = f"e{os.getpid() % 100000}-probe"
    made = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True, text=True)
    if made.returncode != 0:
        return f"network namespaces cannot be made here: {made.stderr.strip()}"
    _ip("netns", "del", name)
    return ""


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it ended by itself
