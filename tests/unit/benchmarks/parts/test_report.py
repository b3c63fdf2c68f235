"""The table and the record of a benchmark."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.parts.report import Row, as_json, finish, table

ROWS = [Row("kill a child", 0.05, 0.5), Row("alone", 12.0, unit="rows/s")]


def test_table_is_aligned_and_shows_a_missing_peer() -> None:
    assert table(ROWS).splitlines() == [
        "case          ours  peer  unit    ratio",
        "kill a child  0.05  0.5   s       0.1",
        "alone         12    -     rows/s  -",
    ]


def test_record_has_the_agreed_form() -> None:
    record = json.loads(as_json("recovery", ROWS))
    assert set(record) == {"name", "machine", "commit", "date", "rows"}
    assert re.fullmatch(r"([0-9a-f]{8,}\+?)?", record["commit"])
    assert record["rows"] == [
        {"case": "kill a child", "ours": 0.05, "peer": 0.5, "unit": "s", "ratio": 0.1},
        {"case": "alone", "ours": 12.0, "peer": None, "unit": "rows/s", "ratio": None},
    ]


def test_finish_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results" / "recovery.json"
    finish("recovery", ROWS, path)
    assert capsys.readouterr().out.splitlines()[1:] == table(ROWS).splitlines()
    assert json.loads(path.read_text())["name"] == "recovery"
