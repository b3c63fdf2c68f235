"""Whether a child was killed because memory ran out: the kernel counts such kills per control group.

Reads the counter of this process's own group, in which its children are, too (cgroup v2's memory.events, v1's
memory.oom_control), else the whole machine's in /proc/vmstat. Called from the slot's main thread.
"""

from __future__ import annotations

import signal
from pathlib import Path


class MemoryKills:
    """Remembers the counter, so that a kill is noticed by its rise. root: where /proc and /sys are; for tests."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._seen = self._read()

    def explains(self, code: int) -> bool:
        """Whether the process that just ended with `code` was killed because memory ran out."""
        before, self._seen = self._seen, self._read()
        # A process may be moved to another group, whose counter tells nothing yet.
        return code == -signal.SIGKILL and self._seen[0] == before[0] and self._seen[1] > before[1]

    def _read(self) -> tuple[Path | None, int]:
        file = counter(self._root)
        try:
            lines = file.read_text().splitlines() if file is not None else []
        except OSError:
            lines = []  # the group was removed meanwhile
        return file, sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def counter(root: Path) -> Path | None:
    """The file with the counter that is nearest to this process; None where there is none."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        groups = []
    found: list[Path] = []
    for line in groups:
        _, controllers, path = line.split(":", 2)
        # In a container the path may be the host's; its own group is then mounted at the top.
        if controllers == "":
            mount, name = root / "sys/fs/cgroup", "memory.events"
        elif "memory" in controllers.split(","):
            mount, name = root / "sys/fs/cgroup/memory", "memory.oom_control"
        else:
            continue
        found += [mount / path.lstrip("/") / name, mount / name]
    found.append(root / "proc/vmstat")
    return next((file for file in found if _counts(file)), None)


def _counts(file: Path) -> bool:
    try:
        return any(line.startswith("oom_kill ") for line in file.read_text().splitlines())
    except OSError:
        return False
