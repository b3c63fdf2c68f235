"""Reads row groups by petastorm 0.12 or 0.13, for jobs that must read as they did before; it is not fast.

Petastorm takes no list of row groups, but one shard out of n of a file with n row groups is exactly one of them. Each
fetch therefore opens a petastorm reader. Arrow reads timestamps, since petastorm makes nanoseconds of them, which
overflow outside of the years 1677 to 2262. Any thread may fetch; one reads at a time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from petastorm import make_batch_reader

from spark_elastic.data.manifest import Column, Manifest
from spark_elastic.data.reading.decoding import ColumnArrays, read_footer
from spark_elastic.data.reading.group_reader import ArrowReader, GroupReader
from spark_elastic.data.reading.row_group_cache import DEFAULT_CACHE_BYTES
from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidInput, StoreError


class PetastormReader(GroupReader):
    """Opens a petastorm reader for each row group; reads no nested arrays and no structs."""

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        columns: Sequence[str] | None = None,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
    ) -> None:
        super().__init__(store, manifest, columns, cache_bytes)
        for column in self.columns:
            if column.codec:
                raise InvalidInput(
                    f"petastorm's batch reader does not decode column {column.name!r}: use the reader 'arrow', which "
                    "does."
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
        with make_batch_reader(
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
            f"petastorm leaves out column {column.name!r}, as it does structs such as Spark's vectors: use the reader "
            "'arrow', or a column of arrays."
        )
    values = found[column.name] if column.name in found else np.full(rows, constants[column.name])
    array = np.asarray(values).astype(column.dtype, copy=False)
    if array.shape != (rows, *column.shape):
        raise ValueError(f"column {column.name!r} has shape {array.shape}, not {(rows, *column.shape)}")
    array.flags.writeable = False
    return array
