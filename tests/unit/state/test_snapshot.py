"""Snapshots that take turns in two memories: never torn, never half."""

from __future__ import annotations

import numpy as np
import pytest

from spark_elastic.protocol.types import Phase, Position
from spark_elastic.runs.snapshot import SnapshotBuffer, SnapshotBuilder


def at(number: int) -> Position:
    return Position(0, Phase.TRAIN, number)


def read_newest(buffer: SnapshotBuffer) -> tuple[int, bytes]:
    newest = buffer.wait_for_newest()
    assert newest is not None
    return newest.position.step, newest.memory.tobytes()


def test_r20_a_version_exists_only_when_it_is_complete() -> None:
    live, buffer = np.full(1 << 20, 1, np.uint8), SnapshotBuffer()
    buffer.begin(at(1), lambda builder: builder.add(live, lambda: 0))
    assert read_newest(buffer) == (1, bytes([1]) * (1 << 20))
    live[:] = 2
    buffer.begin(at(2), lambda builder: builder.add(live, lambda: 0))
    buffer.wait()
    live[:] = 3
    assert read_newest(buffer) == (2, bytes([2]) * (1 << 20))


def test_r20_a_version_that_was_changed_while_it_was_copied_does_not_count() -> None:
    live, changes = np.full(1 << 20, 1, np.uint8), [0]
    buffer = SnapshotBuffer()
    buffer.begin(at(1), lambda builder: builder.add(live, lambda: changes[0]))
    buffer.wait()
    marks = iter([0, 1])
    buffer.begin(at(2), lambda builder: builder.add(live, lambda: next(marks)))
    with pytest.warns(RuntimeWarning, match="changed in place"):
        assert read_newest(buffer)[0] == 1
    buffer.begin(at(3), lambda builder: builder.add(live, lambda: changes[0]))
    assert read_newest(buffer)[0] == 3


def test_pieces_are_aligned_and_do_not_overlap() -> None:
    builder = SnapshotBuilder()
    places = [builder.add(np.zeros(n, np.uint8)) for n in (1, 64, 0, 65)]
    assert [place.offset for place in places] == [0, 64, 128, 128]
    assert builder.size == 256


def test_two_buffers_alternate_and_grow_with_the_state() -> None:
    buffer, memories = SnapshotBuffer(), []
    for size in (128, 128, 128, 128, 1000, 20):
        buffer.begin(at(size), lambda builder, size=size: builder.add(np.full(size, 7, np.uint8)))  # type: ignore[misc]
        newest = buffer.wait_for_newest()
        assert newest is not None
        assert bytes(newest.memory[:size]) == bytes([7]) * size
        memories.append(newest.memory.ctypes.data)
    assert memories[0] == memories[2] != memories[1] == memories[3]
