"""The readers by name, beside Arrow's that of petastorm and that of packed documents, and samples of rows.

A row group of a packed data set is a window of documents (`Packing`): plan, loader and cache do not notice. Petastorm
0.12 or 0.13 is for jobs that must read as they did before. It takes no list of row groups, but one shard out of n of a
file with n row groups is exactly one of them: each fetch opens a reader. Any thread may fetch; one reads at a time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from itertools import chain, pairwise
from typing import Any

import numpy as np

from spark_elastic.data.manifest import (
    Column,
    Manifest,
    PackedSource,
    RowGroup,
    RowGroups,
    compute_decoded_bytes,
)
from spark_elastic.data.packing import (
    DOCUMENT_IDS,
    LABELS,
    POSITION_IDS,
    Packing,
    Ragged,
    check_lengths,
    find_positions,
    make_labels,
    pack_groups,
    pack_window,
)
from spark_elastic.data.plan import Int64s
from spark_elastic.data.reading.decoding import ColumnArrays, read_footer
from spark_elastic.data.reading.group_reader import ArrowReader, Reader
from spark_elastic.data.reading.row_group_cache import DEFAULT_CACHE_BYTES
from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidInput, StoreError

log = logging.getLogger("spark_elastic")


def read_lengths(reader: Reader, manifest: Manifest, packing: Packing) -> list[Int64s]:
    """The tokens of each document, by row group. reader: of the column that has or tells them."""
    found = []
    for group in range(len(manifest.row_groups)):
        (values,) = reader.fetch(group).values()
        given = packing.length_column is not None
        found.append(values.astype(np.int64) if given else np.array([len(row) for row in values], np.int64))
        reader.release(group)
    return found


def describe_packed(manifest: Manifest, packing: Packing) -> tuple[Column, ...]:
    """The columns of sequences. Raises InvalidInput for a column that has no arrays of numbers."""
    found = {}
    for name in packing.sources:
        dtype, dimensions = manifest.column(name).element
        if dimensions != 1 or np.dtype(dtype).kind not in "biuf":
            raise InvalidInput(
                f"The column {name!r} has no arrays of numbers: pack the one that has the tokens of documents."
            )
        found[name] = Column(name, dtype, (packing.length,))
    for name, dtype in ((DOCUMENT_IDS, "int32"), (POSITION_IDS, "int32"), (LABELS, "int64")):
        found[name] = Column(name, dtype, (packing.length,))
    return tuple(found.values())


class PackedReader(Reader):
    """Reads row groups of a packed data set, by a reader of that name of its documents."""

    def __init__(
        self, name: str, store: Store, manifest: Manifest, columns: Sequence[str] | None, cache_bytes: int
    ) -> None:
        super().__init__(store, manifest, columns, cache_bytes)
        assert manifest.packed is not None
        self._source, self._packing = manifest.packed, Packing(**manifest.packed.packing)
        own = [column.name for column in self.columns]
        needed = [each for each in self._packing.sources if each == self._packing.column or each in own]
        self._documents = open_reader(name, store, self._source.manifest, needed, cache_bytes=0)

    def announce(self, groups: Iterable[int]) -> None:
        wanted = (self._list_groups(group) for group in groups if group not in self._groups)
        self._documents.announce(chain.from_iterable(wanted))

    def release(self, group: int | None = None) -> None:
        super().release(group)
        if group is None:
            self._documents.release()

    def _close_resources(self) -> None:
        self._documents.close()

    def _list_groups(self, group: int) -> range:
        """The row groups of the documents. Some of the windows may have been left out."""
        window = int(self._manifest.row_groups.index[group])
        return range(*self._source.cuts[window : window + 2])

    def _decode(self, group: int) -> ColumnArrays:
        entry, documents = self._manifest.row_groups[group], self._read(self._list_groups(group))
        packing, tokens = self._packing, documents[self._packing.column]
        for name, rows in documents.items():
            if not np.array_equal(rows.offsets, tokens.offsets):
                raise StoreError(
                    f"The rows of column {name!r} are not as long as those of {packing.column!r}, with which they are "
                    "packed: leave the column out of along, or mend them."
                )
        check_lengths(tokens.lengths, packing)  # a column of lengths may be wrong, and tokens would be lost
        window = pack_window(tokens.lengths, packing)
        if window.count != entry.stored_rows:
            raise StoreError(
                f"The documents in column {packing.column!r} have other lengths than {packing.length_column!r} said "
                "when they were packed: mend that column, or leave length_column out."
            )
        found: dict[str, Any] = {
            name: window.fill(rows, packing.length, packing.sources[name]) for name, rows in documents.items()
        }
        ids = found[DOCUMENT_IDS] = window.number_documents(packing.length)
        wanted = {column.name for column in self.columns}
        if POSITION_IDS in wanted:
            found[POSITION_IDS] = find_positions(ids)
        if LABELS in wanted:
            found[LABELS] = make_labels(found.get(LABELS, found[packing.column]), ids, packing.predict_first)
        kept = slice(None) if entry.keep_mask is None else entry.keep_mask
        columns = {column.name: found[column.name][kept] for column in self.columns}
        for array in columns.values():
            array.flags.writeable = False
        return columns

    def _read(self, groups: Iterable[int]) -> Mapping[str, Ragged]:
        parts: dict[str, list[Ragged]] = {}
        for group in groups:
            for name, rows in self._documents.fetch(group).items():
                parts.setdefault(name, []).append(Ragged.of(rows))
            self._documents.release(group)
        return {name: Ragged.concatenate(each) for name, each in parts.items()}


class PetastormReader(Reader):
    """Opens a petastorm reader for each row group; reads no nested arrays and no structs."""

    def __init__(self, store: Store, manifest: Manifest, *given: Any, **options: Any) -> None:
        from petastorm import make_batch_reader

        super().__init__(store, manifest, *given, **options)
        self._make_reader = make_batch_reader
        for column in self.columns:
            if column.codec:
                raise InvalidInput(
                    f"petastorm's reader does not decode column {column.name!r}: use the reader 'arrow', which does."
                )
            if len(column.shape) > 1 or column.ragged:
                raise InvalidInput(
                    "petastorm reads no nested arrays, nor arrays of different lengths, such as column "
                    f"{column.name!r}: use the reader 'arrow'."
                )
        self._sizes: dict[int, int] = {}
        self._timestamps = [column.name for column in self.columns if column.dtype == "datetime64[us]"]
        self._own = [column for column in self.columns if column.name not in self._timestamps]
        self._arrow = ArrowReader(store, manifest, self._timestamps, cache_bytes=0)

    def _close_resources(self) -> None:
        self._sizes.clear()
        self._arrow.close()

    def _decode(self, group: int) -> ColumnArrays:
        entry = self._manifest.row_groups[group]
        name = self._manifest.files[entry.file]
        try:
            found = self._read(entry.file, entry.index, name) if self._own else {}
            constants = self.columns_of(entry.file).constants
            rows = entry.parent_rows or entry.rows
            every = {column.name: _to_array(found, column, rows, constants) for column in self._own}
            timestamps = self._arrow.fetch(group) if self._timestamps else {}
            self._check_state(entry.file)
        except (StoreError, InvalidInput):
            raise
        except Exception as error:  # of petastorm, pyarrow or pandas
            reason = f"{type(error).__name__}: {error}"
            raise StoreError(
                f"petastorm cannot read row group {entry.index} of {name!r} in the store {self._store.url} ({reason})."
            ) from error
        own = {name: rows[entry.first_row : entry.first_row + entry.rows] for name, rows in every.items()}
        return {**own, **timestamps}

    def _read(self, file: int, index: int, name: str) -> dict[str, Any]:
        if file not in self._sizes:
            self._sizes[file] = read_footer(self._store, name).num_row_groups
        constants = self.columns_of(file).constants
        wanted = [f"^{re.escape(column.name)}$" for column in self._own if column.name not in constants]
        options = self._store.filesystem.storage_options
        with self._make_reader(
            self._store.join(name),
            schema_fields=wanted,
            reader_pool_type="dummy",
            shuffle_row_groups=False,
            num_epochs=1,
            cur_shard=index,
            shard_count=self._sizes[file],
            storage_options={key: value for key, value in options.items() if key != "auto_mkdir"},
        ) as reader:
            batches = [batch._asdict() for batch in reader]
        return {key: np.concatenate([batch[key] for batch in batches]) for key in batches[0]}


def _to_array(found: dict[str, Any], column: Column, rows: int, constants: Mapping[str, str]) -> Any:
    if column.name not in found and column.name not in constants:
        raise InvalidInput(
            f"petastorm leaves out column {column.name!r}, as it does structs (Spark's vectors): use reader 'arrow'."
        )
    values = found[column.name] if column.name in found else np.full(rows, constants[column.name])
    array = np.asarray(values)
    if column.shape and isinstance(array[0], bytes):  # rows that are stored as their bytes
        array = np.frombuffer(b"".join(array), column.dtype).reshape(-1, *column.shape)
    array = array.astype(column.dtype, copy=False)
    if array.shape != (rows, *column.shape):
        raise ValueError(f"column {column.name!r} has shape {array.shape}, not {(rows, *column.shape)}")
    array.flags.writeable = False
    return array


READERS = ("arrow", "petastorm")


def check_reader(name: str) -> None:
    """Raise InvalidInput unless there is a reader of that name that can be imported here."""
    if name not in READERS:
        raise InvalidInput(f"There is no reader {name!r}: choose one of {', '.join(READERS)}.")
    if name == "petastorm":
        try:
            from petastorm import make_batch_reader  # noqa: F401 - an optional package
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
    """The reader of that name. columns: None: all. cache_bytes: for decoded row groups. Raises as `check_reader`."""
    check_reader(name)
    if manifest.packed is not None:
        return PackedReader(name, store, manifest, columns, cache_bytes)
    if name == "petastorm":
        return PetastormReader(store, manifest, columns, cache_bytes)
    return ArrowReader(store, manifest, columns, cache_bytes)


def pack_rows(store: Store, manifest: Manifest, packing: Packing) -> Manifest:
    """The data set of sequences that documents make, for plans, loaders and readers as any; reads their lengths."""
    columns = describe_packed(manifest, packing)
    names = [packing.length_column or packing.column]
    with closing(open_reader("arrow", store, manifest, names, cache_bytes=0)) as documents:
        lengths = read_lengths(documents, manifest, packing)
    every = np.concatenate(lengths)
    overlong = check_lengths(every, packing)
    if overlong:
        cut = {"split": "are split", "truncate": "lose their ends"}[packing.overlong]
        told = overlong, len(every), packing.length, cut
        log.warning("%d of %d documents have more than %d tokens and %s", *told)
    cuts, sequences = pack_groups(lengths, packing)
    groups, fields = manifest.row_groups, asdict(packing)
    digest = hashlib.sha256(json.dumps([manifest.hash, fields], sort_keys=True).encode()).hexdigest()[:32]
    windows = [
        RowGroup(int(groups.file[first]), window, sequences[window], int(groups.bytes[first:past].sum()))
        for window, (first, past) in enumerate(pairwise(cuts))
    ]
    packed, groups = PackedSource(manifest, fields, cuts), RowGroups.of(windows)
    fingerprint = f"{manifest.fingerprint}-{digest}"
    return replace(
        manifest, columns=columns, row_groups=groups, fingerprint=fingerprint, content=digest, packed=packed
    )


def find_sample_group(manifest: Manifest, columns: Sequence[str]) -> tuple[int, int]:
    """The number of the row group whose first row costs least, and the bytes in memory of what is read for it."""
    groups = manifest.row_groups
    decoded = compute_decoded_bytes(map(manifest.column, columns), groups.rows, groups.bytes)
    whole = decoded * np.maximum(groups.parent_rows, groups.rows) // groups.rows  # parts are cut out of it
    number = int(whole.argmin())
    return number, int(whole[number])


def read_sample_rows(
    store: Store, manifest: Manifest, columns: Sequence[str], label: str | None = None
) -> ColumnArrays:
    """Four rows of a small row group, to try a function or a model on: its first and its last, then two between; with
    as many values of the label as there are, its lowest and its highest first."""
    with closing(open_reader("arrow", store, manifest, columns)) as reader:
        found = reader.fetch(find_sample_group(manifest, columns)[0])
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
