"""A training process: header, lines, crashes, kills; what user code forks ends where that code ends."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_collectives.engine import is_exiting
from spark_elastic.testing.fakes import FakeClock
from spark_elastic.worker import child
from spark_elastic.worker.fork_server import find_open_devices
from tests.patience import until


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


# ---- the header and the end of a training process


def test_a_programs_own_processes_can_be_interrupted_where_the_worker_ignores_ctrl_c() -> None:
    program = """
import os, signal, subprocess
from spark_elastic.worker.entry import stop_ignoring_interrupts
stop_ignoring_interrupts()
os.kill(os.getpid(), signal.SIGINT)  # Ctrl-C, which the driver answers
helper = subprocess.Popen(["sleep", "60"])
helper.send_signal(signal.SIGINT)
try:
    print(helper.wait(10))
finally:
    helper.kill()
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == (f"{-signal.SIGINT}\n", "")


def test_a_worker_ends_with_its_executor_and_breaks_its_connections_before() -> None:
    program = """
import os, signal, socket, sys
from spark_elastic.worker import entry
kill = os.kill
entry.os.kill = lambda pid, number: (print(number, peer.recv(1), flush=True), kill(pid, number))
connection, peer = socket.socketpair()
entry.exit_with_process(int(sys.argv[1]))
"""
    with subprocess.Popen(["sleep", "60"]) as host:
        command = [sys.executable, "-c", program, str(host.pid)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as worker:
            with pytest.raises(subprocess.TimeoutExpired):
                worker.wait(0.3)
            host.kill()
            assert worker.communicate(timeout=30)[0] == "9 b''\n"
        assert worker.returncode == -signal.SIGKILL, "the loss of a host, not a failure of the program"


def test_a_process_exits_once_all_of_its_threads_do() -> None:
    program = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
print("ready", flush=True)
ctypes.PyDLL(None).pthread_exit(None)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        stat = Path(f"/proc/{process.pid}/stat")
        until(lambda: b") Z " in stat.read_bytes())  # its first thread has ended
        assert not is_exiting(process.pid)
        process.kill()
        until(lambda: is_exiting(process.pid))
    assert not is_exiting(process.pid)


SCRIPT = """
import sys
from spark_elastic.worker.function_program import Script

def run(path):
    Script.read(path)()
"""
FUNCTION = """
import sys
from tests.fake_group import FakeFabric
from spark_elastic.worker.context import get_context
from spark_elastic.worker.function_program import FunctionProgram
from spark_elastic.worker.program import WorkerHandle
from tests.worlds import enter_group

enter_group(FakeFabric(1).group(0))
handle = WorkerHandle(lambda: 0, lambda at: None, lambda told: None, lambda error: None)

def run(path):
    train = FunctionProgram(lambda: exec(open(path).read()))
    train.run(get_context().world, get_context().group, handle)
"""
ENDS = {"sys.exit(0)": 0, "sys.exit(5)": 5, "raise ValueError('of the fork')": 1, "pass": 0}


@pytest.mark.parametrize("program", [SCRIPT, FUNCTION])
def test_a_process_forked_by_user_code_ends_where_that_code_ends(program: str, tmp_path: Path) -> None:
    paths = [tmp_path / f"train_{number}.py" for number in range(len(ENDS))]
    for path, last_line in zip(paths, ENDS, strict=True):
        path.write_text(
            "import os, sys\n"
            "forked = os.fork()\n"
            f"if forked == 0:\n    print('the fork', flush=True)\n    {last_line}\n"
            "else:\n    print(os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]), flush=True)\n"
        )
    worker = f"{program}\nfor path in sys.argv[1:]:\n    run(path)\n    print('the worker', flush=True)\n"
    done = subprocess.run(
        [sys.executable, "-c", worker, *paths], capture_output=True, text=True, check=True, timeout=60
    )
    said = [line for code in ENDS.values() for line in ("the fork", str(code), "the worker")]
    assert done.stdout.splitlines() == said
    assert done.stderr.count("ValueError: of the fork") == 1
