"""The header and the end of a training process; what user code forks ends where that code ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_collectives.engine import is_exiting
from spark_elastic.protocol.types import SlotId, SlotIdentity, SlotSpec
from spark_elastic.rendezvous import codec
from spark_elastic.worker.entry import ChildFds, Header
from tests.patience import until


@pytest.mark.parametrize("span", [None, (7000, 7010)])
def test_a_header_survives_the_pipe(span: tuple[int, int] | None) -> None:
    resources = {"gpu": ("0", "3"), "fpga": ("x",)}
    spec = SlotSpec(
        address="127.0.0.1:1", key=bytes(range(256)), attempt=1, worker_port_range=span, preload=("torch",)
    )
    header = Header(spec, SlotIdentity(slot=SlotId("1-0"), resources=resources), 1, 10, ChildFds(5, 6, 7))
    assert codec.from_line(Header, codec.to_line(header)) == header


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
from tests.unit.ops.workers import enter_group

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
