"""The table and the record of a benchmark."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.parts.report import Row, finish

ROWS = [Row("kill a child", 0.05, 0.5), Row("alone", 12.0, unit="rows/s")]


def test_a_record_is_printed_and_written_in_the_agreed_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results" / "recovery.json"
    finish("recovery", ROWS, path)
    assert capsys.readouterr().out.splitlines()[1:] == [
        "case          ours  peer  unit    ratio",
        "kill a child  0.05  0.5   s       0.1",
        "alone         12    -     rows/s  -",
    ]
    record = json.loads(path.read_text())
    assert set(record) == {"name", "machine", "commit", "date", "rows"}
    assert re.fullmatch(r"([0-9a-f]{8,}\+?)?", record["commit"])
    assert record["rows"] == [
        {"case": "kill a child", "ours": 0.05, "peer": 0.5, "unit": "s", "ratio": 0.1},
        {"case": "alone", "ours": 12.0, "peer": None, "unit": "rows/s", "ratio": None},
    ]
