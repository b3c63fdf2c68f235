"""R2: a line is in the file when the call returns, whatever becomes of the process."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from spark_elastic.clock import SystemClock
from spark_elastic.protocol.types import Phase, Position
from spark_elastic.training.ledger import FileLedger


def test_r02_lines_are_written_before_the_call_returns(tmp_path: Path) -> None:
    ledger = FileLedger(str(tmp_path / "made"), SystemClock())
    here = Position(2, Phase.TRAIN, 5)
    (path,) = (tmp_path / "made").iterdir()
    ledger.write_ahead((2, 3), here, np.array([7, 9]))
    contributes = json.loads(path.read_text())
    assert contributes["event"] == "contributes"
    assert (contributes["attempt"], contributes["generation"]) == (2, 3)
    assert (contributes["epoch"], contributes["step"]) == (2, 5)
    assert contributes["rows"] == [7, 9]
    ledger.record_applied((2, 3), here, 4)
    applied = json.loads(path.read_text().splitlines()[1])
    assert (applied["event"], applied["world"]) == ("applied", 4)
    ledger.close()
