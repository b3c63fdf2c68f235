"""The progress line: what it says where, and that it never says too much."""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping
from typing import Any

import pytest

from spark_elastic.monitoring.console import PROGRESS_INTERVAL, ProgressListener
from spark_elastic.testing import FakeClock


def metrics(step: int, epoch: int = 0) -> Mapping[str, Any]:
    return {"epoch": epoch, "step": step, "steps": 10, "loss": 0.25, "rows": 64 * step, "world": 3}


def read_lines(stream: io.StringIO) -> list[str]:
    """Without what Spark's log has before the text."""
    return [line.partition("spark_elastic: ")[2] for line in stream.getvalue().splitlines()]


def test_plain_progress_lines_come_now_and_then_and_at_each_epochs_end() -> None:
    stream, clock = io.StringIO(), FakeClock()
    progress = ProgressListener(2, stream=stream, clock=clock)
    for step in range(1, 11):
        clock.sleep(PROGRESS_INTERVAL / 4)
        progress.on_progress(metrics(step))
    assert [line.split(" loss 0.2500 ")[0] for line in read_lines(stream)] == [
        f"epoch 1/2 step {step}/10" for step in (1, 5, 9, 10)
    ]


def test_the_progress_of_a_new_epoch_is_shown_at_once() -> None:
    stream = io.StringIO()
    progress = ProgressListener(2, stream=stream, clock=FakeClock())
    progress.on_progress(metrics(4))
    progress.on_progress(metrics(1, epoch=1))
    assert [line.split(" loss")[0] for line in read_lines(stream)] == [
        "epoch 1/2 step 4/10",
        "epoch 2/2 step 1/10",
    ]


def test_the_live_line_is_one_line_and_other_lines_go_above_it() -> None:
    stream = io.StringIO()
    progress = ProgressListener(2, stream=stream, live=True)
    for step in range(1, 4):
        progress.on_progress(metrics(step, epoch=1))
    progress.on_output("", 0, "hello")
    progress.close()
    text = stream.getvalue()
    assert "epoch 2/2" in text
    assert "13/20" in text
    assert "loss 0.2500 world 3" in text
    assert text.count("\n") == 2
    assert "[0] hello\n" in text


def test_the_live_line_has_one_time_left_no_speed_of_tqdm_and_fits_its_terminal() -> None:
    stream, clock = io.StringIO(), FakeClock()
    progress = ProgressListener(2, stream=stream, live=True, clock=clock)
    progress.on_progress({**metrics(1), "rows": 64})
    clock.sleep(1.0)
    others = {f"validation_metric_{n}": 0.5 for n in range(20)}
    progress.on_progress({**metrics(3), "rows": 64, **others})
    progress.close()
    last = [line for line in re.split(r"[\r\n]", stream.getvalue()) if line.strip()][-1]
    assert "128 rows/s world 3 8 s left" in last
    assert "step/s" not in last
    assert "<" not in last, "tqdm's own time left"
    assert "metric" not in last
    assert len(last.rstrip()) <= 80


@pytest.mark.parametrize(("rows", "columns", "shown"), [(0, 0, 80), (24, 60, 60)])
def test_the_live_line_is_as_wide_as_its_terminal_if_that_knows_its_size(
    rows: int, columns: int, shown: int
) -> None:
    terminal, program_side = os.openpty()
    fcntl.ioctl(program_side, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    with open(terminal, "rb", buffering=0) as screen, open(program_side, "w") as stream:
        progress = ProgressListener(2, stream=stream)
        progress.on_progress(metrics(3))
        progress.close()
        seen = b""
        while not seen.endswith(b"\n"):  # which ends the line once it is closed
            seen += screen.read(65536)
    last = seen.decode().strip().split("\r")[-1]
    assert last.startswith("epoch 1/2  15%|")
    assert last.endswith("| 3/20, loss 0.2500 world 3")
    assert shown - 2 <= len(last) <= shown


NOTEBOOK = """
import json, sys, warnings
from IPython.core.displaypub import CapturingDisplayPublisher
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.kernel, shell.display_pub, shell.colors = None, CapturingDisplayPublisher(), "nocolor"
warnings.simplefilter("error")
shown = shell.run_cell('''from spark_elastic.monitoring.console import ProgressListener
shown = ProgressListener(2)
for step in range(1, 4):
    shown.on_progress({"epoch": 0, "step": step, "steps": 3})
shown.on_message("a loss")
shown.close()''')
shown.raise_error()
outputs = shell.display_pub.outputs
print(json.dumps([(shown["update"], shown["data"]["text/plain"]) for shown in outputs]), flush=True)
shell.run_cell('''import spark_elastic
def call():
    spark_elastic.run(3)
call()''')
"""


def test_a_notebook_has_one_output_for_the_bar_and_an_error_begins_with_its_sentence() -> None:
    """An exported notebook shows the last state of each output, and every state of a line that is rewritten."""
    done = subprocess.run([sys.executable, "-c", NOTEBOOK], capture_output=True, text=True, check=True)
    assert not done.stderr
    said, outputs, *traceback = done.stdout.splitlines()
    updates, texts = zip(*json.loads(outputs), strict=True)
    assert not updates[0]
    assert all(updates[1:])
    assert texts[-1].startswith("epoch 1/2  50%|")
    assert "| 3/6" in texts[-1]
    assert said == "a loss"
    assert [line.strip() for line in traceback if line.strip() and not line.startswith("  File")] == [
        "spark_elastic.errors.InvalidInput: run() takes a function or the path of a script; got a int.",
        "call()",
        "spark_elastic.run(3)",
    ]


def test_a_quiet_listener_shows_nothing_but_calls_the_callback() -> None:
    stream, heard = io.StringIO(), []
    progress = ProgressListener(1, stream=stream, quiet=True, callback=heard.append)
    progress.on_progress(metrics(1))
    progress.on_message("world of 1: start")
    progress.on_output("", 0, "hello")
    ProgressListener(1, stream=stream, callback=heard.append).on_progress({"phase": "validate"})  # no step
    assert stream.getvalue() == ""
    assert heard == [metrics(1), {"phase": "validate"}]


def test_progress_goes_to_standard_error_as_plain_lines_by_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ProgressListener(1).on_message("world of 1: start")
    assert capsys.readouterr().err.endswith(" INFO spark_elastic: world of 1: start\n")
    assert not sys.stderr.isatty()


def test_a_job_beside_an_imported_ipykernel_has_no_live_line() -> None:
    """Spark 4 imports it where it is installed, in no notebook."""
    program = (
        "import ipykernel, IPython\n"
        "from spark_elastic.monitoring.console import ProgressListener\n"
        "ProgressListener(1).on_message('hello')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.endswith(" INFO spark_elastic: hello\n")


def test_throughput_metrics_and_time_left_are_shown_once_known() -> None:
    stream, clock = io.StringIO(), FakeClock()
    progress = ProgressListener(2, stream=stream, clock=clock)
    progress.on_progress({**metrics(2), "rows": 64})
    clock.sleep(PROGRESS_INTERVAL)
    progress.on_progress({**metrics(6), "rows": 64, "auc": 0.75})
    assert read_lines(stream) == [
        "epoch 1/2 step 2/10 loss 0.2500 world 3",
        "epoch 1/2 step 6/10 loss 0.2500 128 rows/s world 3 7 s left auc 0.75",
    ]
