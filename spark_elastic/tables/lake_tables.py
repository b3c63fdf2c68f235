"""Tables of Delta Lake and Iceberg as the data files of one snapshot, with what only the table knows of them.

A table's own log is read by the packages `deltalake` and `pyiceberg`. Of Iceberg's delete files this module knows which
count for which data file. Knows nothing of Spark. The caller's thread, and a few of its own.
"""

from __future__ import annotations

import operator
import posixpath
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import date, datetime, timedelta, timezone
from itertools import chain
from typing import Any, TypeVar
from urllib.parse import unquote, urlparse

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from spark_elastic.checks import require_package
from spark_elastic.data.object_store import join_filesystems
from spark_elastic.data.reading.decoding import is_list, open_parquet, to_plain_type
from spark_elastic.data.store import ObjectInfo, Store
from spark_elastic.errors import InvalidInput
from spark_elastic.tables.catalogs import CatalogTable, to_delta_options
from spark_elastic.tables.existing_parquet import Place, move_root, open_common
from spark_elastic.tables.footers import NO_VALUE, THREADS, DataFile, Int64s, find_field_names
from spark_elastic.tables.predicate import Mask

Version = int | str | datetime
"""A version of Delta or the id of a snapshot of Iceberg, or the time of which the state is wanted."""

# Types whose values Python writes as the constants of partitions are read.
_WRITTEN_ALIKE = [pa.bool_(), pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.string(), pa.date32()]
_PHYSICAL_NAME = "delta.columnMapping.physicalName"


@dataclass(frozen=True)
class TableSnapshot:
    """The files of one version of a table."""

    name: str  # how errors name it, such as "version 3 of the Delta table file:///tables/t"
    store: Store  # holds all files
    files: tuple[DataFile, ...]  # each marks the rows that the table has no more
    columns: tuple[str, ...]  # the names of its columns


def read_snapshot(table: Any, version: Version | None, storage_options: Mapping[str, Any]) -> TableSnapshot:
    """table: a path or url of a table, of an Iceberg table's metadata file, a `deltalake.DeltaTable`, a
    `pyiceberg.table.Table` or a table of a catalog. version: None: the newest one. storage_options: of fsspec, for the
    data files. Raises InvalidInput: no such table or version, or a table with features that cannot be read here."""
    version = _parse_version(version)
    if isinstance(table, CatalogTable):
        table, storage_options = table.open(storage_options)
    package = type(table).__module__.partition(".")[0]
    if package == "pyiceberg":
        return _read_iceberg(table, version, storage_options)
    if package == "deltalake":
        # deltalake quotes its uri: a folder "my tables" is "my%20tables" there.
        store = Store.open(unquote(table.table_uri), **storage_options)
        return _read_delta(table.table_uri, version, store, table._storage_options)
    store = Store.open(str(table), **storage_options)
    if store.root.endswith(".metadata.json"):
        return _read_iceberg(_open_iceberg(store.url), version, storage_options)
    if store.exists("_delta_log"):
        return _read_delta(str(table), version, store, to_delta_options(store.url, storage_options))
    metadata = [name for name in store.list("metadata") if name.endswith(".metadata.json")]
    if metadata:
        newest = max(metadata, key=lambda name: _number_metadata(store, name))
        return _read_iceberg(_open_iceberg(store.join(newest)), version, storage_options)
    raise InvalidInput(
        f"There is no table of Delta or Iceberg in {store.url}: it has neither _delta_log nor metadata. Files of plain "
        "Parquet are trained on by fit_on_parquet."
    )


def _parse_version(version: Any) -> int | datetime | None:
    if version is None or isinstance(version, datetime):
        return version
    try:
        if isinstance(version, str):
            return datetime.fromisoformat(version.replace("Z", "+00:00"))  # Python 3.10 knows no Z
        if not isinstance(version, bool):
            return operator.index(version)
    except (TypeError, ValueError):
        pass
    raise InvalidInput(
        f"version must be a version of Delta or the id of a snapshot of Iceberg, as a whole number, or a time in ISO "
        f"form; got {version!r}."
    )


def _find_types(schema: pa.Schema) -> dict[str, pa.DataType]:
    found = {field.name: to_plain_type(field.type) for field in schema}
    return {name: kind for name, kind in found.items() if is_list(kind) or not pa.types.is_nested(kind)}


