"""Which rows of its data files an Iceberg snapshot has deleted: by position, by deletion vector, and by equality.

Owns which delete file counts for which data file. Reads delete files, and of data files the columns by which rows are
deleted. Knows nothing of Spark. Runs in the caller's thread and in a few that it ends before it returns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from spark_elastic.data.reading.decoding import open_parquet
from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidInput
from spark_elastic.tables.footers import NO_VALUE, THREADS, DataFile, Int64s
from spark_elastic.tables.predicate import Mask

_FIELD_ID = b"PARQUET:field_id"
T = TypeVar("T")
Partition = tuple[int, tuple[Any, ...]] | None
"""The number of a partition spec and the values of a partition; None: the whole table."""


@dataclass(frozen=True)
class _EqualityDelete:
    """What one equality delete file deletes."""

    sequence: int  # data files with lower sequence numbers lose their rows
    ids: tuple[int, ...]  # the ids of the fields that are compared
    values: pa.Table  # their values, in columns that have the ids for names


class DeletedRows:
    """The rows that the delete files of one snapshot name."""

    def __init__(
        self, specs: Mapping[int, Any], entries: Sequence[Any], storage_options: Mapping[str, Any]
    ) -> None:
        """
        Args:
            specs: the table's partition specs by their numbers.
            entries: those of the snapshot's manifests that are delete files.

        Raises:
            InvalidInput: a delete file has another format than Parquet or Puffin, or compares fields of structs.
        """
        self._specs, self._options = specs, storage_options
        # Path of a data file -> for each delete file that names it, the sequence number and the rows.
        self._positions: dict[str, list[tuple[int, Int64s]]] = defaultdict(list)
        self._equalities: dict[Partition, list[_EqualityDelete]] = defaultdict(list)
        # A Puffin file is an entry for each of the data files that it has a vector of.
        by_position = list(
            {
                each.data_file.file_path: each
                for each in entries
                if each.data_file.content.name == "POSITION_DELETES"
            }.values()
        )
        by_equality = [each for each in entries if each.data_file.content.name == "EQUALITY_DELETES"]
        for entry, found in zip(by_position, _map_in_threads(self._read_positions, by_position), strict=True):
            for path, rows in found:
                self._positions[path].append((entry.sequence_number or 0, rows))
        for entry, equality in zip(
            by_equality, _map_in_threads(self._read_equality, by_equality), strict=True
        ):
            self._equalities[self._find_partition(entry.data_file)].append(equality)

    def find(self, store: Store, entries: Sequence[Any], files: Sequence[DataFile]) -> list[Mask | None]:
        """Of each data file, which of its rows are deleted; None: no delete file counts for it.

        entries: of the manifests, those of `files`, which are in the store.
        """
        if not self._positions and not self._equalities:
            return [None] * len(files)
        return _map_in_threads(
            lambda pair: self._find_in_file(store, *pair), list(zip(entries, files, strict=True))
        )

    def _find_in_file(self, store: Store, entry: Any, file: DataFile) -> Mask | None:
        sequence = entry.sequence_number or 0
        named = self._positions.get(entry.data_file.file_path, ())
        positions = [rows for number, rows in named if number >= sequence]
        equalities: dict[tuple[int, ...], list[pa.Table]] = defaultdict(list)
        for partition in {None, self._find_partition(entry.data_file)}:
            for each in self._equalities.get(partition, ()):
                if each.sequence > sequence:
                    equalities[each.ids].append(each.values)
        if not positions and not equalities:
            return None
        deleted = np.zeros(entry.data_file.record_count, np.bool_)
        for rows in positions:
            deleted[rows] = True
        for ids, tables in equalities.items():
            try:
                values = pa.concat_tables(tables, promote_options="permissive")
                deleted |= _match(_read_fields(store, file, ids, values.schema), values)
            except pa.ArrowException as error:
                raise InvalidInput(
                    f"{file.info.name} in {store.url} has rows that are deleted by the values of columns, which cannot "
                    f"be compared ({error}): rewrite the table's data files, or fit on a DataFrame."
                ) from error
        return deleted

    def _find_partition(self, file: Any) -> Partition:
        fields = self._specs[file.spec_id].fields
        if all(str(field.transform) == "void" for field in fields):
            return None
        return file.spec_id, tuple(file.partition[number] for number in range(len(fields)))

    def _read_positions(self, entry: Any) -> list[tuple[str, Int64s]]:
        """The paths of data files, and their rows that are deleted."""
        with self._open(entry.data_file, "PARQUET", "PUFFIN") as source:
            if entry.data_file.file_format.name == "PUFFIN":
                return list(_read_puffin(source.read()))
            rows = pq.read_table(source, columns=["file_path", "pos"])
        found = rows.group_by("file_path").aggregate([("pos", "list")])
        return [
            (path.as_py(), positions.values.to_numpy())
            for path, positions in zip(found["file_path"], found["pos_list"], strict=True)
        ]

    def _read_equality(self, entry: Any) -> _EqualityDelete:
        file = entry.data_file
        ids = tuple(sorted(file.equality_ids))
        with self._open(file, "PARQUET") as source:
            parquet = open_parquet(source)
            names = _find_names(parquet)
            if not names.keys() >= set(ids):
                raise InvalidInput(
                    f"{file.file_path} deletes rows by fields of structs, which cannot be compared: rewrite the "
                    "table's data files, or fit on a DataFrame."
                )
            values = parquet.read(columns=[names[number] for number in ids])
        columns = [values[names[number]] for number in ids]
        return _EqualityDelete(entry.sequence_number or 0, ids, pa.table(columns, list(map(str, ids))))

    def _open(self, file: Any, *formats: str) -> Any:
        if file.file_format.name not in formats:
            raise InvalidInput(
                f"The delete file {file.file_path} has the format {file.file_format.name}, and only Parquet and Puffin "
                "are read: rewrite the table's data files, or fit on a DataFrame."
            )
        folder, _, name = file.file_path.rpartition("/")
        return Store.open(folder, **self._options).open_read(name)


def _read_puffin(content: bytes) -> Iterator[tuple[str, Int64s]]:
    """The deletion vectors of data files."""
    from pyiceberg.table.puffin import PuffinFile

    file = PuffinFile(content)
    try:
        from pyiceberg.table.deletion_vector import deletion_vectors_from_puffin_file
    except ImportError:  # before 0.12
        vectors = file.to_vector()
    else:
        vectors = {
            each.referenced_data_file: each.to_vector() for each in deletion_vectors_from_puffin_file(file)
        }
    for path, positions in vectors.items():
        yield path, positions.to_numpy()


def _find_names(parquet: pq.ParquetFile) -> dict[int, str]:
    """Field id -> column, of the columns that have ids."""
    fields = ((each.name, (each.metadata or {}).get(_FIELD_ID)) for each in parquet.schema_arrow)
    return {int(number): name for name, number in fields if number is not None}


def _read_fields(store: Store, file: DataFile, ids: Iterable[int], schema: pa.Schema) -> pa.Table:
    """Columns of a data file, which have the ids of their fields for names. schema: what they are compared with."""
    known = {number: name for name, number in file.field_ids.items()}
    with store.open_read(file.info.name) as source:
        parquet = open_parquet(source)
        in_file = _find_names(parquet)
        if not in_file:  # of a table that came from Hive
            mapped = file.find_mapped_names(parquet.schema_arrow.names)
            in_file = {file.field_ids[column]: name for column, name in mapped.items()}
        names = {number: in_file[number] for number in ids if number in in_file}
        found = parquet.read(columns=list(names.values()))
    columns = {}
    for number in ids:
        if number in names:
            columns[str(number)] = found[names[number]]
        else:  # it came after the file, or is a partition's
            text = file.constants.get(known.get(number, ""), NO_VALUE)
            value = pa.scalar(None if text == NO_VALUE else text, pa.string())
            columns[str(number)] = pa.repeat(
                value.cast(schema.field(str(number)).type), parquet.metadata.num_rows
            )
    return pa.table(columns)


def _match(rows: pa.Table, values: pa.Table) -> Mask:
    """Of each row, whether it equals one of the values in all columns. Null equals null."""
    joined = pa.concat_tables([values, rows], promote_options="permissive")
    codes = np.zeros(len(joined), np.int64)  # of two rows equal if these are
    for column in joined.columns:
        own = column.combine_chunks().dictionary_encode("encode").indices.to_numpy()
        codes = np.unique(codes * len(joined) + own, return_inverse=True)[1]
    found: Mask = np.isin(codes[len(values) :], codes[: len(values)])
    return found


def _map_in_threads(function: Callable[[Any], T], arguments: Sequence[Any]) -> list[T]:
    with ThreadPoolExecutor(THREADS, "deletes") as threads:
        return list(threads.map(function, arguments))
