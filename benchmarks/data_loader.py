"""How fast does ElasticDataLoader give rows, beside torch's DataLoader with the same rows, batch and worker processes?

    python benchmarks/data_loader.py --json benchmarks/results/data_loader.json

Whole epochs of a TensorDataset, shuffled, in one process that is a world of one; both loaders take turns, medians over
the rounds. The order of the rows is made in each epoch, by both. rows/s: more is better; CPU: of this process, per
million rows. Rows of 64 float32 cost next to nothing, so that what the loaders do for a batch shows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable

import torch
from torch.utils.data import DataLoader, TensorDataset

import spark_elastic.torch as hvd
from benchmarks.parts.report import Row, finish, parser

WIDTH = 64
CASES = ((32, 0), (256, 0), (1024, 0), (256, 1))  # rows of a batch, worker processes


def read_epoch(loader: Iterable[list[torch.Tensor]], rows: int) -> tuple[float, float]:
    """(rows/s, CPU seconds per million rows)"""
    begin, cpu, seen = time.perf_counter(), time.process_time(), 0
    for x, _ in loader:
        seen += len(x)
    assert seen == rows
    return rows / (time.perf_counter() - begin), (time.process_time() - cpu) / rows * 1e6


def compare(dataset: TensorDataset, batch: int, workers: int, rounds: int) -> list[Row]:
    persistent = workers > 0
    ours = hvd.elastic.ElasticDataLoader(dataset, batch, num_workers=workers, persistent_workers=persistent)
    peer = DataLoader(dataset, batch, shuffle=True, num_workers=workers, persistent_workers=persistent)
    figures: dict[str, list[tuple[float, float]]] = {"ours": [], "peer": []}
    for _ in range(rounds):
        figures["ours"].append(read_epoch(ours, len(dataset)))
        figures["peer"].append(read_epoch(peer, len(dataset)))
    speeds, costs = zip(
        *([statistics.median(c) for c in zip(*f, strict=True)] for f in figures.values()), strict=True
    )
    case = f"batches of {batch:,}, {workers} worker processes"
    return [Row(case, *speeds, "rows/s"), Row(case, *costs, "CPU s/M rows")]


def main() -> None:
    made = parser("Rows per second of ElasticDataLoader, beside torch's DataLoader.")
    made.add_argument("--rows", type=int, default=40_000)
    made.add_argument("--rounds", type=int, default=7)
    arguments = made.parse_args()
    torch.set_num_threads(1)
    dataset = TensorDataset(torch.randn(arguments.rows, WIDTH), torch.randint(10, (arguments.rows,)))
    rows = [row for batch, workers in CASES for row in compare(dataset, batch, workers, arguments.rounds)]
    finish("data_loader", rows, arguments.json)


if __name__ == "__main__":
    main()
