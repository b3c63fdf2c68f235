"""How fast does ElasticDataLoader give rows, beside torch's DataLoader with the same rows, batch and worker processes?

Whole epochs of a TensorDataset, shuffled, in one process that is a world of one; both loaders take turns, medians over
the rounds. The order of the rows is made in each epoch, by both. rows/s: more is better; CPU: of this process, per
million rows. Rows of 64 float32 cost next to nothing, so that what the loaders do for a batch shows.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.utils.data import DataLoader, TensorDataset

import spark_elastic.torch as hvd
from benchmarks.parts.ranks import compare_figures, time_rows
from benchmarks.parts.report import Row

WIDTH = 64
CASES = ((32, 0), (256, 0), (1024, 0), (256, 1))  # rows of a batch, worker processes


def measure(rows: int = 40_000, rounds: int = 7) -> list[Row]:
    torch.set_num_threads(1)
    dataset, found = TensorDataset(torch.randn(rows, WIDTH), torch.randint(10, (rows,))), []
    for batch, workers in CASES:
        options = {"num_workers": workers, "persistent_workers": workers > 0}
        loaders = {
            "ours": hvd.elastic.ElasticDataLoader(dataset, batch, **options),
            "peer": DataLoader(dataset, batch, shuffle=True, **options),
        }
        epochs = {
            name: partial(time_rows, lambda loader=loader: sum(len(x) for x, _ in loader), rows)
            for name, loader in loaders.items()
        }
        speeds, costs = zip(*compare_figures(epochs, rounds).values(), strict=True)
        case = f"batches of {batch:,}, {workers} worker processes"
        found += [Row(case, *speeds, "rows/s"), Row(case, *costs, "CPU s/M rows")]
    return found
