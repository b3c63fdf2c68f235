"""How much memory this process may still take: of the machine, of its container, of its own address space.

Looks only. Any thread.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

NEVER_LIMITED = 1 << 60  # cgroup v1 says "no limit" by a number near 2**63
_GROUPS = (  # limit, use, and what of it is only a cache of files
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)


def left(root: Path = Path("/")) -> tuple[int, int] | None:
    """(bytes left, limit in bytes) of the tightest limit; None if none is known. root: of /proc and /sys."""
    found = (_of_machine(root), _of_group(root / "sys/fs/cgroup"), _of_address_space(root))
    return min((room for room in found if room is not None), default=None)


def cgroup_limit(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The memory limit of this process's container in bytes; None if it has none."""
    for name, *_ in _GROUPS:
        try:
            text = (root / name).read_text().strip()
        except OSError:
            continue
        return int(text) if text.isdigit() and int(text) < NEVER_LIMITED else None
    return None


def _of_machine(root: Path) -> tuple[int, int] | None:
    numbers = _table(root / "proc/meminfo")
    if "MemAvailable:" not in numbers or "MemTotal:" not in numbers:
        return None
    return numbers["MemAvailable:"] << 10, numbers["MemTotal:"] << 10


def _of_group(root: Path) -> tuple[int, int] | None:
    limit = cgroup_limit(root)
    if limit is None:
        return None
    for _, use, table, cached in _GROUPS:
        try:
            used = int((root / use).read_text())
        except (OSError, ValueError):
            continue
        return max(0, limit - used + _table(root / table).get(cached, 0)), limit
    return None


def _of_address_space(root: Path) -> tuple[int, int] | None:
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most == resource.RLIM_INFINITY:
        return None
    try:
        pages = int((root / "proc/self/statm").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return max(0, most - pages * os.sysconf("SC_PAGE_SIZE")), most


def _table(file: Path) -> dict[str, int]:
    """A name and a number on each line."""
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}
