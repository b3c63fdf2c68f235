"""The manifest of a data set: its files, row groups and columns, as one JSON document beside it in the store.

A run is bound to the manifest's hash (R19, resuming a run). Knows neither Spark nor how files are read. Any thread.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import zlib
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from spark_elastic.data.store import Store, parse_document
from spark_elastic.errors import InvalidInput, StoreError, format_columns

VERSION = 4


Int64s = npt.NDArray[np.int64]

MOST_ROW_GROUPS = 1 << 24  # which take a gigabyte
VIEW_BYTES = 112  # numpy's own bytes of each row of a ragged column


@dataclass(frozen=True)
class Column:
    """A column as numpy arrays."""

    name: str  # as in the table
    # numpy's dtype. Raw columns, which a transformation turns into numbers, have `object` (bytes or strings),
    # `datetime64[D]` or `datetime64[us]`.
    dtype: str
    shape: tuple[int, ...] = ()  # shape of one row, () for a scalar
    codec: str = ""  # how petastorm encoded a row: "ndarray", "compressed_ndarray" or "image"; "": not at all
    ragged: str = ""  # numpy's dtype in rows that are 1-D arrays of different lengths; `dtype` is `object`

    @property
    def is_raw(self) -> bool:
        return np.dtype(self.dtype).kind in "OM"

    @property
    def kind(self) -> str:
        """What a row of it is, for people."""
        if self.ragged:
            return f"arrays of {self.ragged} of different lengths"
        name = {"O": "bytes or strings", "M": "dates or times"}.get(np.dtype(self.dtype).kind, self.dtype)
        return f"{name} {list(self.shape)}" if self.shape else name

    @property
    def row_bytes(self) -> int:
        """Decoded bytes of one row, without what differs from row to row: bytes, strings and ragged values."""
        return np.dtype(self.dtype).itemsize * math.prod(self.shape) + (VIEW_BYTES if self.ragged else 0)

    @property
    def element(self) -> tuple[str, int]:
        """The dtype of single values, and the dimensions of a row."""
        return (self.ragged, 1) if self.ragged else (self.dtype, len(self.shape))


@dataclass(frozen=True)
class RowGroup:
    """A row group of a file, or a part of a large row group of an existing file."""

    file: int  # number of the file in the manifest
    index: int  # number of the row group in the file
    rows: int  # rows that the table has of it
    bytes: int  # encoded bytes before compression; those of decoded ragged values, where these are more
    first_row: int = 0  # of a part, its first row in the row group as it is in the file; 0 for a whole one
    parent_rows: int = 0  # of a part, the rows in the file of the whole row group; 0: this is the whole one
    part_rows: int = 0  # of a part, the rows in the file of each part but the last; 0 for a whole one
    deleted: str = ""  # which rows in the file the table has no more, by `pack_deleted`; "": none

    @cached_property
    def keep_mask(self) -> npt.NDArray[np.bool_] | None:
        """Of each row in the file, whether the table has it; None: all of them."""
        if not self.deleted:
            return None
        text, _, packed = self.deleted.partition(":")
        count, size = int(text), -(-int(text) // 8)
        # Whatever somebody has written there, it takes no more memory than so many bits.
        bits = zlib.decompressobj().decompress(base64.b64decode(packed), max(1, size))
        kept = ~np.unpackbits(np.frombuffer(bits, np.uint8))[:count].view(np.bool_)
        if len(kept) != count or np.count_nonzero(kept) != self.rows:
            raise StoreError("The manifest's deleted rows do not match its rows: write it again.")
        return kept

    @property
    def stored_rows(self) -> int:
        return self.rows if self.keep_mask is None else len(self.keep_mask)


def pack_deleted(deleted: npt.NDArray[np.bool_]) -> str:
    """The mask as text: "" if nothing is deleted, else the number of rows, and a compressed bit for each."""
    if not deleted.any():
        return ""
    return f"{len(deleted)}:{base64.b64encode(zlib.compress(np.packbits(deleted).tobytes())).decode()}"


@dataclass(frozen=True, eq=False)
class RowGroups:
    """Row groups as arrays of RowGroup's fields: there may be a million."""

    NUMBERS: ClassVar = ("file", "index", "rows", "bytes", "first_row", "parent_rows", "part_rows")

    file: Int64s
    index: Int64s
    rows: Int64s
    bytes: Int64s
    first_row: Int64s
    parent_rows: Int64s
    part_rows: Int64s
    deleted: Mapping[int, str] = field(default_factory=dict)  # by row group, where the table has not all rows

    @classmethod
    def of(cls, groups: Iterable[RowGroup]) -> RowGroups:
        single = list(groups)
        numbers: dict[str, Any] = {}
        for name in cls.NUMBERS:
            numbers[name] = np.array([getattr(group, name) for group in single], np.int64)
        deleted = {place: group.deleted for place, group in enumerate(single) if group.deleted}
        return cls(**numbers, deleted=deleted)

    def keep(self, rows: Int64s, deleted: Mapping[int, str]) -> RowGroups:
        """The row groups that have rows of so many each. deleted: of their rows in the files, by row group."""
        stays = rows > 0
        place = np.cumsum(stays) - 1
        numbers: dict[str, Any] = {name: getattr(self, name)[stays] for name in self.NUMBERS}
        numbers["rows"] = rows[stays]
        return RowGroups(**numbers, deleted={int(place[n]): text for n, text in deleted.items() if stays[n]})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> RowGroup:
        fields: dict[str, Any] = {name: int(getattr(self, name)[number]) for name in self.NUMBERS}
        return RowGroup(**fields, deleted=self.deleted.get(number, ""))

    def __iter__(self) -> Iterator[RowGroup]:
        return map(self.__getitem__, range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RowGroups):
            return NotImplemented
        same = all(np.array_equal(getattr(self, name), getattr(other, name)) for name in self.NUMBERS)
        return same and self.deleted == other.deleted

    __hash__ = None  # type: ignore[assignment]

    def to_fields(self) -> dict[str, Any]:
        """For a document: a number where all row groups have it, else a list."""
        numbers = {name: _shorten(getattr(self, name)) for name in self.NUMBERS}
        deleted = {str(key): text for key, text in self.deleted.items()}
        return {**numbers, "count": len(self), "deleted": deleted}

    @classmethod
    def from_fields(cls, content: Mapping[str, Any]) -> RowGroups:
        count = content["count"]
        if count > MOST_ROW_GROUPS:
            raise ValueError(f"{count} row groups")
        numbers: dict[str, Any] = {name: _lengthen(content[name], count) for name in cls.NUMBERS}
        return cls(**numbers, deleted={int(key): text for key, text in content["deleted"].items()})


