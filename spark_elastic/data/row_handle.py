"""The rows of a table that lie in files: `RowHandle`, the base of the public `Rows`, and `RowAccess` to them.

A handle names files, row groups and columns, and holds no row. An access takes rows by their numbers, in any order, and
opens files of its own in each process. Knows neither Spark nor frameworks. Any thread.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import posixpath
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from spark_elastic.checks import COUNT, WHOLE, make_kind
from spark_elastic.data.manifest import Column, Manifest, RowGroups, pack_deleted
from spark_elastic.data.object_store import find_table
from spark_elastic.data.packing import Packing
from spark_elastic.data.plan import Int64s, draw_uniform
from spark_elastic.data.reading.decoding import ColumnArrays
from spark_elastic.data.reading.group_reader import Reader
from spark_elastic.data.reading.readers import open_reader, pack_rows
from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidInput


def _close_here(reader: Reader, process: int) -> None:
    # In a fork, a thread that is not there may have been reading when the process was copied.
    if process == os.getpid():
        reader.close()


@dataclass(frozen=True, eq=False)
class RowAccess:
    """The rows of the files that a manifest describes."""

    store: Store  # where the files are
    manifest: Manifest  # columns, files and row groups

    @property
    def reader(self) -> Reader:
        """The reader of this process; it lives as long as the access."""
        opened: tuple[Reader, int] | None = self.__dict__.get("_opened")
        if opened is None or opened[1] != os.getpid():
            opened = self.__dict__["_opened"] = open_reader("arrow", self.store, self.manifest), os.getpid()
            weakref.finalize(self, _close_here, *opened).atexit = False
        return opened[0]

    def take(self, rows: Sequence[int] | Int64s) -> ColumnArrays:
        """Column -> (n, *shape), the values of these rows in their order. StoreError: a file is gone or changed."""
        numbers = np.asarray(rows, np.int64)
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < self.manifest.rows:
            raise InvalidInput(f"There is no row {numbers.max()}: the data set has {self.manifest.rows}.")
        groups = np.searchsorted(self._ends, numbers, "right")
        reader = self.reader
        columns = self.manifest.columns
        taken = {each.name: np.empty((len(numbers), *each.shape), each.dtype) for each in columns}
        for group in np.unique(groups):
            places = np.flatnonzero(groups == group)
            inside = numbers[places] - (self._ends[group] - self.manifest.row_groups.rows[group])
            decoded = reader.fetch(int(group))
            for name, out in taken.items():
                out[places] = decoded[name][inside]
            reader.release(int(group))
        return taken

    @cached_property
    def _ends(self) -> Int64s:
        """The number behind the last row of each row group."""
        return np.cumsum(self.manifest.row_groups.rows)

    def __getstate__(self) -> dict[str, object]:
        return {"store": self.store, "manifest": self.manifest}


H = TypeVar("H", bound="RowHandle")

FORMAT = 1  # of what `save` writes
_SPLIT_WORD = 0x73706C69  # keeps the numbers of a split apart from those of other draws


@dataclass(frozen=True)
class RowHandle:
    """Rows, each with a number from 0 on. It pickles to a few KB, and a bit for each row where some are left out."""

    store: Store = field(repr=False)  # where the files are
    manifest: Manifest = field(repr=False)  # the files, and the rows in them
    source: str  # what the rows are of, for people
    has_no_nan: bool = field(default=False, repr=False)  # whether NaN was looked for when they were written

    def save(self, url: str, **storage_options: Any) -> None:
        """Write the handle, without credentials, for programs that get no objects: `Rows.open(url)` reads it."""
        folder, name = posixpath.split(str(url).rstrip("/"))
        place = {"store": self.store.url, "table": find_table(self.store.filesystem)}
        about = {"source": self.source, "has_no_nan": self.has_no_nan, "manifest": self.manifest.to_json()}
        document = {"format": FORMAT, **place, **about}
        Store.open(folder or ".", **storage_options).write_bytes(name, json.dumps(document).encode())

    # ---- what they are

    @property
    def count(self) -> int:
        return self.manifest.rows

    def __len__(self) -> int:
        return self.count

    @property
    def columns(self) -> tuple[Column, ...]:
        """Name, numpy's dtype and shape of each column."""
        return self.manifest.columns

    def describe(self) -> str:
        """The rows in words: how many, of what, in which files, and the columns."""
        groups, files = len(self.manifest.row_groups), len(self.manifest.files)
        columns = "".join(f"\n  {column.name}: {column.kind}" for column in self.columns)
        where = f"{files} files, {groups} row groups, {self.store.url}"
        return f"{self.count:,} rows of {self.source}\n{where}{columns}"

    # ---- parts of them

    def select(self: H, *names: str) -> H:
        """The same rows with these columns alone; InvalidInput if there is no such column."""
        if not names:
            raise InvalidInput(f"Name at least one of the columns {[each.name for each in self.columns]}.")
        columns = tuple(self.manifest.column(name) for name in dict.fromkeys(names))
        return dataclasses.replace(self, manifest=dataclasses.replace(self.manifest, columns=columns))

    def limit(self: H, count: int) -> H:
        """The first `count` rows, in the order of the files: of rows in the order of their hashes, a random sample."""
        most = COUNT("count", count)
        if most >= self.count:
            return self
        return self._keep(np.arange(self.count) < most, f"limit {most}")

    def split(self: H, by: Any, seed: int = 0) -> tuple[H, H]:
        """The rows to train on, and those to hold out.

        Args:
            by: the fraction of rows to hold out, drawn for each row by its number; or the name of a column: rows where
                it is true, or above 0, are held out, and neither part has it.
            seed: of the fraction.

        Raises:
            InvalidInput: no such fraction or column, or one part would have no rows.
        """
        if isinstance(by, str):
            held_out = self._read_marks(by)
            what = f"split by {by}"
        elif isinstance(by, float) and 0 < by < 1:
            drawn = draw_uniform(np.arange(self.count), 1, _SPLIT_WORD, WHOLE("seed", seed))[:, 0]
            held_out, what = drawn < by, f"split by {by}, seed {seed}"
        else:
            raise InvalidInput(f"split takes a fraction between 0 and 1 or the name of a column; got {by!r}.")
        if held_out.all() or not held_out.any():
            empty = "train on" if held_out.all() else "hold out"
            raise InvalidInput(
                f"split({by!r}) leaves none of {self.count} rows to {empty}: choose another fraction or column."
            )
        rest = self
        if isinstance(by, str) and len(self.columns) > 1:
            rest = self.select(*(column.name for column in self.columns if column.name != by))
        return rest._keep(~held_out, what), rest._keep(held_out, f"{what}, held out")

    def pack(self: H, packing: Packing) -> H:
        """Documents as sequences of one length, each token once per epoch: rows that a dense model takes.

        The order of the sequences depends on seed and epoch alone. Reads the documents' lengths once.

        Raises:
            InvalidInput: the column has no arrays of numbers, or a document is longer than allowed.
        """
        manifest = pack_rows(self.store, self.manifest, make_kind("a Packing", Packing)("packing", packing))
        source = f"{self.source} (packed in sequences of {packing.length})"
        return dataclasses.replace(self, manifest=manifest, source=source)

    def _read_marks(self, name: str) -> npt.NDArray[np.bool_]:
        column = self.manifest.column(name)
        if column.shape or np.dtype(column.dtype).kind not in "biuf":
            raise InvalidInput(f"split needs a column of booleans or numbers; {name!r} has {column.kind}.")
        rows = RowAccess(self.store, self.select(name).manifest)
        marks: npt.NDArray[Any] = rows.take(np.arange(self.count))[name]
        return marks > 0

    def _keep(self: H, kept: npt.NDArray[np.bool_], what: str) -> H:
        """kept: (count,), of each row. what: another text for other rows of the same files."""
        content = hashlib.sha256(f"{self.manifest.content} {what}".encode()).hexdigest()[:32]
        groups = _keep_rows(self.manifest.row_groups, kept)
        manifest = dataclasses.replace(self.manifest, row_groups=groups, fingerprint=content, content=content)
        return dataclasses.replace(self, manifest=manifest, source=f"{self.source} ({what})")


def _keep_rows(groups: RowGroups, kept: npt.NDArray[np.bool_]) -> RowGroups:
    """The row groups with some of their rows. kept: of each row, in the order of the groups."""
    rows, deleted = groups.rows.copy(), dict(groups.deleted)
    first = 0
    for number, count in enumerate(groups.rows.tolist()):
        part = kept[first : first + count]
        first += count
        rows[number] = part.sum()
        if 0 < rows[number] < count:
            before = groups[number].keep_mask
            mask = np.ones(count, np.bool_) if before is None else before.copy()
            mask[mask] = part
            deleted[number] = pack_deleted(~mask)
    return groups.keep(rows, deleted)
