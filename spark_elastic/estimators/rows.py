"""`Rows`: a handle on the rows of a table that lie in files, for estimators, loops and trainers alike.

It names files, row groups and columns, and holds no row: it pickles to a few KB and more per deleted row. Workers open
it where they are. Values; any thread.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from spark_elastic.checks import COUNT, WHOLE
from spark_elastic.data.manifest import Column, Manifest, RowGroups, pack_deleted
from spark_elastic.data.plan import draw_uniform
from spark_elastic.data.row_access import RowAccess
from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidInput, StoreError, format_columns, suggest_name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from spark_elastic.estimators.row_dataset import RowDataset
    from spark_elastic.tables.lake_tables import Version

log = logging.getLogger("spark_elastic")

FORMAT = 1  # of what `save` writes
_SPLIT_WORD = 0x73706C69  # keeps the numbers of a split apart from those of other draws


@dataclass(frozen=True)
class Rows:
    """Rows of a table, each with a number from 0 on, by which loops, trainers and estimators take them once per epoch.

    Make one by `from_dataframe`, `from_table` or `from_parquet`.
    """

    store: Store = field(repr=False)  # where the files are
    manifest: Manifest = field(repr=False)  # the files, and the rows in them
    source: str  # what the rows are of, for people
    has_no_nan: bool = field(default=False, repr=False)  # whether NaN was looked for when they were written

    # ---- where rows come from

    @classmethod
    def from_dataframe(
        cls,
        df: DataFrame,
        store: Any = None,
        columns: Sequence[str] | None = None,
        row_order: str | None = None,
        missing: Any = "refuse",
        materialize: str = "auto",
        storage_options: Mapping[str, Any] | None = None,
    ) -> Rows:
        """Write a DataFrame's rows to the store, as `fit` does, or take the files that it scans where they are.

        Rows that are there already from the same DataFrame are not written again. They stay until
        `Store.open(store).clean` removes them.

        Args:
            store: path or url that driver and workers share; may be None only where nothing is written.
            columns: names; None: all.
            row_order: "hash": by a hash of each row, the same on any cluster; "table": as Spark has them, and in place
                if the DataFrame only scans files. None: "hash".
            missing: "refuse", "drop", or a dict of nulls and nans, as an estimator's.
            materialize: "auto", "always" (write) or "never" (in place, or an error that says why not).
            storage_options: of fsspec, for store and files.

        Raises:
            InvalidInput: columns that cannot be read, nulls, no rows. StoreError: the store cannot be written.
        """
        from spark_elastic.estimators.dataframe_rows import find_or_write_rows

        return find_or_write_rows(
            df, store, columns, row_order, missing, materialize, dict(storage_options or {})
        )

    @classmethod
    def from_table(
        cls,
        table: Any,
        version: Version | None = None,
        columns: Sequence[str] | Mapping[str, str] | None = None,
        where: Any = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Rows:
        """The rows of one version of a table of Delta Lake or Iceberg, whatever is written to it meanwhile.

        Args:
            table: a path or url, an Iceberg table's metadata file, a `deltalake.DeltaTable`, a `pyiceberg.table.Table`,
                or, with a Spark session, a name in its catalog.
            version: a version of Delta, the id of a snapshot of Iceberg, or a time; None: the newest.
            columns: names, or a dict from names for the program to those in the table; None: all that can be read.
            where: as in `fit_on_table`: `[("year", ">=", 2024), ("kind", "in", ["a", "b"])]`.
            storage_options: of fsspec, for the data files.

        Raises:
            InvalidInput: no such table, version or column, nulls, no rows. StoreError: a file cannot be read.
        """
        from spark_elastic.estimators.fit_rows import describe_table

        return cls(*describe_table(table, version, columns, where, dict(storage_options or {})))

    @classmethod
    def from_parquet(
        cls,
        paths: Any,
        columns: Sequence[str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> Rows:
        """The rows of Parquet files where they are, also of a data set of petastorm.

        Args:
            paths: files or folders, one or several: paths or fsspec urls that all workers see.
            columns: names; None: all that can be read.

        Raises:
            InvalidInput: columns of different types or shapes, nulls, no rows. StoreError: no such files.
        """
        from spark_elastic.estimators.fit_rows import describe_paths

        return cls(*describe_paths(paths, columns, dict(storage_options or {})))

    @classmethod
    def open(cls, url: str, **storage_options: Any) -> Rows:
        """What `save` wrote. storage_options: of fsspec, for that file and those of the rows.

        Raises:
            StoreError: there is no such file, or it was altered.
        """
        folder, name = posixpath.split(str(url).rstrip("/"))
        store = Store.open(folder or ".", **storage_options)
        try:
            saved = json.loads(store.read_bytes(name))
            if saved["format"] != FORMAT:
                raise StoreError(
                    f"{url} has format {saved['format']}, and this release reads {FORMAT}: save the Rows again."
                )
            manifest = Manifest.from_json(saved["manifest"])
            store = Store.open(saved["store"], **storage_options)
            return cls(store, manifest, saved["source"], saved["has_no_nan"])
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{url} is not what Rows.save writes: save the Rows again.") from error

    def save(self, url: str, **storage_options: Any) -> None:
        """Write the handle, without credentials, for programs that get no objects: `Rows.open(url)` reads it."""
        folder, name = posixpath.split(str(url).rstrip("/"))
        document = {
            "format": FORMAT,
            "store": self.store.url,
            "source": self.source,
            "has_no_nan": self.has_no_nan,
            "manifest": self.manifest.to_json(),
        }
        Store.open(folder or ".", **storage_options).write_bytes(name, json.dumps(document).encode())

    # ---- what they are

    @property
    def count(self) -> int:
        """The number of rows."""
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
        lines = [f"{self.count:,} rows of {self.source}", f"{files} files, {groups} row groups, {self.store.url}"]
        for column in self.columns:
            lines.append(f"  {column.name}: {column.kind}")
        return "\n".join(lines)

    # ---- parts of them

    def select(self, *names: str) -> Rows:
        """The same rows with these columns alone.

        Raises:
            InvalidInput: there is no such column.
        """
        if not names:
            raise InvalidInput(f"Name at least one of the columns {[each.name for each in self.columns]}.")
        columns = tuple(self.manifest.column(name) for name in dict.fromkeys(names))
        return dataclasses.replace(self, manifest=dataclasses.replace(self.manifest, columns=columns))

    def limit(self, count: int) -> Rows:
        """The first `count` rows, in the order of the files: of rows in the order of their hashes, a random sample."""
        most = COUNT("count", count)
        if most >= self.count:
            return self
        return self._keep(np.arange(self.count) < most, f"limit {most}")

    def split(self, by: float | str, seed: int = 0) -> tuple[Rows, Rows]:
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
            raise InvalidInput(f"split takes a fraction between 0 and 1, or the name of a column; got {by!r}.")
        if held_out.all() or not held_out.any():
            empty = "train on" if held_out.all() else "hold out"
            raise InvalidInput(
                f"split({by!r}) leaves none of {self.count} rows to {empty}: choose another fraction or column."
            )
        rest = self
        if isinstance(by, str) and len(self.columns) > 1:
            rest = self.select(*(column.name for column in self.columns if column.name != by))
        return rest._keep(~held_out, what), rest._keep(held_out, f"{what}, held out")

    def _read_marks(self, name: str) -> npt.NDArray[np.bool_]:
        names = [column.name for column in self.columns]
        if name not in names:
            raise InvalidInput(
                f"split names column {name!r}, which these Rows do not have: they have {format_columns(name, names)}"
                f"{suggest_name(name, names)}."
            )
        column = self.manifest.column(name)
        if column.shape or np.dtype(column.dtype).kind not in "biuf":
            raise InvalidInput(f"split needs a column of booleans or numbers; {name!r} is {column.dtype}.")
        rows = RowAccess(self.store, self.select(name).manifest)
        marks = [rows.reader.fetch(group)[name] > 0 for group in range(len(self.manifest.row_groups))]
        return np.concatenate(marks)

    def _keep(self, kept: npt.NDArray[np.bool_], what: str) -> Rows:
        """kept: (count,), of each row. what: another text for other rows of the same files."""
        content = hashlib.sha256(f"{self.manifest.content} {what}".encode()).hexdigest()[:32]
        manifest = dataclasses.replace(
            self.manifest,
            row_groups=_keep_rows(self.manifest.row_groups, kept),
            fingerprint=content,
            content=content,
        )
        return dataclasses.replace(self, manifest=manifest, source=f"{self.source} ({what})")

    # ---- how they are read

    def dataset(self) -> RowDataset:
        """A map-style data set of torch: a row is a dict of tensors."""
        from spark_elastic.estimators.row_dataset import RowDataset

        return RowDataset(self)


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
    stays = rows > 0
    place = np.cumsum(stays) - 1
    numbers = {name: getattr(groups, name)[stays] for name in RowGroups.NUMBERS}
    return RowGroups(
        **{**numbers, "rows": rows[stays]},
        deleted={int(place[number]): text for number, text in deleted.items() if stays[number]},
    )
