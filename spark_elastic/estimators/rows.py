"""`Rows`: a handle on the rows of a table that lie in files, for estimators, loops and trainers alike.

What it can do with them is `RowHandle`'s; this module says where rows come from.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spark_elastic.data.manifest import Manifest
from spark_elastic.data.row_handle import FORMAT, RowHandle
from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidInput, StoreError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from spark_elastic.estimators.row_dataset import RowDataset
    from spark_elastic.tables.lake_tables import Version


@dataclass(frozen=True)
class Rows(RowHandle):
    """Rows of a table, each with a number from 0 on, by which loops, trainers and estimators take them once per epoch.

    Make one by `from_dataframe`, `from_table` or `from_parquet`; it is an argument of `run`, of `fit` and of
    `ElasticDataLoader`. It pickles to a few KB, and workers open the files where they are.
    """

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

        options = dict(storage_options or {})
        return cls(*find_or_write_rows(df, store, columns, row_order, missing, materialize, options))

    @classmethod
    def from_table(
        cls,
        table: Any,
        version: Version | None = None,
        columns: Sequence[str] | Mapping[str, str] | None = None,
        where: Any = None,
        storage_options: Mapping[str, Any] | None = None,
        catalog: Any = None,
    ) -> Rows:
        """The rows of one version of a table of Delta Lake or Iceberg, whatever is written to it meanwhile.

        Args:
            table: a path or url, an Iceberg table's metadata file, a `deltalake.DeltaTable`, a `pyiceberg.table.Table`,
                or, with a Spark session, a name in its catalog.
            version: a version of Delta, the id of a snapshot of Iceberg, or a time; None: the newest.
            columns: names, or a dict from names for the program to those in the table; None: all that can be read.
            where: as in `fit_on_table`: `[("year", ">=", 2024), ("kind", "in", ["a", "b"])]`.
            storage_options: of fsspec, for the data files.
            catalog: that knows the table by its name, as in `fit_on_table`.

        Raises:
            InvalidInput: no such table, version or column, nulls, no rows. StoreError: a file cannot be read.
        """
        from spark_elastic.estimators.fit_rows import describe_table
        from spark_elastic.tables.catalogs import find_in_catalog

        table = find_in_catalog(catalog, table)
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
    def open(cls, url: str, catalog: Any = None, **storage_options: Any) -> Rows:
        """What `save` wrote.

        Args:
            catalog: that knows the rows' table, as in `from_table`.
            storage_options: of fsspec, for that file and those of the rows.

        Raises:
            InvalidInput: the rows are of no table of a catalog. StoreError: there is no such file, or it was altered.
        """
        folder, name = posixpath.split(str(url).rstrip("/"))
        document = Store.open(folder or ".", **storage_options).read_bytes(name)
        try:
            saved = json.loads(document)
            if saved["format"] != FORMAT:
                raise StoreError(f"{url} has format {saved['format']}, not {FORMAT}: save the Rows again.")
            manifest, table = Manifest.from_json(saved["manifest"]), saved.get("table")
            place, about = saved["store"], (saved["source"], saved["has_no_nan"])
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{url} is not what Rows.save writes: save the Rows again.") from error
        if catalog is not None:
            from spark_elastic.tables.catalogs import find_in_catalog

            if table is None:
                raise InvalidInput("These Rows were not made from a table of a catalog: leave catalog out.")
            storage_options = find_in_catalog(catalog, table).open(storage_options)[1]
        return cls(Store.open(place, **storage_options), manifest, *about)

    def dataset(self) -> RowDataset:
        """A map-style data set of torch: a row is a dict of tensors."""
        from spark_elastic.estimators.row_dataset import RowDataset

        return RowDataset(self)
