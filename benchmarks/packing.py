"""How much padding is left when documents are packed, and how fast do packed sequences come?

Documents have lengths of real text: log-normal, on average a fifth of a sequence. Padding: places of sequences that
hold no token; peer: the same documents in batches of their own order, each padded to its longest. Plan: documents whose
lengths are read and packed in a second, with a column of lengths and without one. Tokens: of an epoch on one worker, in
steps of 64 sequences with positions, document ids and labels; peer: pyarrow reads the same row groups, joins all
documents of each and cuts them every `length` tokens, wherever a document is.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.parts.report import Row
from spark_elastic.data.loader import StepLoader
from spark_elastic.data.manifest import Manifest
from spark_elastic.data.packing import Packing, find_positions, make_labels
from spark_elastic.data.plan import DataPlan
from spark_elastic.data.reading.readers import open_reader, pack_rows
from spark_elastic.data.reading.row_group_cache import DEFAULT_CACHE_BYTES
from spark_elastic.data.store import Store
from spark_elastic.tables.existing_parquet import describe_parquet

GROUP_ROWS, BATCH = 2500, 64
SPREADS = (0.5, 1.0, 1.5)  # of the logarithms of lengths


def write_documents(path: Path, count: int, length: int, spread: float) -> np.ndarray:
    """A file of documents; their lengths."""
    rng = np.random.default_rng(3)
    lengths = rng.lognormal(np.log(length / 5) - spread**2 / 2, spread, count).astype(np.int64)
    lengths = np.minimum(length, lengths)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    tokens = rng.integers(1, 32_000, ends[-1]).astype(np.int32)
    values = pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(tokens))
    pq.write_table(pa.table({"input_ids": values, "size": lengths}), path, row_group_size=GROUP_ROWS)
    return lengths


def pad_batches(lengths: np.ndarray, rows: int) -> float:
    """The share of padding in batches that are padded to their longest row."""
    starts = np.arange(0, len(lengths), rows)
    longest = np.maximum.reduceat(lengths, starts)
    places = int((longest * np.minimum(rows, len(lengths) - starts)).sum())
    return 1 - int(lengths.sum()) / places


def read_epoch(store: Store, manifest: Manifest) -> float:
    """Seconds of an epoch of packed sequences."""
    budget = DEFAULT_CACHE_BYTES
    plan = DataPlan.for_run(manifest.group_rows, BATCH, 1, 8, manifest.max_decoded_group_bytes(), budget)
    begin = time.perf_counter()
    with (
        closing(open_reader("arrow", store, manifest)) as reader,
        StepLoader(plan, reader, manifest.columns).steps(0, 0, 0, 1) as stream,
    ):
        rows = sum(len(step) for step in stream)
    assert rows == manifest.rows
    return time.perf_counter() - begin


def cut_epoch(path: Path, length: int) -> float:
    """Seconds of an epoch whose documents are joined and cut anywhere."""
    begin = time.perf_counter()
    for joined in _iter_joined(path):
        rows = len(joined) // length
        tokens = joined[: rows * length].reshape(rows, length)
        ids = np.ones_like(tokens)
        for first in range(0, rows, BATCH):
            part = slice(first, first + BATCH)
            find_positions(ids[part])
            make_labels(tokens[part], ids[part])
    return time.perf_counter() - begin


def _iter_joined(path: Path) -> Iterator[np.ndarray]:
    file = pq.ParquetFile(path)
    for group in np.random.default_rng(1).permutation(file.num_row_groups).tolist():
        values = file.read_row_group(group, columns=["input_ids"], use_threads=False)["input_ids"]
        yield values.combine_chunks().values.to_numpy()


def measure(documents: int = 240_000, length: int = 2048, rounds: int = 3) -> list[Row]:
    """documents: of each file."""
    rows = []
    with tempfile.TemporaryDirectory() as parent:
        for spread in SPREADS:
            folder = Path(parent) / str(spread)
            folder.mkdir()
            path = folder / "documents.parquet"
            lengths = write_documents(path, documents, length, spread)
            store = Store.open(str(folder))
            source = describe_parquet(store, ["input_ids", "size"], transformed=True)
            packed = pack_rows(store, source, Packing(length=length, length_column="size"))
            padding = 1 - int(lengths.sum()) / (packed.rows * length)
            rows.append(Row(f"padding, spread {spread}", padding, pad_batches(lengths, BATCH), "of places"))
        for what, column in (("read", None), ("in a column", "size")):
            begin = time.perf_counter()
            pack_rows(store, source, Packing(length=length, length_column=column))
            seconds = time.perf_counter() - begin
            rows.append(Row(f"plan, lengths {what}", documents / seconds / 1e6, None, "M documents/s"))
        both = [(read_epoch(store, packed), cut_epoch(path, length)) for _ in range(rounds)]
        ours, peer = (int(lengths.sum()) / min(times) / 1e6 for times in zip(*both, strict=True))
        rows.append(Row("tokens", ours, peer, "M/s"))
    return rows
