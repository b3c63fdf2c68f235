"""What the answers of probes mean for a job: the first reason against it, as an error."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import spark_elastic
from spark_elastic.data.store import Store
from spark_elastic.errors import ElasticError, PreflightError
from spark_elastic.spark.checks.probe import Report


def genuine(answer: Any) -> Report:
    """Raises PreflightError where a probe found no spark_elastic to load."""
    if isinstance(answer, Report):
        return answer
    host, reason = answer
    version = spark_elastic.__version__
    raise PreflightError(
        f"host {host} cannot load spark_elastic ({reason}), and the driver has {version}: install "
        f"spark_elastic {version} there, or send it along with ship=True."
    )


def judge_all(
    reports: list[Report],
    judge: Callable[[Mapping[str, Any]], str | None],
    store: Store | None,
    reached: bool = True,
) -> None:
    """Raises PreflightError with what the first host lacks, or where the driver does not see what a host wrote.

    reached: hosts must reach the driver.
    """
    # Versions first: they explain why a program does not load.
    faults = [*(judge(report.facts) for report in reports), *(report.fault for report in reports)]
    for fault in [*faults, *(report.unreached for report in reports if reached)]:
        if fault is not None:
            raise PreflightError(fault)
    for report in reports if store is not None else []:
        assert store is not None
        try:
            store.read_bytes(report.written)
        except (ElasticError, OSError) as error:
            raise PreflightError(
                f"the driver does not see what host {report.facts['host']} wrote to the store {store.url}: "
                "choose a place that all machines share, such as s3://, hdfs:// or a network drive."
            ) from error
