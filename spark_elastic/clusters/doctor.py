"""The lines of `spark-elastic doctor`: what is installed, what a cluster offers and what a job would be refused for. It
decides nothing of its own: each remark is what the checks before a job, and its preflight, say. Calling thread."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spark_elastic.config import ElasticConfig, from_env
from spark_elastic.data.store import Store
from spark_elastic.errors import ElasticError, InvalidInput
from spark_elastic.worker.entry import find_tls_problem
from spark_elastic.worker.pickling import pickle_for_workers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FRAMEWORKS = ("torch", "tensorflow", "keras")


@dataclass(frozen=True)
class Finding:
    """One line; `refused`: a job that needs this would be refused."""

    text: str
    refused: bool = False
    warned: bool = False

    def __str__(self) -> str:
        mark = "refused" if self.refused else "warning" if self.warned else "ok"
        return f"{mark:8} {self.text}"


def examine(
    spark: SparkSession | None = None, store: str | None = None, workers: int | None = None
) -> Iterator[Finding]:
    """Examine this machine, then the store (as a job's), then the session's cluster by a preflight for `workers`."""
    config = from_env()
    try:
        from spark_elastic.clusters.spark.host_facts import collect_host_facts

        own = _describe(collect_host_facts())
        yield Finding(f"this machine: {own}; {platform.system()} {platform.machine()}")
    except ImportError as error:
        advice = "without it, spark-elastic-run works alone."
        yield Finding(f"pyspark cannot be imported ({error}): {advice}", True)
    problem = find_tls_problem()
    yield Finding(problem or "the engine loads, and can encrypt", warned=problem is not None)
    opened = None
    if store is not None:
        try:
            opened = Store.open(store)
        except ElasticError as error:
            yield Finding(str(error), refused=True)
            return
    if spark is not None:
        yield from _examine_cluster(spark, config, opened, workers)
    elif opened is not None:
        from spark_elastic.clusters.spark.probe import Probe

        try:
            with Probe(store=opened).open():
                what = f"the store {opened.url} can be written here"
                yield Finding(f"{what}; whether hosts see it, a cluster tells")
        except ElasticError as error:
            yield Finding(str(error), refused=True)


def _describe(facts: Mapping[str, str]) -> str:
    """A host's versions and GPUs, in words."""
    names = [name for name in ("spark_elastic", "python", "numpy", *FRAMEWORKS) if name in facts]
    lacking = [name for name in FRAMEWORKS if name not in facts]
    missing = f"; no {', '.join(lacking)}" if lacking else ""
    return f"{', '.join(f'{name} {facts[name]}' for name in names)}{missing}; {facts['gpus']} GPUs"


def _examine_cluster(
    spark: SparkSession, config: ElasticConfig, store: Store | None, workers: int | None
) -> Iterator[Finding]:
    """The checks of a job of these frameworks, up to its first slot."""
    from spark_elastic.clusters.spark import make_platform
    from spark_elastic.clusters.spark.host_facts import collect_host_facts

    needs = tuple(name for name in FRAMEWORKS if name in collect_host_facts())
    try:
        cluster = make_platform(spark, config)
        number = cluster.count_workers(workers)
        yield Finding(f"Spark {spark.version} at {cluster.master}; a job would ask for {number} workers")
        for remark in cluster.list_warnings():
            yield Finding(remark, warned=True)
        hosts = cluster.preflight(pickle_for_workers(None), store, needs, number, "an empty program")
    except ElasticError as error:
        yield Finding(str(error), refused=True)
        return
    room = number
    with suppress(InvalidInput):  # sessions of Spark Connect do not tell
        room = cluster.count_workers(None)
    if number > room:
        short = f"there is room for {room} of {number} workers now: the others wait, or min_workers begin without them"
        yield Finding(short, warned=True)
    kinds = Counter(_describe(host) for host in hosts)
    for kind, count in kinds.items():
        yield Finding(f"{count} executor{'s' if count > 1 else ''}: {kind}")
    shared = "" if store is None else f", and all hosts see the store {store.url}"
    yield Finding(f"a job that uses {', '.join(needs) or 'no framework'} passes its checks{shared}")
