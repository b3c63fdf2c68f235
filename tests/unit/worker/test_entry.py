from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from spark_elastic.protocol.slot_spec import SlotSpec, WorkerIdentity
from spark_elastic.worker.entry import ChildFds, Header


@pytest.mark.parametrize("span", [None, (7000, 7010)])
def test_a_header_survives_the_pipe(span: tuple[int, int] | None) -> None:
    resources = {"gpu": ("0", "3"), "fpga": ("x",)}
    spec = SlotSpec(
        address="127.0.0.1:1", key=bytes(range(256)), attempt=1, worker_port_range=span, preload=("torch",)
    )
    header = Header(spec, WorkerIdentity("", "1-0", resources=resources), 1, 10, ChildFds(5, 6, 7))
    assert Header.from_line(header.to_line()) == header


def test_where_ctrl_c_is_ignored_the_programs_own_processes_can_be_interrupted() -> None:
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
