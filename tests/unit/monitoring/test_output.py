"""What workers print is limited on a screen, and said to be; what goes into files is whole."""

from __future__ import annotations

import io
from pathlib import Path
from typing import IO

import pytest

from spark_elastic.local.launcher import FileListener
from spark_elastic.monitoring.progress import LineRateLimiter, OutputListener
from spark_elastic.testing.fakes import FakeClock


def output(stream: IO[str], lines: bool = True, limit: LineRateLimiter | None = None) -> OutputListener:
    return OutputListener(stream, FakeClock(), timestamps=False, worlds=True, lines=lines, limit=limit)


@pytest.mark.parametrize("limited", [True, False])
def test_a_worker_that_prints_much_is_cut_short_where_it_is_to_be(limited: bool, tmp_path: Path) -> None:
    stream = io.StringIO()
    narration = FileListener(output(stream, limit=LineRateLimiter(burst=3.0) if limited else None), tmp_path)
    for number in range(5):
        narration.log(1, f"line {number}")
    narration.log(0, "another")
    narration.tell("world 2")
    narration.close()
    shown = stream.getvalue().splitlines()
    lines = [f"line {number}" for number in range(5)]
    first = [f"[1] {line}" for line in (lines[:3] if limited else lines)]
    last = ["[1] 2 lines were left out"] if limited else []
    assert shown == [*first, "[0] another", "[driver] world 2", *last]
    assert (tmp_path / "rank.1" / "stdout").read_text().splitlines() == lines


class _ClosedPipe(io.StringIO):
    writes = 0

    def write(self, text: str, /) -> int:
        self.writes += 1
        raise BrokenPipeError(32, "Broken pipe")


def test_a_pipe_that_nobody_reads_any_more_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    stream = _ClosedPipe()
    shown = output(stream)
    for number in range(3):
        shown.log(0, f"line {number}")
    shown.close()
    assert [record.getMessage() for record in caplog.records] == [
        "nobody reads what workers print any more; the job goes on"
    ]
    assert stream.writes == 1


def test_what_a_streams_encoding_lacks_is_told_by_its_number() -> None:
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding="ascii")
    output(stream).log(0, "é")
    assert written.getvalue() == b"[0] \\xe9\n"


def test_without_logs_the_files_are_still_written(tmp_path: Path) -> None:
    stream = io.StringIO()
    narration = FileListener(output(stream, lines=False), tmp_path)
    narration.log(None, "a line")
    narration.close()
    assert stream.getvalue() == ""
    assert (tmp_path / "rank.none" / "stdout").read_text() == "a line\n"


def test_what_a_loop_reports_is_a_line_now_and_then() -> None:
    stream, clock = io.StringIO(), FakeClock()
    shown = OutputListener(stream, clock, timestamps=False, worlds=True, lines=True)
    shown.progress({"step": 1, "world": 2})
    for step in (2, 3, 4):
        shown.progress({"step": step, "world": 2, "loss": 0.5, "auc": 0.75})
    clock.advance(2.0)
    shown.progress({"step": 5, "world": 2, "loss": 0.25, "auc": 0.75})
    shown.progress({"step": 6, "world": 2, "loss": 0.125, "auc": 0.75})
    shown.close()
    assert stream.getvalue().splitlines() == [
        "step 2 loss 0.5000 auc 0.75 world 2",
        "step 5 loss 0.2500 auc 0.75 world 2",
        "step 6 loss 0.1250 auc 0.75 world 2",
    ]
