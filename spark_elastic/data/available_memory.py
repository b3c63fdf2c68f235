"""How much memory this process may still take. Any thread. Each slot asks: nothing that loads slowly is imported."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path

NEVER_LIMITED = 1 << 60  # cgroup v1 says "no limit" by a number near 2**63
_V1 = "memory/memory"
_CGROUP_FILES = (  # files with the limit, the use, and the table and key of the page cache in it
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    (f"{_V1}.limit_in_bytes", f"{_V1}.usage_in_bytes", f"{_V1}.stat", "total_inactive_file"),
)


def measure_available_memory(root: Path = Path("/")) -> tuple[int, int] | None:
    """(free bytes, limit in bytes) of the tightest limit; None if none is known. root: of /proc and /sys."""
    found = (_measure_machine(root), _measure_cgroup(root / "sys/fs/cgroup"), _measure_address_space(root))
    return min((room for room in found if room is not None), default=None)


def read_cgroup_limit(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The memory limit of this process's container in bytes; None if it has none."""
    for name, *_ in _CGROUP_FILES:
        with suppress(OSError):
            text = (root / name).read_text().strip()
            return int(text) if text.isdigit() and int(text) < NEVER_LIMITED else None
    return None


def _measure_machine(root: Path) -> tuple[int, int] | None:
    numbers = _read_table(root / "proc/meminfo")
    free, most = numbers.get("MemAvailable:"), numbers.get("MemTotal:")
    return None if free is None or most is None else (free << 10, most << 10)


def _measure_cgroup(root: Path) -> tuple[int, int] | None:
    limit = read_cgroup_limit(root)
    if limit is None:
        return None
    for _, use, table, cached in _CGROUP_FILES:
        with suppress(OSError, ValueError):
            used = int((root / use).read_text())
            return max(0, limit - used + _read_table(root / table).get(cached, 0)), limit
    return None


def _measure_address_space(root: Path) -> tuple[int, int] | None:
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most == resource.RLIM_INFINITY:
        return None
    try:
        pages = int((root / "proc/self/statm").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return None
    return max(0, most - pages * os.sysconf("SC_PAGE_SIZE")), most


def _read_table(file: Path) -> dict[str, int]:
    """A name and a number on each line."""
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}
