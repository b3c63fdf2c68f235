"""Spark's own failures as sentences."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyspark")

from spark_elastic.clusters.spark.preflight import ProbeJob, _run_probes, _translate_error
from spark_elastic.errors import JobCancelled, PreflightError

LOST = "Job aborted: Lost task 0.0 in stage 0.0 (TID 0) (10.0.0.7 executor 1): PythonException: Traceback\n"


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        (
            f"{LOST}[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.10 than that in driver: 3.11, "
            "PySpark cannot run with different minor versions.",
            PreflightError,
            "host 10.0.0.7 has python 3.10, and the driver has 3.11: set PYSPARK_PYTHON to the same",
        ),
        ("Job 3 cancelled part of cancelled job group g", JobCancelled, ""),
        ("disk full", RuntimeError, "disk full"),
    ],
)
def test_errors_of_spark_are_translated(text: str, kind: type[Exception], says: str) -> None:
    explained = _translate_error(RuntimeError(text))
    assert type(explained) is kind
    assert says in str(explained)


class OtherJobs:
    """Jobs of an application, one of which may train: it ends with the first question. holder: its name."""

    def __init__(self, holder: str | None) -> None:
        self.free = threading.Event()
        self._holder = holder

    def find_training_job(self) -> str | None:
        if self._holder is not None:
            self.free.set()
        return self._holder


class FullCluster:
    """A SparkContext whose cores are in use until the others let go of them."""

    def __init__(self, others: OtherJobs) -> None:
        self._spark_elastic_job_queue = others

    def collect(self) -> list[str]:
        assert self._spark_elastic_job_queue.free.wait(30)
        return ["answer"]

    def parallelize(self, *rows: Any) -> FullCluster:
        return self

    mapPartitions = parallelize

    def setLocalProperty(self, *property: Any) -> None: ...

    getLocalProperty = addJobTag = removeJobTag = setLocalProperty

    def cancelJobsWithTag(self, tag: str) -> None:
        self._spark_elastic_job_queue.free.set()


def test_the_preflight_waits_while_another_job_trains() -> None:
    sc: Any = FullCluster(OtherJobs("a long fit"))
    assert _run_probes(sc, lambda answers: answers, 2, ProbeJob("tag", 0.0)) == ["answer"]


def test_the_error_of_a_stopped_context_is_that_of_its_job() -> None:
    class Stopped(FullCluster):
        def collect(self) -> list[str]:
            raise RuntimeError("Job 3 cancelled because SparkContext was shut down")

        def removeJobTag(self, tag: str) -> None:
            raise AttributeError("'NoneType' object has no attribute 'removeJobTag'")

    sc: Any = Stopped(OtherJobs(None))
    with pytest.raises(JobCancelled):
        _run_probes(sc, lambda answers: answers, 2, ProbeJob("tag", 30.0))


class Tracker:
    """Spark's statusTracker and what it returns: one job of one stage."""

    def __init__(self, running: int) -> None:
        self.numActiveTasks = lambda: running
        self.statusTracker = self.get = lambda: self
        self.getJobIdsForTag = self.getJobInfo = self.getStageInfo = lambda _: self
        self.stageIds = lambda: [0]

    def __iter__(self) -> Iterator[int]:
        return iter([0])


@pytest.mark.parametrize(
    ("tracker", "says"),
    [
        (None, "no executor took a probe within 0 s"),
        (Tracker(2), r"^2 probes of the hosts were still loading the program after 0 s \(start_timeout\)"),
        (Tracker(0), r"while the job wants 8 slots and Spark counts 2 cores: free some of them"),
    ],
)
def test_a_preflight_ends_at_its_timeout_and_says_what_took_the_time(
    tracker: Tracker | None, says: str
) -> None:
    sc: Any = FullCluster(OtherJobs(None))
    if tracker is not None:
        sc._jsc, sc.defaultParallelism = SimpleNamespace(sc=lambda: tracker), 2
    with pytest.raises(PreflightError, match=says):
        _run_probes(sc, lambda answers: answers, 2, ProbeJob("tag", 0.0, workers=8))
