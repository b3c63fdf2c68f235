"""Packed documents as row groups of sequences: the manifest of a packed data set, and its reader.

A row group of the packed data set is a window of `data.packing`. Plan, loader and cache do not notice. Any thread may
fetch; one packs at a time.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain, pairwise
from typing import Any

import numpy as np

from spark_elastic.data.manifest import Column, Manifest, PackedSource, RowGroup, RowGroups
from spark_elastic.data.packing import (
    DOCUMENT_IDS,
    LABELS,
    POSITION_IDS,
    Packing,
    check_lengths,
    count_packed,
    find_positions,
    make_labels,
    pack_groups,
    pack_window,
)
from spark_elastic.data.plan import Int64s
from spark_elastic.data.ragged import Ragged
from spark_elastic.data.reading.decoding import ColumnArrays, Reader
from spark_elastic.data.reading.group_reader import GroupReader
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


def pack_manifest(
    manifest: Manifest, packing: Packing, columns: tuple[Column, ...], lengths: Sequence[Int64s]
) -> Manifest:
    """The packed data set. columns: `describe_packed`. lengths: `read_lengths`. Raises InvalidInput as
    `check_lengths`."""
    every = np.concatenate(lengths)
    overlong = check_lengths(every, packing)
    if overlong:
        cut = {"split": "are split", "truncate": "lose their ends"}[packing.overlong]
        log.warning(
            "%d of %d documents have more than %d tokens and %s", overlong, len(every), packing.length, cut
        )
    cuts, sequences = pack_groups(lengths, packing)
    groups, fields = manifest.row_groups, asdict(packing)
    digest = hashlib.sha256(json.dumps([manifest.hash, fields], sort_keys=True).encode()).hexdigest()[:32]
    return Manifest(
        columns,
        manifest.files,
        RowGroups.of(
            RowGroup(int(groups.file[first]), window, sequences[window], int(groups.bytes[first:past].sum()))
            for window, (first, past) in enumerate(pairwise(cuts))
        ),
        f"{manifest.fingerprint}-{digest}",
        digest,
        manifest.file_columns,
        manifest.file_states,
        PackedSource(manifest, fields, cuts, len(every), overlong, count_packed(every, packing)),
    )


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


class PackedReader(GroupReader):
    """Reads row groups of a packed data set."""

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        columns: Sequence[str] | None,
        cache_bytes: int,
        open_documents: Callable[[Manifest, Sequence[str]], Reader],
    ) -> None:
        """open_documents: opens a reader of the data set that was packed, over these columns."""
        super().__init__(store, manifest, columns, cache_bytes)
        assert manifest.packed is not None
        self._source, self._packing = manifest.packed, Packing(**manifest.packed.packing)
        own = [column.name for column in self.columns]
        names = [name for name in self._packing.sources if name == self._packing.column or name in own]
        self._documents = open_documents(self._source.manifest, names)

    def announce(self, groups: Iterable[int]) -> None:
        """See `Reader.announce`."""
        self._documents.announce(
            chain.from_iterable(self._list_groups(g) for g in groups if g not in self._groups)
        )

    def release(self, group: int | None = None) -> None:
        """See `Reader.release`."""
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
        """The documents of these row groups, by column."""
        parts: dict[str, list[Ragged]] = {}
        for group in groups:
            for name, rows in self._documents.fetch(group).items():
                parts.setdefault(name, []).append(Ragged.of(rows))
            self._documents.release(group)
        return {name: Ragged.concatenate(each) for name, each in parts.items()}
