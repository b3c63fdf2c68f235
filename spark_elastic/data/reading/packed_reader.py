"""Packed documents as row groups of sequences: the manifest of a packed data set, and its reader.

A row group of the packed data set is a window of `data.packing`. Plan, loader and cache do not notice. Any thread may
fetch; one packs at a time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from spark_elastic.data.manifest import Column, Manifest, PackedSource, RowGroups
from spark_elastic.data.packing import (
    DOCUMENT_IDS,
    LABELS,
    POSITION_IDS,
    Packing,
    check_lengths,
    find_positions,
    make_labels,
    pack_groups,
    pack_window,
)
from spark_elastic.data.plan import Int64s
from spark_elastic.data.ragged import Ragged
from spark_elastic.data.reading.decoding import ColumnArrays, Reader
from spark_elastic.data.reading.row_group_cache import RowGroupCache
from spark_elastic.errors import InvalidInput, StoreError


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
    """The packed data set. columns: `describe_packed`. lengths: `read_lengths`. Raises InvalidInput if a document is
    longer than allowed."""
    check_lengths(np.concatenate(lengths), packing)
    cuts, sequences = pack_groups(lengths, packing)
    groups, firsts = manifest.row_groups, np.array(cuts[:-1])
    whole = np.zeros(len(firsts), np.int64)
    fields = asdict(packing)
    digest = hashlib.sha256(json.dumps([manifest.hash, fields], sort_keys=True).encode()).hexdigest()[:32]
    return Manifest(
        columns,
        manifest.files,
        RowGroups(
            file=groups.file[firsts],
            index=np.arange(len(firsts)),
            rows=np.array(sequences, np.int64),
            bytes=np.add.reduceat(groups.bytes, firsts),
            first_row=whole,
            parent_rows=whole,
            part_rows=whole,
        ),
        f"{manifest.fingerprint}-{digest}",
        digest,
        manifest.file_columns,
        manifest.file_states,
        PackedSource(manifest, fields, cuts),
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


class PackedReader:
    """Reads row groups of a packed data set."""

    def __init__(
        self,
        reader: Reader,
        source: PackedSource,
        columns: Sequence[Column],
        rows: Sequence[int],
        cache_bytes: int,
    ) -> None:
        """
        Args:
            reader: of the documents, which this one closes; whatever it caches is read once.
            columns: of the sequences, that are needed.
            rows: sequences of each row group.
        """
        self._reader, self._cuts, self._rows = reader, source.cuts, rows
        self._packing = Packing(**source.packing)
        self.columns = tuple(columns)
        self._groups = RowGroupCache(cache_bytes)

    def fetch(self, group: int) -> ColumnArrays:
        """See `Reader.fetch`."""
        return self._groups.fetch(group, self._pack)

    def prefetch(self, group: int) -> bool:
        """See `Reader.prefetch`."""
        return self._groups.prefetch(group, self._pack)

    def announce(self, groups: Iterable[int]) -> None:
        """See `Reader.announce`."""
        wanted = (range(*self._cuts[group : group + 2]) for group in groups if group not in self._groups)
        self._reader.announce(each for part in wanted for each in part)

    def release(self, group: int | None = None) -> None:
        """See `Reader.release`."""
        self._groups.release(group)
        if group is None:
            self._reader.release()

    def close(self) -> None:
        """See `Reader.close`."""
        self._groups.close(self._reader.close)

    def _pack(self, group: int) -> ColumnArrays:
        documents = self._read(range(*self._cuts[group : group + 2]))
        packing, tokens = self._packing, documents[self._packing.column]
        for name, rows in documents.items():
            if not np.array_equal(rows.offsets, tokens.offsets):
                raise StoreError(
                    f"The rows of column {name!r} are not as long as those of {packing.column!r}, with which they are "
                    "packed: leave the column out of along, or mend them."
                )
        window = pack_window(tokens.lengths, packing)
        if window.count != self._rows[group]:
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
        for array in found.values():
            array.flags.writeable = False
        return {column.name: found[column.name] for column in self.columns}

    def _read(self, groups: Iterable[int]) -> Mapping[str, Ragged]:
        """The documents of these row groups, by column."""
        parts: dict[str, list[Ragged]] = {}
        for group in groups:
            for name, rows in self._reader.fetch(group).items():
                parts.setdefault(name, []).append(Ragged.of(rows))
            self._reader.release(group)
        return {name: Ragged.concatenate(each) for name, each in parts.items()}
