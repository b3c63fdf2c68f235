"""Where the driver of a job over Spark listens, and under which name executors dial it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_elastic.config import ElasticConfig
from spark_elastic.rendezvous.serving import Bind

if TYPE_CHECKING:
    from pyspark import SparkConf

LOOPBACK = "127.0.0.1"


def bind_of(conf: SparkConf, config: ElasticConfig) -> Bind:
    """Where the driver listens: as the job's configuration says, else at Spark's own address."""
    name = config.advertise_address or conf.get("spark.driver.host", LOOPBACK) or LOOPBACK
    host = config.bind_address or conf.get("spark.driver.bindAddress", name) or name
    return Bind(host, config.driver_port, name)