def join_stores(snapshots: Sequence[TableSnapshot]) -> tuple[Store, list[tuple[DataFile, ...]]]:
    """One store that holds the files of all snapshots, and their files by their names in it."""
    filesystem = join_filesystems([each.store.filesystem for each in snapshots])
    if filesystem is None:
        raise InvalidInput("The tables lie in different file systems, and a fit reads from one.")
    common = posixpath.commonpath([each.store.root for each in snapshots])
    files = []
    for snapshot in snapshots:
        folder = snapshot.store.root[len(common) :].strip("/")
        names = [posixpath.join(folder, file.info.name) for file in snapshot.files]
        moved = zip(snapshot.files, names, strict=True)
        files.append(tuple(replace(file, info=replace(file.info, name=name)) for file, name in moved))
    return replace(move_root(snapshots[0].store, common), filesystem=filesystem), files


# ---- Delta


def _read_delta(uri: str, version: int | datetime | None, store: Store, delta_options: Any) -> TableSnapshot:
    """uri, delta_options: for deltalake. store: of the table's folder."""
    deltalake = require_package("deltalake", "a table of Delta", "deltalake")
    newest = None
    try:
        table = deltalake.DeltaTable(uri, storage_options=delta_options)
        newest = table.version()
        if version is not None:
            table.load_as_version(version)
        actions = pa.table(table.get_add_actions()).to_pylist()
        paths = {action["path"]: unquote(action["path"]) for action in actions}
        vectors = _read_deletion_vectors(table, set(paths.values()))
    except (deltalake.exceptions.DeltaError, ValueError, OSError, OverflowError) as error:
        which = "" if version is None else f" of version {version}"
        reason = str(error).splitlines()[0]
        if newest is not None and isinstance(version, int) and not 0 <= version <= newest:
            reason = f"its newest version is {newest}."
        raise InvalidInput(f"The Delta table {uri} cannot be read{which}: {reason}") from error
    if isinstance(version, datetime):
        _check_not_before(table.version(), version, store)
    schema = table.schema()
    # Of a table with column mapping.
    mapped = ((each.name, each.metadata.get(_PHYSICAL_NAME)) for each in schema.fields)
    stored_names = {name: str(stored) for name, stored in mapped if stored is not None}
    types = _find_types(pa.schema(schema))
    files = []
    for action in sorted(actions, key=lambda each: str(each["path"])):
        path = paths[action["path"]]
        if "://" in path or path.startswith("/"):
            raise InvalidInput(
                f"The Delta table {uri} has files of another table, such as {path}, as shallow clones have: make a "
                "deep clone, or fit on a DataFrame."
            )
        values = {name: _format_constant(value) for name, value in (action.get("partition") or {}).items()}
        names = {**dict(zip(values, values, strict=True)), **stored_names}
        constants = {column: values[own] for column, own in names.items() if own in values}
        info = ObjectInfo(path, action["size_bytes"], action["modification_time"] / 1000)
        files.append(DataFile(info, constants, stored_names, types=types, deleted=vectors.get(path)))
    number, columns = table.version(), tuple(each.name for each in schema.fields)
    name = f"version {number} of the Delta table {store.url}"
    return TableSnapshot(name, store, tuple(files), columns)


def _check_not_before(number: int, moment: datetime, store: Store) -> None:
    """Raises InvalidInput if the version is newer than a time: deltalake takes the oldest for any time before it."""
    logged = f"_delta_log/{number:020d}.json"
    written = store.describe(logged).modified if store.exists(logged) else None
    if written is not None and written > _to_utc(moment).timestamp():
        oldest = datetime.fromtimestamp(written, timezone.utc).isoformat(timespec="seconds")
        raise InvalidInput(
            f"The Delta table {store.url} had no version at {moment}: its oldest, {number}, is of {oldest}."
        )


def _to_utc(moment: datetime) -> datetime:
    return moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)


def _read_deletion_vectors(table: Any, paths: Collection[str]) -> dict[str, npt.NDArray[np.bool_]]:
    """Path of a file in its table -> which of its rows are deleted. paths: of all files of the table."""
    if "deletionVectors" not in (table.protocol().reader_features or ()):
        return {}
    found = pa.table(table.deletion_vectors())
    return {
        _find_path(unquote(url.as_py()), paths): ~np.asarray(kept.values.to_numpy(zero_copy_only=False))
        for url, kept in zip(found["filepath"], found["selection_vector"], strict=True)
    }


