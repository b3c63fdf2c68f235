"""The readers by name. Imports petastorm, an optional package, only for its reader."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from spark_elastic.data.manifest import Manifest, compute_decoded_bytes
from spark_elastic.data.packing import Packing
from spark_elastic.data.reading.decoding import ColumnArrays, Reader
from spark_elastic.data.reading.group_reader import ArrowReader
from spark_elastic.data.reading.packed_reader import (
    PackedReader,
    describe_packed,
    pack_manifest,
    read_lengths,
)
from spark_elastic.data.reading.row_group_cache import DEFAULT_CACHE_BYTES
from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidInput

READERS = ("arrow", "petastorm")


def check_reader(name: str) -> None:
    """Raise InvalidInput unless there is a reader of that name that can be imported here."""
    if name not in READERS:
        raise InvalidInput(f"There is no reader {name!r}: choose one of {', '.join(READERS)}.")
    if name == "petastorm":
        try:
            import spark_elastic.data.reading.petastorm_reader  # noqa: F401 - an optional package
        except Exception as error:  # with unsupported versions beside it, petastorm fails in many ways
            raise InvalidInput(
                f"petastorm cannot be imported ({type(error).__name__}: {error}): it needs pyarrow 14 or older and "
                "numpy 1 (pip install 'spark_elastic[petastorm]'); the reader 'arrow' has no such need."
            ) from error


def open_reader(
    name: str,
    store: Store,
    manifest: Manifest,
    columns: Sequence[str] | None = None,
    cache_bytes: int = DEFAULT_CACHE_BYTES,
) -> Reader:
    """The reader of that name over `columns` (all, if none are named); see `check_reader` for what it raises.

    cache_bytes: for decoded row groups; a data set that fits is read once.
    """
    check_reader(name)
    if manifest.packed is not None:
        return PackedReader(
            store, manifest, columns, cache_bytes, partial(open_reader, name, store, cache_bytes=0)
        )
    if name == "petastorm":
        from spark_elastic.data.reading.petastorm_reader import PetastormReader

        return PetastormReader(store, manifest, columns, cache_bytes)
    return ArrowReader(store, manifest, columns, cache_bytes)


def pack_rows(store: Store, manifest: Manifest, packing: Packing, reader: str = "arrow") -> Manifest:
    """The data set of sequences that the documents of a data set make; reads the documents' lengths.

    Its rows, row groups and columns are those of sequences, so that plans, loaders and `open_reader` take it as any.

    Raises:
        InvalidInput: a column is missing or has no arrays, or a document is longer than allowed.
        StoreError: the documents cannot be read.
    """
    columns = describe_packed(manifest, packing)
    names = [packing.length_column or packing.column]
    with closing(open_reader(reader, store, manifest, names, cache_bytes=0)) as documents:
        return pack_manifest(manifest, packing, columns, read_lengths(documents, manifest, packing))


class SampleGroup(NamedTuple):
    """The row group whose first row costs least."""

    number: int  # in the manifest
    bytes: int  # in memory, of what has to be read for it


def find_sample_group(manifest: Manifest, columns: Sequence[str]) -> SampleGroup:
    """The row group from which a sample is taken."""
    groups = manifest.row_groups
    decoded = compute_decoded_bytes(map(manifest.column, columns), groups.rows, groups.bytes)
    whole = decoded * np.maximum(groups.parent_rows, groups.rows) // groups.rows  # parts are cut out of it
    number = int(whole.argmin())
    return SampleGroup(number, int(whole[number]))


def read_sample_rows(
    store: Store, manifest: Manifest, columns: Sequence[str], label: str | None = None
) -> ColumnArrays:
    """Four rows of a small row group, to try a function or a model on: its first and its last row, then two between
    them; with as many values of the label as there are,
    its lowest and its highest first."""
    with closing(open_reader("arrow", store, manifest, columns)) as reader:
        found = reader.fetch(find_sample_group(manifest, columns).number)
    last = len(found[columns[0]]) - 1
    rows = [0, last, last // 3, last * 2 // 3]
    if label is not None and (values := found[label]).ndim == 1 and values.dtype != object:
        firsts = np.unique(values, return_index=True)[1]
        chosen = dict.fromkeys(np.linspace(0, len(firsts) - 1, 4).astype(int)[[0, 3, 1, 2]])
        rows = [*firsts[[*chosen]], *rows][:4]
    return {name: found[name][rows] for name in columns}


def read_sample_row(store: Store, manifest: Manifest, columns: Sequence[str]) -> list[Any]:
    """The first row of a small row group, for a function of rows to be tried on: its value in each column."""
    return [values[0] for values in read_sample_rows(store, manifest, columns).values()]