def _shorten(values: Int64s) -> Any:
    found: list[int] = values.tolist()
    return found[0] if found and found.count(found[0]) == len(found) else found


def _lengthen(values: Any, count: int) -> Int64s:
    found = np.full(count, values, np.int64) if isinstance(values, int) else np.array(values, np.int64)
    if found.shape != (count,):
        raise ValueError(f"{len(found)} numbers for {count} row groups")
    return found


@dataclass(frozen=True)
class FileColumns:
    """What a file's own footer does not say of its columns."""

    constants: Mapping[str, str] = field(default_factory=dict)  # column not in the file -> its text
    # Column -> its name in the file, for all columns of tables that map them; {}: columns have their own names.
    stored_names: Mapping[str, str] = field(default_factory=dict)

    def restrict(self, columns: Container[str]) -> FileColumns:
        constants = {name: text for name, text in self.constants.items() if name in columns}
        stored = {name: own for name, own in self.stored_names.items() if name in columns}
        return FileColumns(constants, stored)


@dataclass(frozen=True)
class PackedSource:
    """What a data set of packed sequences is made of."""

    manifest: Manifest  # that of the documents
    packing: Mapping[str, Any]  # the fields of `Packing`
    cuts: tuple[int, ...]  # row group g has the row groups `cuts[g] ... cuts[g + 1]` of the documents