def _find_path(url: str, paths: Collection[str]) -> str:
    """The path in its table of a file. Its name alone may be that of a file of another partition, too."""
    folders = url.split("/")
    for first in range(len(folders)):
        path = "/".join(folders[first:])
        if path in paths:
            return path
    raise ValueError(f"it has a deletion vector for {url}, which is none of its files")


def _format_constant(value: Any) -> str:
    return NO_VALUE if value is None else str(value)


# ---- Iceberg


def _open_iceberg(metadata: str) -> Any:
    table = require_package("pyiceberg.table", "a table of Iceberg", "pyiceberg")
    try:
        return table.StaticTable.from_metadata(metadata)
    except (OSError, ValueError) as error:
        raise InvalidInput(f"The Iceberg table of {metadata} cannot be read: {error}") from error


def _number_metadata(store: Store, name: str) -> tuple[int, str]:
    """The place of a metadata file among those of its table: v3.metadata.json or 00003-....metadata.json."""
    digits = posixpath.basename(name).lstrip("v").partition("-")[0].partition(".")[0]
    return (int(digits) if digits.isdigit() else -1, name)


def _read_iceberg(
    table: Any, version: int | datetime | None, storage_options: Mapping[str, Any]
) -> TableSnapshot:
    snapshot = _find_snapshot(table, version)
    number = snapshot.snapshot_id
    name = f"snapshot {number} of the Iceberg table {table.location()}"
    try:
        manifests = snapshot.manifests(table.io)
        parts = _map_in_threads(lambda manifest: manifest.fetch_manifest_entry(table.io), manifests)
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{name} cannot be read: {error}") from error
    entries = sorted(chain.from_iterable(parts), key=lambda entry: str(entry.data_file.file_path))
    data = [entry for entry in entries if entry.data_file.content.name == "DATA"]
    if not data:
        raise InvalidInput(f"{name} has no rows: there is nothing to train on.")
    places = [_split_url(each.data_file.file_path) for each in data]
    store, names = open_common(places, storage_options, _split_url(table.location()))
    # Columns may have been added or renamed after the newest snapshot; an older one has those of its time.
    is_newest = number == table.metadata.current_snapshot_id
    schema = table.schema() if is_newest else table.scan(snapshot_id=number).projection()
    ids = {field.name: field.field_id for field in schema.fields}
    mapping = table.name_mapping()
    names_by_id = {each.field_id: tuple(each.names) for each in mapping.root} if mapping else {}
    mapped = {name: names_by_id.get(number, ()) for name, number in ids.items()} if mapping else {}
    # A column with a default has that in the files that lack it, and is left to what the files say.
    defaults = {each.name for each in schema.fields if getattr(each, "initial_default", None) is not None}
    # pyarrow 14 has no such type
    with_types = [each for each in schema.fields if "uuid" not in str(each.field_type)]
    declared = _find_types(type(schema)(*with_types).as_arrow())
    types = {name: kind for name, kind in declared.items() if name not in defaults}
    files = []
    for path, entry in zip(names, data, strict=True):
        info = ObjectInfo(path, entry.data_file.file_size_in_bytes, None)
        constants = _find_partition_values(table, schema, declared, entry.data_file)
        files.append(DataFile(info, constants, field_ids=ids, mapped_names=mapped, types=types))
    deletes = [each for each in entries if each.data_file.content.name != "DATA"]
    deleted = DeletedRows(table.specs(), deletes, storage_options).find(store, data, files)
    files = [replace(file, deleted=mask) for file, mask in zip(files, deleted, strict=True)]
    return TableSnapshot(name, store, tuple(files), tuple(ids))


def _find_partition_values(table: Any, schema: Any, types: Mapping[str, Any], file: Any) -> dict[str, str]:
    """Columns that a file is partitioned by as they are: files that came from Hive have them in their paths alone."""
    names = {field.field_id: field.name for field in schema.fields}
    found = {}
    for number, field in enumerate(table.specs()[file.spec_id].fields):
        name, value = names.get(field.source_id, ""), file.partition[number]
        if str(field.transform) == "identity" and types.get(name) in _WRITTEN_ALIKE:
            is_days = types[name] == pa.date32() and isinstance(value, int)
            found[name] = _format_constant(date(1970, 1, 1) + timedelta(value) if is_days else value)
    return found


