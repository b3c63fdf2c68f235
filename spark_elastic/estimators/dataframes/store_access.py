"""One store, used by two clients: Spark's JVMs write the rows, Python processes read them.

Translates the urls of stores for Spark, and its errors. Runs in the caller's thread.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager

from spark_elastic.data.store import Store, StoreFull, lacks_room
from spark_elastic.errors import InvalidInput

log = logging.getLogger("spark_elastic")

# fsspec's scheme -> Spark's.
_SPARK_SCHEMES = {"s3": "s3a", "gcs": "gs", "az": "abfss", "adl": "abfss", "abfs": "abfss"}


def to_spark_url(store: Store, name: str) -> str:
    """The url of an object as Spark takes it: s3 becomes s3a, and /dbfs/ of Databricks becomes dbfs:/.

    /Volumes/ gets no scheme: Spark takes it as Databricks' volumes there, and as a local folder elsewhere.
    """
    url = store.join(name)
    if store.is_local:
        path = store.path(name)
        if path.startswith("/Volumes/"):
            return path
        return f"dbfs:/{path.removeprefix('/dbfs/')}" if path.startswith("/dbfs/") else url
    scheme, _, rest = url.partition("://")
    scheme = _SPARK_SCHEMES.get(scheme, scheme)
    container, slash, path = rest.partition("/")
    account = getattr(store.filesystem, "account_name", None)
    if scheme == "abfss" and "@" not in container and account:  # which fsspec takes as an option
        container = f"{container}@{account}.dfs.core.windows.net"
    return f"{scheme}://{container}{slash}{path}"


def escape_pattern(path: str) -> str:
    """A path for Spark's readers, which take it for a pattern."""
    return re.sub(r"([{}\[\]*?\\])", r"\\\1", path)


@contextmanager
def translate_write_errors(store: Store) -> Iterator[None]:
    """Say what to change where a job cannot write rows to the store."""
    try:
        yield
    except Exception as error:  # of py4j or Spark Connect, around one of the JVM or Python's text
        text = str(error)
        if "No module named 'spark_elastic" in text:
            raise InvalidInput(
                "The executors do not have this package, by which rows are put in order: install it there, or write "
                "them with row_order='table'."
            ) from error
        *_, cause = re.findall(r"^Caused by: (.*)$", text, re.MULTILINE) or [""]
        own = re.search(rf"\b{StoreFull.__module__}\.{StoreFull.__name__}: (.*)", text)
        if own is None and not lacks_room(cause):
            raise
        raise StoreFull(
            f"Spark cannot write the rows to the store {store.url} ({cause if own is None else own[1].rstrip('.')}): "
            "make room in the store, or in the executors' own folders (spark.local.dir) if these are full."
        ) from error


def describe_cause(error: Exception) -> str:
    """An error in a line; of one of py4j, what the JVM raised."""
    found = getattr(error, "java_exception", None)
    text = f"{type(error).__name__}: {error}" if found is None else str(found)
    return text.partition("\n")[0].rstrip(".")
