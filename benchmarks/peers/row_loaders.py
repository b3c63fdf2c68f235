"""The loaders that benchmarks/row_loader.py compares, each as its own documentation shows it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

WIDTH, BATCH = 64, 256
WORLDS = (3, 2)  # ranks before and after a change


class Loader:
    """A contender, as a loop sees it."""

    title = ""
    loader: Any = None  # one that knows its position

    def __init__(self, folder: Path, processes: int) -> None:
        """processes: that read and make batches; 0: this one."""
        self.folder, self.processes = folder, processes
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.position = 0, 0  # epoch, steps of it that are left out

    def open_epoch(self) -> Iterator[dict[str, torch.Tensor]]:
        """The batches of the next epoch, or of the rest of one."""
        epoch, skipped = self.position
        self.position = epoch + 1, 0
        loader = self.make_loader(epoch) if self.loader is None else self.loader
        return islice(iter(loader), skipped, None)

    def make_loader(self, epoch: int) -> Any:
        raise NotImplementedError

    def save(self, step: int) -> Any:
        """The position after that many steps of the epoch."""
        return (self.position[0] - 1, step) if self.loader is None else self.loader.state_dict()

    def load(self, state: Any) -> None:
        if self.loader is None:
            self.position = state
        else:
            self.loader.load_state_dict(state)


class Ours(Loader):
    title = "ours"

    def __init__(self, folder: Path, processes: int) -> None:
        super().__init__(folder, processes)
        import spark_elastic.torch as hvd
        from spark_elastic import Rows

        rows = Rows.from_parquet(str(folder / "table"))
        batch = BATCH * (WORLDS[0] if self.size > 1 else 1)
        self.loader = hvd.elastic.ElasticDataLoader(
            rows, batch, num_workers=processes, persistent_workers=processes > 0
        )


class Fragments(IterableDataset[dict[str, torch.Tensor]]):
    """Each rank and worker process takes files in turn."""

    def __init__(self, folder: Path, epoch: int, rank: int, size: int) -> None:
        self.folder, self.epoch, self.rank, self.size = folder, epoch, rank, size

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        import pyarrow.dataset as pads

        worker = torch.utils.data.get_worker_info()
        workers, own = (worker.num_workers, worker.id) if worker else (1, 0)
        draw = np.random.default_rng(self.epoch)
        fragments = list(pads.dataset(self.folder).get_fragments())
        order = draw.permutation(len(fragments))
        for number in order[self.rank * workers + own :: self.size * workers]:
            for block in fragments[number].to_batches():
                x = block["x"].flatten().to_numpy().reshape(-1, WIDTH)
                row, places = block["row"].to_numpy(), draw.permutation(len(block))
                for first in range(0, len(block), BATCH):
                    part = places[first : first + BATCH]
                    yield {"x": torch.from_numpy(x[part]), "row": torch.from_numpy(row[part])}


class Plain(Loader):
    title = "torch's DataLoader over pyarrow"

    def make_loader(self, epoch: int) -> Any:
        dataset = Fragments(self.folder / "table", epoch, self.rank, self.size)
        return DataLoader(dataset, batch_size=None, num_workers=self.processes)


class LitData(Loader):
    title = "litData"

    def __init__(self, folder: Path, processes: int) -> None:
        super().__init__(folder, processes)
        from litdata import StreamingDataLoader, StreamingDataset

        dataset = StreamingDataset(str(folder / "litdata"), shuffle=True)
        self.loader = StreamingDataLoader(
            dataset, batch_size=BATCH, num_workers=processes, persistent_workers=processes > 0
        )


class Lance(Loader):
    title = "Lance"

    def make_loader(self, epoch: int) -> Any:
        from lance.sampler import ShardedBatchSampler
        from lance.torch.data import LanceDataset

        sampler = ShardedBatchSampler(self.rank, self.size, randomize=True, seed=epoch)
        dataset = LanceDataset(str(self.folder / "lance"), batch_size=BATCH, sampler=sampler)
        return DataLoader(dataset, batch_size=None)


def read_items(path: str) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet as pq

    table = pq.read_table(path).combine_chunks()
    x = table["x"].chunk(0).flatten().to_numpy().reshape(-1, WIDTH)
    for row, values in zip(table["row"].to_pylist(), x, strict=True):
        yield {"row": row, "x": torch.from_numpy(values.copy())}


LOADERS = {made.__name__: made for made in (Ours, Plain, LitData, Lance)}
