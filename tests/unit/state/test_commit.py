"""Snapshots that take turns in two memories: never torn, never half."""

from __future__ import annotations

import numpy as np
import pytest

from spark_elastic.state.commit import SnapshotBuffer, SnapshotBuilder


def held(commits: SnapshotBuffer) -> tuple[int, bytes]:
    newest = commits.newest()
    assert newest is not None
    return newest.version, newest.memory.tobytes()


def test_r20_a_version_exists_only_when_it_is_complete() -> None:
    live, commits = np.full(1 << 20, 1, np.uint8), SnapshotBuffer()
    commits.take(1, lambda tray: tray.put(live, lambda: 0))
    assert held(commits) == (1, bytes([1]) * (1 << 20))
    live[:] = 2
    commits.take(2, lambda tray: tray.put(live, lambda: 0))
    commits.wait()
    live[:] = 3
    assert held(commits) == (2, bytes([2]) * (1 << 20))


def test_r20_a_version_that_was_changed_while_it_was_copied_does_not_count() -> None:
    live, changes = np.full(1 << 20, 1, np.uint8), [0]
    commits = SnapshotBuffer()
    commits.take(1, lambda tray: tray.put(live, lambda: changes[0]))
    commits.wait()
    marks = iter([0, 1])
    commits.take(2, lambda tray: tray.put(live, lambda: next(marks)))
    with pytest.warns(RuntimeWarning, match="changed in place"):
        assert held(commits)[0] == 1
    commits.take(3, lambda tray: tray.put(live, lambda: changes[0]))
    assert held(commits)[0] == 3


def test_what_is_not_marked_is_copied_before_the_commit_returns() -> None:
    live, commits = np.full(64, 1, np.uint8), SnapshotBuffer()
    commits.take(1, lambda tray: tray.put(live))
    live[:] = 2
    assert held(commits) == (1, bytes([1]) * 64)


def test_pieces_are_aligned_and_do_not_overlap() -> None:
    tray = SnapshotBuilder()
    places = [tray.put(np.zeros(n, np.uint8)) for n in (1, 64, 0, 65)]
    assert [place.offset for place in places] == [0, 64, 128, 128]
    assert tray.end == 256


def test_two_memories_take_turns() -> None:
    live, commits = np.zeros(128, np.uint8), SnapshotBuffer()
    memories = []
    for version in range(4):
        commits.take(version, lambda tray: tray.put(live))
        newest = commits.newest()
        assert newest is not None
        memories.append(newest.memory.ctypes.data)
    assert memories[0] == memories[2] != memories[1] == memories[3]


def test_a_state_that_grows_gets_larger_memory() -> None:
    commits = SnapshotBuffer()
    for size in (10, 1000, 20):
        commits.take(size, lambda tray, size=size: tray.put(np.full(size, 7, np.uint8)))  # type: ignore[misc]
        newest = commits.newest()
        assert newest is not None
        assert bytes(newest.memory[:size]) == bytes([7]) * size
