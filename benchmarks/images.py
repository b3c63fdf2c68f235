"""How fast are JPEGs of a bytes column decoded and augmented, beside torch's DataLoader with the same transforms?

50,000 pictures of 64 x 64 pixels, decoded by Pillow, cropped at random to 56 x 56, flipped half of the time and
normalised to float32. Whole epochs, shuffled, in batches of 256, with two processes; all take turns, medians over the
rounds, after one that does not count. Ours: a Parquet file in the plan's order, one `transformation_fn` of whole
batches, random numbers by row. Peers: the same bytes in a list in memory; DataLoader takes them row by row, as is
usual, or whole batches at once by `__getitems__`. rows/s: more is better.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from torch.utils.data import DataLoader

from benchmarks.parts.ranks import compare_figures, time_rows
from benchmarks.parts.report import Row
from spark_elastic.data.loader import StepLoader
from spark_elastic.data.plan import DataPlan
from spark_elastic.data.reading.readers import open_reader
from spark_elastic.data.store import Store
from spark_elastic.tables.existing_parquet import describe_parquet
from spark_elastic.training.transformation import BatchTransformation, RowRandom
from spark_elastic.training.transformation_pool import TransformationPool

SIDE, CROP, BATCH, WORKERS = 64, 56, 256, 2
MEAN, SPREAD = np.float32(0.45), np.float32(0.22)
Epoch = Callable[[], Iterator[torch.Tensor]]


def make_pictures(count: int) -> list[bytes]:
    """Smooth colours with some noise, which JPEG makes about 2 KB of."""
    rng, (y, x) = np.random.default_rng(0), np.mgrid[0:SIDE, 0:SIDE] / SIDE
    found = []
    for number in range(count):
        colours = np.stack([np.sin(6 * x + number), np.cos(5 * y + number), x * y], axis=-1)
        numbers = 128 + 80 * colours + rng.integers(-12, 13, (SIDE, SIDE, 3))
        file = io.BytesIO()
        Image.fromarray(numbers.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=85)
        found.append(file.getvalue())
    return found


def decode_and_crop(picture: bytes, top: int, left: int, flip: bool) -> np.ndarray[Any, Any]:
    pixels = np.asarray(Image.open(io.BytesIO(picture)))[top : top + CROP, left : left + CROP]
    return pixels[:, ::-1] if flip else pixels


def augment(pictures: Sequence[bytes], corners: Any, flips: Any) -> np.ndarray[Any, Any]:
    """(rows, 3, CROP, CROP) float32"""
    pixels = np.empty((len(pictures), CROP, CROP, 3), np.uint8)
    for place, (picture, (top, left), flip) in enumerate(zip(pictures, corners, flips, strict=True)):
        pixels[place] = decode_and_crop(picture, top, left, flip)
    normal = np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)) * np.float32(1 / 255)
    normal -= MEAN
    normal /= SPREAD
    return normal


def transform(columns: dict[str, Any], rng: RowRandom) -> dict[str, Any]:
    corners, flips = rng.integers(0, SIDE - CROP + 1, size=2), rng.uniform() < 0.5
    return {"picture": augment(columns["picture"], corners.tolist(), flips.tolist()), "y": columns["y"]}


class Pictures:
    """A map-style data set that makes one row at a time."""

    def __init__(self, pictures: list[bytes]) -> None:
        self.pictures = pictures

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        top, left = torch.randint(0, SIDE - CROP + 1, (2,)).tolist()
        pixels = decode_and_crop(self.pictures[row], top, left, bool(torch.rand(()) < 0.5))
        picture = torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1).contiguous()
        return (picture * (1 / 255) - float(MEAN)) / float(SPREAD), row % 10


class PicturesInBatches(Pictures):
    """One that makes the rows of a batch at once, by the very function that ours is."""

    def __getitems__(self, rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        corners = torch.randint(0, SIDE - CROP + 1, (len(rows), 2)).tolist()
        flips = (torch.rand(len(rows)) < 0.5).tolist()
        found = augment([self.pictures[row] for row in rows], corners, flips)
        return torch.from_numpy(found), torch.tensor(rows) % 10


def keep(batch: Any) -> Any:
    """A collate_fn for batches that are complete."""
    return batch


def read_by_pool(loader: StepLoader, pool: TransformationPool) -> Iterator[torch.Tensor]:
    alone: Any = SimpleNamespace(rank=0, size=1)
    with loader.steps(0, 0, 0, 1) as steps:
        for step in pool.transform(steps, loader.plan, alone, augments=True):
            yield torch.from_numpy(step.finish().columns["picture"])


def open_pool(exits: ExitStack, folder: Path, pictures: list[bytes]) -> Epoch:
    table = pa.table({"picture": pictures, "y": np.arange(len(pictures)) % 10})
    pq.write_table(table, folder / "0.parquet", row_group_size=2500, compression="none", use_dictionary=False)
    store = Store.open(str(folder))
    manifest = describe_parquet(store, ["picture", "y"], transformed=True)
    plan = DataPlan.for_run(manifest.group_rows, BATCH, 3, 4, manifest.max_decoded_group_bytes(), 256 << 20)
    reader = exits.enter_context(closing(open_reader("arrow", store, manifest)))
    function = BatchTransformation(transform, ("picture", "y"), seed=3)
    pool = exits.enter_context(closing(TransformationPool(function, WORKERS, "process")))
    pool.start()
    return partial(read_by_pool, StepLoader(plan, reader, manifest.columns), pool)


def measure(rows: int = 50_000, rounds: int = 5) -> list[Row]:
    torch.set_num_threads(1)
    pictures = make_pictures(rows)
    options: dict[str, Any] = {"batch_size": BATCH, "shuffle": True, "num_workers": WORKERS}
    options["persistent_workers"] = True
    by_row = DataLoader(Pictures(pictures), **options)  # type: ignore[arg-type]
    by_batch = DataLoader(PicturesInBatches(pictures), collate_fn=keep, **options)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as exits:
        readers: dict[str, Epoch] = {
            "DataLoader row by row": lambda: (x for x, _ in by_row),
            "DataLoader in whole batches": lambda: (x for x, _ in by_batch),
            "ours": open_pool(exits, Path(folder), pictures),
        }
        epochs = {
            name: partial(time_rows, lambda read=read: sum(len(x) for x in read()), rows)
            for name, read in readers.items()
        }
        medians = compare_figures(epochs, rounds, warm_up=1)
    (ours, _), case = medians.pop("ours"), f"{rows:,} JPEGs of {SIDE} x {SIDE}, 2 processes"
    return [Row(f"{case}, against {peer}", ours, speed, "rows/s") for peer, (speed, _) in medians.items()]
