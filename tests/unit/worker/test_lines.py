from __future__ import annotations

import io

import pytest

from spark_elastic.testing.fakes import FakeClock
from spark_elastic.worker.child import LINE_AT_MOST, PROGRESS_BAR_EVERY, read_lines


class _Slowly(io.BytesIO):
    """A pipe whose writer takes half as long, from one write to the next, as passes between two states shown."""

    def __init__(self, *writes: bytes, clock: FakeClock) -> None:
        super().__init__()
        self._writes = iter(writes)
        self._clock = clock

    def read1(self, size: int | None = -1, /) -> bytes:
        self._clock.advance(PROGRESS_BAR_EVERY / 2)
        return next(self._writes, b"")


@pytest.mark.parametrize(
    ("printed", "told"),
    [
        (b"one\n\n  two  \nthree", ["one", "", "  two  ", "three"]),
        (b"as on Windows\r\nlast\r\n", ["as on Windows", "last"]),
        (b"\xff\xfe\n\xc3\xa9", ["��", "é"]),
        (b"", []),
    ],
)
def test_lines_are_told_as_they_were_printed(printed: bytes, told: list[str]) -> None:
    assert list(read_lines(io.BytesIO(printed), FakeClock())) == told


@pytest.mark.parametrize("more", [0, 1, 7])
def test_what_no_message_takes_comes_in_several_lines(more: int) -> None:
    printed = "é" * (2 * LINE_AT_MOST + more)
    *told, last = read_lines(io.BytesIO(f"{printed}\nlast\n".encode()), FakeClock())
    assert last == "last"
    assert "".join(told) == printed
    assert [len(line) for line in told] == [LINE_AT_MOST, LINE_AT_MOST, more][: 3 if more else 2]


def test_a_progress_bar_is_told_now_and_then_and_as_it_ends() -> None:
    clock = FakeClock()
    states = [f"\r{number}/6".encode() for number in range(7)]
    assert list(read_lines(_Slowly(*states, b"\ndone\n", clock=clock), clock)) == [
        "0/6",
        "2/6",
        "4/6",
        "6/6",
        "done",
    ]


@pytest.mark.parametrize(
    ("printed", "told"),
    [
        (b"1%\r2%\r3%\r", ["1%", "3%"]),
        (b"1%\r2%\r3%\r\n", ["1%", "3%"]),
        (b"1%\r2%\r\r\nnext\n", ["1%", "2%", "next"]),
        (b"1%\r2%\rdone\n", ["1%", "done"]),  # on a terminal it is written over, too
    ],
)
def test_a_bar_that_returns_after_each_state_is_told_as_it_ends(printed: bytes, told: list[str]) -> None:
    assert list(read_lines(io.BytesIO(printed), FakeClock())) == told
