"""Judges a run from outside: was every row of the table trained exactly once in every epoch?

    python judge.py IDS RECORDS APPLIED

IDS: a file with one row id per line, the table's own. RECORDS: a folder of JSON lines that the model's forward wrote,
{"epoch", "step", "generation", "ids"}. APPLIED: a folder of JSON lines, of which {"event": "applied", "epoch",
"step", "generation"} say which steps were applied. The weights hold, per step, the highest generation that applied
it. Prints a verdict per epoch; exit status 1 when a row is missing, doubled or strange. Imports nothing of the project.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from pathlib import Path


def lines(folder: Path) -> list[dict]:
    """A process that was killed may leave a torn last line, which says nothing."""
    found = []
    for path in sorted(folder.glob("*.jsonl")):
        for text in path.read_text().splitlines():
            try:
                found.append(json.loads(text))
            except json.JSONDecodeError:
                continue
    return found


def main(ids_file: str, records: str, applied: str) -> int:
    ids = {int(text) for text in Path(ids_file).read_text().split()}
    history: dict[tuple[int, int], int] = {}
    for line in lines(Path(applied)):
        if line["event"] == "applied":
            step = line["epoch"], line["step"]
            history[step] = max(history.get(step, 0), line["generation"])
    seen: dict[int, Counter[int]] = defaultdict(Counter)
    for line in lines(Path(records)):
        if history.get((line["epoch"], line["step"])) == line["generation"]:
            seen[line["epoch"]].update(line["ids"])
    bad = 0
    epochs = sorted({epoch for epoch, _ in history})
    for epoch in epochs:
        times = seen[epoch]
        missing, strange = ids - times.keys(), times.keys() - ids
        doubled = [row for row, count in times.items() if count > 1]
        bad += len(missing) + len(strange) + len(doubled)
        if missing or doubled or strange:
            print(f"epoch {epoch}: missing {len(missing)}, doubled {len(doubled)}, strange {len(strange)}")
    print(f"{len(epochs)} epochs of {len(ids)} rows, {len(history)} steps: {bad} rows are wrong")
    return 1 if bad or not epochs else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4]))
