"""What a person sees of a job: workers' output, limited on a screen and whole in files, and a line of progress."""

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
from pathlib import Path
from typing import IO, Any

import pytest

from spark_elastic.clusters.cli import CommandOutput
from spark_elastic.monitoring.console import (
    PROGRESS_INTERVAL,
    LineRateLimiter,
    OutputListener,
    ProgressListener,
)
from spark_elastic.testing.fakes import FakeClock


def output(stream: IO[str], folder: Path | None = None, **options: Any) -> CommandOutput:
    shown = {"clock": FakeClock(), "timestamps": False, "show_messages": True, "show_output": True}
    return CommandOutput(folder, stream, **{**shown, **options})


@pytest.mark.parametrize("limited", [True, False])
def test_the_output_of_a_worker_is_limited_on_a_screen_and_whole_in_files(
    limited: bool, tmp_path: Path
) -> None:
    stream = io.StringIO()
    listener = output(stream, tmp_path, limiter=LineRateLimiter(burst=3.0) if limited else None)
    for number in range(5):
        listener.on_output("", 1, f"line {number}")
    listener.on_output("", 0, "another")
    listener.on_message("world 2")
    listener.close()
    unseen = output(stream, tmp_path, show_output=False)
    unseen.on_output("", None, "a line")
    unseen.close()
    shown = stream.getvalue().splitlines()
    lines = [f"line {number}" for number in range(5)]
    first = [f"[1] {line}" for line in (lines[:3] if limited else lines)]
    last = ["[1] 2 lines were dropped"] if limited else []
    assert shown == [*first, "[0] another", "[driver] world 2", *last]
    assert (tmp_path / "rank.1" / "stdout").read_text().splitlines() == lines
    assert (tmp_path / "rank.none" / "stdout").read_text() == "a line\n"


def test_messages_among_sparks_log_have_its_form_and_workers_lines_stay() -> None:
    stream = io.StringIO()
    shown = OutputListener(stream, FakeClock(), False, True, True, as_spark=True)
    shown.on_message("world of 2: started")
    shown.on_output("", 1, "hello")
    first, second = stream.getvalue().splitlines()
    assert re.fullmatch(r"../../.. ..:..:.. INFO spark_elastic: world of 2: started", first)
    assert second == "[1] hello"


class _ClosedPipe(io.StringIO):
    writes = 0

    def write(self, text: str, /) -> int:
        self.writes += 1
        raise BrokenPipeError(32, "Broken pipe")


def test_a_pipe_whose_reader_has_closed_it_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    stream = _ClosedPipe()
    shown = output(stream)
    for number in range(3):
        shown.on_output("", 0, f"line {number}")
    shown.close()
    assert [record.getMessage() for record in caplog.records] == [
        "the stream that shows workers' output has been closed; the job continues"
    ]
    assert stream.writes == 1


def test_characters_that_a_streams_encoding_lacks_are_escaped() -> None:
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding="ascii")
    output(stream).on_output("", 0, "é")
    assert written.getvalue() == b"[0] \\xe9\n"


def test_metrics_of_a_loop_are_shown_as_a_line_now_and_then() -> None:
    stream, clock = io.StringIO(), FakeClock()
    shown = output(stream, clock=clock)
    shown.on_progress({"step": 1, "world": 2})
    for step in (2, 3, 4):
        shown.on_progress({"step": step, "world": 2, "loss": 0.5, "auc": 0.75})
    clock.advance(2.0)
    shown.on_progress({"step": 5, "world": 2, "loss": 0.25, "auc": 0.75})
    shown.on_progress({"step": 6, "world": 2, "loss": 0.125, "auc": 0.75})
    shown.close()
    assert stream.getvalue().splitlines() == [
        "step 2 loss 0.5000 world 2 auc 0.75",
        "step 5 loss 0.2500 world 2 auc 0.75",
        "step 6 loss 0.1250 world 2 auc 0.75",
    ]


def test_lines_beyond_the_allowance_are_counted() -> None:
    limiter = LineRateLimiter(rate=1.0, burst=3.0)
    shown = [limiter.limit(0.0, "0", str(n)) for n in range(10)]
    assert shown == [("0",), ("1",), ("2",)] + [()] * 7
    assert limiter.limit(0.0, "1", "other") == ("other",)
    assert list(limiter.final_notes()) == ["[0] 7 lines were dropped"]
    assert limiter.limit(2.0, "0", "later") == ("7 lines were dropped", "later")
    assert list(limiter.final_notes()) == []


# ---- progress


def metrics(step: int, epoch: int = 0) -> Mapping[str, Any]:
    return {"epoch": epoch, "step": step, "steps": 10, "loss": 0.25, "rows": 64 * step, "world": 3}


def read_lines(stream: io.StringIO) -> list[str]:
    """Without what Spark's log has before the text."""
    return [line.partition("spark_elastic: ")[2] for line in stream.getvalue().splitlines()]


def test_plain_progress_lines_come_now_and_then_and_at_the_ends_of_epochs() -> None:
    stream, clock = io.StringIO(), FakeClock()
    progress = ProgressListener(2, stream=stream, clock=clock)
    for step in range(1, 11):
        clock.sleep(PROGRESS_INTERVAL / 4)
        progress.on_progress(metrics(step))
    progress.on_progress(metrics(1, epoch=1))
    shown = [line.split(" loss 0.2500 ")[0] for line in read_lines(stream)]
    assert shown == [*(f"epoch 1/2 step {step}/10" for step in (1, 5, 9, 10)), "epoch 2/2 step 1/10"]


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
