"""How much memory is left, and a cache that stops where little is."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spark_elastic.data.reading.row_group_cache import (
    DEFAULT_CACHE_BYTES,
    RowGroupCache,
    measure_available_memory,
)

MB = 1 << 20


@pytest.fixture(autouse=True)
def no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, content in {"proc/meminfo": "MemTotal: 8192 kB\nMemAvailable: 4096 kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (4 * MB, 8 * MB)),
        ({"sys/fs/cgroup/memory.max": "max"}, (4 * MB, 8 * MB)),
        ({"proc/meminfo": ""}, None),
        (
            {
                "sys/fs/cgroup/memory.max": str(3 * MB),
                "sys/fs/cgroup/memory.current": str(2 * MB),
                "sys/fs/cgroup/memory.stat": f"anon {MB}\ninactive_file {MB}\n",
            },
            (2 * MB, 3 * MB),
        ),
        (
            {
                "sys/fs/cgroup/memory/memory.limit_in_bytes": str(3 * MB),
                "sys/fs/cgroup/memory/memory.usage_in_bytes": str(5 * MB),
            },
            (0, 3 * MB),
        ),
    ],
)
def test_the_smallest_limit_decides_the_available_memory(
    tmp_path: Path, files: dict[str, str], expected: Any
) -> None:
    assert measure_available_memory(machine(tmp_path, files)) == expected


def test_a_limit_of_the_address_space_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (3 * MB, 3 * MB))
    root = machine(tmp_path, {"proc/self/statm": f"{MB // resource.getpagesize()} 1 1"})
    assert measure_available_memory(root) == (2 * MB, 3 * MB)


def group(number: int) -> Any:
    """Of 32 MB, of which nothing is ever touched."""
    return {"x": np.empty(32 * MB, np.uint8)}


def read_twice(total: int) -> tuple[int, int]:
    """(row groups decoded, row groups kept) when 20 of them, 640 MB, are read twice and are all that takes memory."""
    decoded: list[int] = []

    def decode(number: int) -> Any:
        decoded.append(number)
        return group(number)

    groups = RowGroupCache(sys.maxsize, lambda: (total - len(decoded) * 32 * MB, total))
    for number in [*range(20), *range(20)]:
        groups.fetch(number, decode)
    kept = len(groups)
    groups.close(lambda: None)
    return len(decoded), kept


def test_row_groups_that_fit_in_memory_are_read_once(caplog: Any) -> None:
    assert read_twice(1000 * MB) == (20, 20)
    assert caplog.messages == []


def test_the_cache_ends_where_a_quarter_of_the_memory_is_left(caplog: Any) -> None:
    assert read_twice(320 * MB) == (20 + 20 - 7, 7)
    (line,) = caplog.messages
    assert (
        line == "not all rows fit into memory: 224 MB of decoded rows are kept, since 64 of 320 MB are left"
    )


def test_a_fixed_cache_size_does_not_measure_memory() -> None:
    def measure_room() -> Any:
        raise AssertionError("asked")

    groups = RowGroupCache(DEFAULT_CACHE_BYTES, measure_room)
    for number in range(6):
        groups.fetch(number, group)
    assert len(groups) == DEFAULT_CACHE_BYTES // (32 * MB)
    groups.close(lambda: None)
