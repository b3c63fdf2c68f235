"""What `faulthandler` prints of a crash, as it is read."""

from __future__ import annotations

import subprocess
import sys

from spark_elastic.worker.child import CrashLocation

PROGRAM = """
import ctypes, faulthandler, threading, time
faulthandler.enable()
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
print("a line without meaning", flush=True)
def forward():
    ctypes.string_at(0)
def train():
    forward()
train()
"""


def site_of(program: str) -> CrashLocation:
    ended = subprocess.run(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    site = CrashLocation()
    for line in ended.stdout.splitlines():
        site.read_line(line)
    return site


def test_the_innermost_frames_of_the_thread_that_crashed() -> None:
    site = site_of(PROGRAM)
    innermost, *callers = site.wait(0.0).split("; called from ")
    assert innermost.endswith(", in string_at")
    assert callers == ["<string>, line 7, in forward", "<string>, line 9, in train"]


def test_a_traceback_of_python_is_no_crash() -> None:
    site = site_of("raise ValueError")
    assert site.wait(0.01) == ""


def test_it_is_not_waited_for_once_there_are_no_more_lines() -> None:
    site = CrashLocation()
    site.close()
    assert site.wait(60.0) == ""
