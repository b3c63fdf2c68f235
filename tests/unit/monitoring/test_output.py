"""What workers print is limited on a screen, and said to be; what goes into files is whole."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import IO, Any

import pytest

from spark_elastic.clusters.cli import CommandOutput
from spark_elastic.monitoring.console import LineRateLimiter, OutputListener
from spark_elastic.testing.fakes import FakeClock


def output(stream: IO[str], folder: Path | None = None, **options: Any) -> CommandOutput:
    options = {
        "clock": FakeClock(),
        "timestamps": False,
        "show_messages": True,
        "show_output": True,
    } | options
    return CommandOutput(folder, stream, **options)


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
