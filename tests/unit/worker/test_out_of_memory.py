"""A kill is explained by the nearest counter of kills, under both versions of control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_elastic.worker.child import OomKillCounter, find_oom_counter

V2 = "0::/pod/box\n"
V1 = "9:name=systemd:/\n4:memory:/pod/box\n1:cpu:/\n0::/\n"


def machine(root: Path, groups: str, **counters: str) -> Path:
    """Files by path, with "__" for "/"; `groups`: this process's."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in counters.items():
        file = root / name.replace("__", "/").replace("_DOT_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


@pytest.mark.parametrize(
    ("groups", "file"),
    [
        (V2, "sys__fs__cgroup__pod__box__memory_DOT_events"),
        (V2, "sys__fs__cgroup__memory_DOT_events"),  # a container's own group, seen from inside
        (V1, "sys__fs__cgroup__memory__pod__box__memory_DOT_oom_control"),
        (V1, "sys__fs__cgroup__memory__memory_DOT_oom_control"),
        ("", "proc__vmstat"),
    ],
)
def test_the_counter_is_found(groups: str, file: str, tmp_path: Path) -> None:
    counters = {"proc__vmstat": "oom_kill 7\n", file: "low 0\noom 1\noom_kill 7\n"}
    root = machine(tmp_path, groups, **counters)
    assert find_oom_counter(root) == root / file.replace("__", "/").replace("_DOT_", ".")


def test_a_kill_counts_only_where_the_counter_rose(tmp_path: Path) -> None:
    file = machine(tmp_path, V2, sys__fs__cgroup__pod__box__memory_DOT_events="oom 1\noom_kill 1\n")
    kills = OomKillCounter(file)
    events = tmp_path / "sys/fs/cgroup/pod/box/memory.events"
    assert not kills.is_oom_kill(-9)
    events.write_text("oom 2\noom_kill 2\n")
    assert kills.is_oom_kill(-9)
    assert not kills.is_oom_kill(-9)
    events.write_text("oom 2\noom_kill 3\n")
    assert not kills.is_oom_kill(1)
    assert not kills.is_oom_kill(-9), "that rise was before this process ended"


def test_without_counters_nothing_is_explained(tmp_path: Path) -> None:
    assert not OomKillCounter(tmp_path).is_oom_kill(-9)
