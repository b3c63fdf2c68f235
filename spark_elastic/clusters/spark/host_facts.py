"""What a job asks of the caller's SparkSession and of this machine: the session, words for Spark's UI, and addresses.

Any thread; no state. Imports neither py4j nor the SparkContext, which a client of Spark Connect does not have.
"""

from __future__ import annotations

import logging
import os
import platform
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.errors import PySparkException, PySparkRuntimeError
from pyspark.sql import SparkSession

import spark_elastic
from spark_elastic.errors import DriverUnreachable, InvalidInput
from spark_elastic.rendezvous.addresses import find_address_towards, is_loopback, is_own_address
from spark_elastic.worker.devices import collect_gpu_facts
from spark_elastic.worker.imports import list_module_places

if TYPE_CHECKING:
    from pyspark import SparkContext

log = logging.getLogger("spark_elastic.spark")

LOOPBACK = "127.0.0.1"
PROC = Path("/proc")
DESCRIPTION = "spark.job.description"  # a local property of the calling thread, which Spark Connect has not


def find_session() -> SparkSession | None:
    """The session that is active in this thread, which has made it, or else that of the process."""
    try:
        return SparkSession.active()
    except PySparkRuntimeError:
        return None


def get_session(given: SparkSession | None) -> SparkSession:
    """The given session, or the one that `find_session` finds. Raises InvalidInput: there is none."""
    chosen = find_session() if given is None else given
    if chosen is None:
        raise InvalidInput("there is no active SparkSession: create one, or pass it as spark=.")
    if not hasattr(chosen, "createDataFrame"):
        raise InvalidInput(
            f"spark must be a SparkSession; got {chosen!r}: give the one that SparkSession.builder made, or leave it "
            "out."
        )
    return chosen


def start_session(master: str, settings: Mapping[str, str]) -> SparkSession:
    """Raises InvalidInput: Spark cannot start one."""
    builder = SparkSession.builder.master(master).appName("spark_elastic")
    try:
        return builder.config(map=dict(settings)).getOrCreate()
    except PySparkException as error:
        raise InvalidInput(
            f"no session could be started at {master} ({error}): see whether Java 17 or newer is there, or set "
            "JAVA_HOME to it."
        ) from error


def has_context(session: SparkSession) -> bool:
    """Whether a session has a SparkContext: one of Spark Connect has none, and some clusters deny it to users."""
    try:
        return session.sparkContext is not None
    except Exception as error:  # of Spark, py4j or the cluster: in each case the context cannot be used
        log.debug("no SparkContext: %s", error)
        return False


# ---- what Spark's UI says of our jobs: the run and the slot, never a key or a value of `env`


@contextmanager
def describe_jobs(session: SparkSession, what: str) -> Iterator[None]:
    """As `mark_jobs`; does nothing if the session has no SparkContext."""
    with mark_jobs(session.sparkContext, what) if has_context(session) else nullcontext():
        yield


@contextmanager
def mark_jobs(sc: SparkContext, what: str, tag: str | None = None) -> Iterator[None]:
    """Describe the jobs of this thread, with the caller's own description in brackets. tag: to cancel them by."""
    before = sc.getLocalProperty(DESCRIPTION)
    sc.setLocalProperty(DESCRIPTION, f"spark_elastic {what}{f' ({before})' if before else ''}")
    if tag is not None:
        sc.addJobTag(tag)
    try:
        yield
    finally:
        with suppress(Exception):  # of a stopped SparkContext: what the block raised says more
            sc.setLocalProperty(DESCRIPTION, before)  # type: ignore[arg-type]
            if tag is not None:
                sc.removeJobTag(tag)


def find_own_address(towards: str | None, proc: Path = PROC) -> str:
    """This machine's address on the way to a host, or else of its own name; if possible, one that others reach."""
    if towards is not None:
        try:
            return find_reachable_address(towards, 1, proc)
        except DriverUnreachable:
            pass  # on some clusters executors do not know the name of Spark's driver
    return _replace_loopback(socket.gethostbyname(socket.gethostname()), proc)


def find_reachable_address(host: str, port: int, proc: Path = PROC) -> str:
    """This machine's address on the way to the driver. If that is a loopback address, since the driver is on this
    machine: the one under which Spark knows the executor. Raises DriverUnreachable: there is no way to that host."""
    address = find_address_towards(host, port)
    return address if is_loopback(host) else _replace_loopback(address, proc)


def _replace_loopback(address: str, proc: Path) -> str:
    if is_loopback(address):
        words, _ = find_executor(proc)
        with suppress(OSError, ValueError, IndexError):
            known = socket.gethostbyname(words[words.index(b"--hostname") + 1].decode())
            return known if is_own_address(known) and not is_loopback(known) else address
    return address


def find_executor(proc: Path = PROC) -> tuple[list[bytes], int]:
    """The command line and process id of the JVM among this process's ancestors: that of an executor, or in local mode
    Spark's own. Nothing and 0 where processes of other users are hidden."""
    pid = os.getpid()
    with suppress(OSError):
        while pid > 1:
            words = (proc / str(pid) / "cmdline").read_bytes().split(b"\0")
            if b"--executor-id" in words or words[0].rpartition(b"/")[2] == b"java":
                return words, pid
            pid = int((proc / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()[1])
    return [], 0


# ---- what a host reports about itself, for `probe.find_mismatch`


def collect_host_facts() -> dict[str, str]:
    """This process's host name, versions of installed packages, without imports, and what is known of its GPUs."""
    own = {"python": platform.python_version(), "spark_elastic": spark_elastic.__version__}
    facts = {"host": socket.gethostname(), **own}
    from importlib import metadata  # it takes long

    places = list_module_places()
    for package in ("numpy", "torch", "tensorflow", "keras"):
        for installed in metadata.distributions(name=package, path=places):
            facts.setdefault(package, installed.version)
    return facts | collect_gpu_facts(os.environ)
