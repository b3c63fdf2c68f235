"""One store, used by two clients: Spark's JVMs write the rows, Python processes read them.

Translates the urls of stores for Spark, and its errors, and checks that both clients reach the same place. Runs in the
caller's thread.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from pyspark.sql import SparkSession

from spark_elastic.data.store import Store, StoreFull, lacks_room
from spark_elastic.errors import InvalidInput, StoreError

# fsspec's scheme -> Spark's.
_SPARK_SCHEMES = {"s3": "s3a", "gcs": "gs", "az": "abfss", "adl": "abfss", "abfs": "abfss"}
# Spark's settings of credentials, by scheme, for error messages.
_SETTINGS = {
    "s3a": "spark.hadoop.fs.s3a.access.key, .secret.key and .endpoint, with hadoop-aws in spark.jars.packages",
    "gs": "spark.hadoop.fs.gs.auth.*, with the gcs-connector in spark.jars",
    "abfss": "spark.hadoop.fs.azure.account.*, with hadoop-azure in spark.jars.packages",
    "": "spark.hadoop.fs.defaultFS",
    "hdfs": "HADOOP_CONF_DIR and the Hadoop user",
}


def to_spark_url(store: Store, name: str) -> str:
    """The url of an object as Spark takes it: s3 becomes s3a, /dbfs/ of Databricks dbfs:/, and /Volumes/ stays: Spark
    takes it as Databricks' volumes there, and as a local folder elsewhere."""
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


def check_store_access(spark: SparkSession, store: Store) -> None:
    """Write an object in Python and look for it in the JVM. Raises StoreError that names the side that fails."""
    name, token = f"probes/{uuid.uuid4().hex}", uuid.uuid4().hex
    try:
        store.write_bytes(name, token.encode())
    except StoreError as error:
        raise StoreError(
            f"{error} This was the driver's Python side, as {_describe_python_client(store)}."
        ) from error
    try:
        _read_in_jvm(spark, store, name, token)
    finally:
        store.discard(name)
        store.remove_empty_folder("probes")


def _read_in_jvm(spark: SparkSession, store: Store, name: str, token: str) -> None:
    gateway: Any = vars(spark).get("_jvm")
    if gateway is None:  # Spark Connect: the first write will show it
        return
    from py4j.protocol import Py4JError  # clients of Spark Connect have no py4j

    try:
        identity = str(gateway.org.apache.hadoop.security.UserGroupInformation.getCurrentUser().getUserName())
        configuration = spark._jsparkSession.sessionState().newHadoopConf()
    except Py4JError:  # the cluster denies access to the JVM: the first write will show it
        return
    url = to_spark_url(store, name)
    scheme = urlsplit(url).scheme
    settings = _SETTINGS.get(scheme, f"spark.hadoop.fs.{scheme}.*")
    try:
        path = gateway.org.apache.hadoop.fs.Path(url)
        filesystem = path.getFileSystem(configuration)
        there = filesystem.exists(path)
        seen = int(filesystem.getFileStatus(path).getLen()) if there else -1
    except Exception as error:  # of py4j, around any exception of the JVM
        raise StoreError(
            f"Spark's side cannot use the store {store.url} as {url.partition('/probes/')[0]}, as user {identity} "
            f"({describe_cause(error)}): look at {settings}."
        ) from error
    if seen != len(token):
        raise StoreError(
            f"Spark's side, as user {identity}, does not see at {url} what Python wrote to the store {store.url}: the "
            f"two look at different places; Spark goes by {settings}, Python by storage_options."
        )


def _describe_python_client(store: Store) -> str:
    """The type of client and, if known, its user or the beginning of its key; never a secret."""
    filesystem = store.filesystem
    who = getattr(filesystem, "key", None) or getattr(filesystem, "user", None)
    client = type(filesystem).__name__
    if not who:
        return f"{client} with its default credentials"
    return f"{client} with the key or user {str(who)[:4]}..."


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
