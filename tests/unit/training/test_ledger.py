"""R2: a contribution is in the file or the store when the call returns, whatever becomes of the process."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from spark_elastic.data.store import Store
from spark_elastic.protocol.types import Phase, Position
from spark_elastic.runs.ledger import Ledger


def test_r02_lines_are_written_before_the_call_returns(tmp_path: Path) -> None:
    ledger = Ledger(Store.open("memory://ledgers"), str(tmp_path / "made"))
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


def test_r02_a_store_without_appends_gets_an_object_for_each_step() -> None:
    store, fence = Store.open("memory://ledgers"), (1, 1)
    ledger = Ledger(store, "runs/r/ledger")
    for step in range(2):
        ledger.write_ahead(fence, Position(0, Phase.TRAIN, step), np.array([step]))
        ledger.record_applied(fence, Position(0, Phase.TRAIN, step), 4)
    written = [[json.loads(line)["event"] for line in text.splitlines()] for text in objects(store)]
    assert written == [["contributes"], ["applied", "contributes"]], "what follows may wait for the next step"
    ledger.close()
    assert [json.loads(line)["step"] for text in objects(store) for line in text.splitlines()] == [0, 0, 1, 1]


def objects(store: Store) -> list[str]:
    return [store.read_bytes(name).decode() for name in store.list("runs/r/ledger")]