@dataclass(frozen=True)
class Manifest:
    """A data set."""

    columns: tuple[Column, ...]  # of the data set; its files may have more
    files: tuple[str, ...]  # names of Parquet files in the store
    row_groups: RowGroups  # in the order of the table's rows
    fingerprint: str  # of what written rows were made from, or of what is selected of a table; else `content`
    # Of written rows: digest of all values and their places. Of files that exist: digest of their names, sizes and
    # times, and of which of their rows are deleted.
    content: str
    file_columns: tuple[FileColumns, ...] = ()  # of each file; (): the files say all
    file_states: tuple[str, ...] = ()  # `ObjectInfo.state` of each file; (): nobody writes them again
    packed: PackedSource | None = None  # what the rows are made of, if they are not in the files as they are

    @cached_property
    def rows(self) -> int:
        return sum(self.group_rows)

    @cached_property
    def group_rows(self) -> tuple[int, ...]:
        """Rows of each row group: `DataPlan.row_groups`."""
        return tuple(self.row_groups.rows.tolist())

    @cached_property
    def hash(self) -> str:
        """Hash of columns, row groups and `content`: equal rows written again have the same, in files of any names."""
        columns = [_to_fields(column) for column in self.columns]
        content = {
            "version": VERSION,
            "columns": columns,
            "row_groups": self.group_rows,
            "content": self.content,
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def column(self, name: str) -> Column:
        for column in self.columns:
            if column.name == name:
                return column
        names = [column.name for column in self.columns]
        raise InvalidInput(f"The data set has no column {name!r}; it has {format_columns(name, names)}.")

    def max_decoded_group_bytes(self) -> int:
        """Bytes of the largest row group in memory."""
        return int(
            compute_decoded_bytes(self.columns, self.row_groups.rows, self.row_groups.bytes).max(initial=0)
        )

    def to_json(self) -> str:
        shared = reuse_equal(self.file_columns)
        kinds = {id(each): each for each in shared}
        number = {kind: place for place, kind in enumerate(kinds)}
        content: dict[str, Any] = {
            "version": VERSION,
            "hash": self.hash,
            "columns": [_to_fields(column) for column in self.columns],
            "files": self.files,
            "row_groups": self.row_groups.to_fields(),
            "fingerprint": self.fingerprint,
            "content": self.content,
            "kinds_of_files": [asdict(each) for each in kinds.values()],
            "file_columns": [number[id(each)] for each in shared],
            "file_states": self.file_states,
        }
        if self.packed is not None:
            content["packed"] = {**vars(self.packed), "manifest": self.packed.manifest.to_json()}
        return json.dumps(content, sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Read a document; StoreError if it is not a manifest of this version, or was altered."""
        return parse_document(text, "The manifest", cls._from_content)

    @classmethod
    def _from_content(cls, content: Any) -> Manifest:
        version = content["version"]
        if version != VERSION:
            raise StoreError(f"The manifest has version {version}, not {VERSION}: write it again.")
        kinds = [FileColumns(**each) for each in content["kinds_of_files"]]
        packed = content.get("packed")
        if packed is not None:
            packed = {**packed, "manifest": cls.from_json(packed["manifest"]), "cuts": tuple(packed["cuts"])}
        manifest = cls(
            columns=tuple(Column(**{**c, "shape": tuple(c["shape"])}) for c in content["columns"]),
            files=tuple(content["files"]),
            row_groups=RowGroups.from_fields(content["row_groups"]),
            fingerprint=content["fingerprint"],
            content=content["content"],
            file_columns=tuple(kinds[number] for number in content["file_columns"]),
            file_states=tuple(content["file_states"]),
            packed=packed and PackedSource(**packed),
        )
        manifest.max_decoded_group_bytes()  # raises for what are no columns
        if not all(isinstance(name, str) for name in manifest.files):
            raise TypeError("files must be names")
        if manifest.hash != content["hash"]:
            raise StoreError("The manifest does not match its own hash: it was altered; write it again.")
        return manifest

    @classmethod
    def load(cls, store: Store, name: str) -> Manifest:
        return cls.from_json(store.read_bytes(name))

    def save(self, store: Store, name: str) -> None:
        store.write_bytes(name, self.to_json().encode())


def _to_fields(column: Column) -> dict[str, Any]:
    """A column's fields for a document, new ones only where they say something: the hashes of others stay."""
    return {name: value for name, value in asdict(column).items() if name not in ("codec", "ragged") or value}


def compute_decoded_bytes(columns: Iterable[Column], rows: Int64s, encoded: Int64s) -> Int64s:
    """Bytes of row groups in memory. The lengths of bytes, strings and ragged rows are known from the files alone."""
    known = list(columns)
    objects = any(column.dtype == "object" for column in known)
    return rows * sum(column.row_bytes for column in known) + objects * encoded


def reuse_equal(file_columns: Iterable[FileColumns]) -> tuple[FileColumns, ...]:
    """The same, where equal ones are one object: there may be 100,000 files."""
    seen: dict[object, FileColumns] = {}
    return tuple(
        seen.setdefault((tuple(each.constants.items()), tuple(each.stored_names.items())), each)
        for each in file_columns
    )