def _split_url(url: str) -> Place:
    parsed = urlparse(url)  # as it is: the folders of partitions have encoded values for names
    return parsed.scheme or "file", parsed.netloc, parsed.path


def _find_snapshot(table: Any, version: int | datetime | None) -> Any:
    if isinstance(version, datetime):
        found = table.snapshot_as_of_timestamp(int(_to_utc(version).timestamp() * 1000))
    else:
        found = table.current_snapshot() if version is None else table.snapshot_by_id(version)
    if found is None:
        which = "snapshot" if version is None else f"snapshot {version}"
        known = ", ".join(str(each.snapshot_id) for each in table.snapshots()) or "none"
        raise InvalidInput(f"The Iceberg table {table.location()} has no {which}: it has {known}.")
    return found


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
        """specs: the table's partition specs by their numbers. entries: the manifests' delete files."""
        self._specs, self._options = specs, storage_options
        # Path of a data file -> for each delete file that names it, the sequence number and the rows.
        self._positions: dict[str, list[tuple[int, Int64s]]] = defaultdict(list)
        self._equalities: dict[Partition, list[_EqualityDelete]] = defaultdict(list)
        kinds: dict[str, list[Any]] = {"POSITION_DELETES": [], "EQUALITY_DELETES": []}
        for entry in entries:
            kinds[entry.data_file.content.name].append(entry)
        # A Puffin file is an entry for each of the data files that it has a vector of.
        by_position = list({each.data_file.file_path: each for each in kinds["POSITION_DELETES"]}.values())
        positions = _map_in_threads(self._read_positions, by_position)
        for entry, named in zip(by_position, positions, strict=True):
            for path, rows in named:
                self._positions[path].append((entry.sequence_number or 0, rows))
        by_equality = kinds["EQUALITY_DELETES"]
        equalities = _map_in_threads(self._read_equality, by_equality)
        for entry, equality in zip(by_equality, equalities, strict=True):
            self._equalities[self._find_partition(entry.data_file)].append(equality)

    def find(self, store: Store, entries: Sequence[Any], files: Sequence[DataFile]) -> list[Mask | None]:
        """Of each data file, which rows are deleted; None: no delete file counts for it. entries: those of `files`."""
        if not self._positions and not self._equalities:
            return [None] * len(files)
        pairs = zip(entries, files, strict=True)
        return _map_in_threads(lambda pair: self._find_in_file(store, *pair), pairs)

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
        files = rows.group_by("file_path").aggregate([("pos", "list")])
        pairs = zip(files["file_path"], files["pos_list"], strict=True)
        return [(path.as_py(), positions.values.to_numpy()) for path, positions in pairs]

    def _read_equality(self, entry: Any) -> _EqualityDelete:
        file = entry.data_file
        ids = tuple(sorted(file.equality_ids))
        with self._open(file, "PARQUET") as source:
            parquet = open_parquet(source)
            names = find_field_names(parquet.schema_arrow)
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
    from pyiceberg.table.puffin import PuffinFile

    file = PuffinFile(content)
    try:
        from pyiceberg.table.deletion_vector import deletion_vectors_from_puffin_file
    except ImportError:  # before 0.12
        vectors = file.to_vector()
    else:
        found = deletion_vectors_from_puffin_file(file)
        vectors = {each.referenced_data_file: each.to_vector() for each in found}
    for path, positions in vectors.items():
        yield path, positions.to_numpy()


def _read_fields(store: Store, file: DataFile, ids: Iterable[int], schema: pa.Schema) -> pa.Table:
    """Columns of a data file, which have the ids of their fields for names. schema: what they are compared with."""
    known = {number: name for name, number in file.field_ids.items()}
    with store.open_read(file.info.name) as source:
        parquet = open_parquet(source)
        in_file = find_field_names(parquet.schema_arrow)
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
            kind = schema.field(str(number)).type
            columns[str(number)] = pa.repeat(value.cast(kind), parquet.metadata.num_rows)
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


def _map_in_threads(function: Callable[[Any], T], arguments: Iterable[Any]) -> list[T]:
    with ThreadPoolExecutor(THREADS, "lake-tables") as threads:
        return list(threads.map(function, arguments))
