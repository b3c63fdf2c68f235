"""Where the driver of a job over Spark listens, and under which name executors dial it."""

from __future__ import annotations

import importlib.metadata
import logging
import platform
import socket
from typing import TYPE_CHECKING

from pyspark.sql import SparkSession

import spark_elastic
from spark_elastic.config import ElasticConfig
from spark_elastic.errors import DriverUnreachable, InvalidInput
from spark_elastic.rendezvous.serving import Bind

if TYPE_CHECKING:
    from pyspark import SparkConf


LOOPBACK = "127.0.0.1"


def choose_bind(conf: SparkConf, config: ElasticConfig) -> Bind:
    """Where the driver listens: as the job's configuration says, else at Spark's own address."""
    name = config.advertise_address or conf.get("spark.driver.host", LOOPBACK) or LOOPBACK
    host = config.bind_address or conf.get("spark.driver.bindAddress", name) or name
    return Bind(host, config.driver_port, name)


# This machine's address as others of the cluster know it. Any thread; no state.


def find_address_towards(host: str, port: int) -> str:
    """This machine's own address on the way to the driver: peers of the same cluster reach it there, too."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise DriverUnreachable(
            f"There is no way to the driver's rendezvous server at {host}:{port} ({error}): set advertise_address to "
            "a name or address that executors know."
        ) from error


def find_own_address(towards: str | None) -> str:
    """This machine's address on the way to a host; if that host is unknown here, the address of this machine's name."""
    if towards is not None:
        try:
            return find_address_towards(towards, 1)
        except DriverUnreachable:
            pass  # a name that executors of some clusters do not know
    return socket.gethostbyname(socket.gethostname())


# What a process says of itself, for `admission` to judge: its host and what is installed. Any thread; no state.


def collect_host_facts() -> dict[str, str]:
    """This process's host name and the versions of what is installed; imports none of it."""
    found = {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "spark_elastic": spark_elastic.__version__,
    }
    for package in ("numpy", "torch", "tensorflow", "keras"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


# The SparkSession that a call is meant for.


log = logging.getLogger("spark_elastic.spark")


def get_session(given: SparkSession | None) -> SparkSession:
    """The given one, or the active one.

    Raises:
        InvalidInput: there is none.
    """
    chosen = given or SparkSession.getActiveSession()
    if chosen is None:
        raise InvalidInput("there is no active SparkSession: create one, or pass it as spark=.")
    return chosen


def has_context(session: SparkSession) -> bool:
    """Whether a session has a SparkContext: one of Spark Connect has none, and some clusters deny it to users."""
    try:
        return session.sparkContext is not None
    except Exception as error:  # of Spark, py4j or the cluster: whatever it is, no session can be used
        log.debug("no SparkContext: %s", error)
        return False
