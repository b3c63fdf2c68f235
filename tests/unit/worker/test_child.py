"""The lines of a training process, where it crashed, and whether the kernel killed it for its memory."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from spark_elastic.testing.fakes import FakeClock
from spark_elastic.worker import child
from spark_elastic.worker.fork_server import find_open_devices


class _SlowPipe(io.BytesIO):
    """A pipe whose writer takes half as long, from one write to the next, as passes between two states shown."""

    def __init__(self, *writes: bytes, clock: FakeClock) -> None:
        super().__init__()
        self._writes = iter(writes)
        self._clock = clock

    def read1(self, size: int | None = -1, /) -> bytes:
        self._clock.advance(child.PROGRESS_BAR_EVERY / 2)
        return next(self._writes, b"")


LONG = "é" * child.LINE_AT_MOST


@pytest.mark.parametrize(
    ("printed", "told"),
    [
        (b"one\n\n  two  \nthree", ["one", "", "  two  ", "three"]),
        (b"as on Windows\r\nlast\r\n", ["as on Windows", "last"]),
        (b"\xff\xfe\n\xc3\xa9", ["��", "é"]),
        (b"", []),
        # A line too long for a message comes in parts.
        (f"{LONG}{LONG}\nlast\n".encode(), [LONG, LONG, "last"]),
        (f"{LONG}{LONG}end\nlast\n".encode(), [LONG, LONG, "end", "last"]),
        # A progress bar that ends each state with a return is passed on in its last state.
        (b"1%\r2%\r3%\r", ["1%", "3%"]),
        (b"1%\r2%\r3%\r\n", ["1%", "3%"]),
        (b"1%\r2%\r\r\nnext\n", ["1%", "2%", "next"]),
        (b"1%\r2%\rdone\n", ["1%", "done"]),  # on a terminal it is written over, too
    ],
)
def test_lines_of_a_process_are_passed_on_as_printed(printed: bytes, told: list[str]) -> None:
    assert list(child.read_lines(io.BytesIO(printed), FakeClock())) == told


def test_a_progress_bar_is_passed_on_about_once_a_second_and_in_its_last_state() -> None:
    clock = FakeClock()
    states = [f"\r{number}/6".encode() for number in range(7)]
    told = list(child.read_lines(_SlowPipe(*states, b"\ndone\n", clock=clock), clock))
    assert told == ["0/6", "2/6", "4/6", "6/6", "done"]


def test_a_crash_after_an_unfinished_line_has_a_location() -> None:
    printed = (
        b"\r 50%|##  | 5/10Fatal Python error: Segmentation fault\n\n"
        b'Current thread 0x1 (most recent call first):\n  File "/a/b.py", line 3 in f\n'
    )
    site = child.CrashLocation()
    for line in child.read_lines(io.BytesIO(printed), FakeClock()):
        site.read_line(line)
    site.close()
    assert site.wait(0.0) == "b.py, line 3, in f"


V2 = "0::/pod/box\n"
V1 = "9:name=systemd:/\n4:memory:/pod/box\n1:cpu:/\n0::/\n"


def write_machine(root: Path, groups: str, *files: str) -> None:
    """With a counter of 7 in each file; `groups`: this process's."""
    for name, text in {"proc/self/cgroup": groups, **dict.fromkeys(files, "oom 1\noom_kill 7\n")}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    ("groups", "file"),
    [
        (V2, "sys/fs/cgroup/pod/box/memory.events"),
        (V2, "sys/fs/cgroup/memory.events"),  # a container's own group, seen from inside
        (V1, "sys/fs/cgroup/memory/pod/box/memory.oom_control"),
        (V1, "sys/fs/cgroup/memory/memory.oom_control"),
        ("", "proc/vmstat"),
    ],
)
def test_the_closest_counter_of_memory_kills_is_found(groups: str, file: str, tmp_path: Path) -> None:
    write_machine(tmp_path, groups, "proc/vmstat", file)
    assert child.find_oom_counter(tmp_path) == tmp_path / file


def test_a_killed_process_ran_out_of_memory_only_if_the_counter_rose(tmp_path: Path) -> None:
    assert not child.OomKillCounter(tmp_path).is_oom_kill(-9), "there is no counter"
    events = tmp_path / "sys/fs/cgroup/pod/box/memory.events"
    write_machine(tmp_path, V2, "sys/fs/cgroup/pod/box/memory.events")
    kills = child.OomKillCounter(tmp_path)
    assert not kills.is_oom_kill(-9)
    events.write_text("oom 2\noom_kill 8\n")
    assert kills.is_oom_kill(-9)
    assert not kills.is_oom_kill(-9)
    events.write_text("oom 2\noom_kill 9\n")
    assert not kills.is_oom_kill(1)
    assert not kills.is_oom_kill(-9), "that rise was before this process ended"


def test_accelerators_opened_by_imports_are_found(tmp_path: Path) -> None:
    for number, name in enumerate(("/dev/null", "pipe:[7]", "/dev/nvidiactl", "/somewhere/dev/nvidia0")):
        (tmp_path / str(number)).symlink_to(name)
    assert find_open_devices(tmp_path) == ["/dev/nvidiactl"]
    assert find_open_devices() == []
