"""What a process says of itself and of its jobs in Spark's UI, and which session it takes."""

from __future__ import annotations

import platform
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyspark")

import spark_elastic
from spark_elastic.clusters.spark.host_facts import (
    DESCRIPTION,
    collect_host_facts,
    describe_jobs,
    get_session,
    set_description,
)
from spark_elastic.clusters.spark.launcher import SparkLauncher
from spark_elastic.errors import InvalidInput
from spark_elastic.protocol.types import SlotSpec
from spark_elastic.testing.fakes import FakeClock


class Properties(dict[str, Any]):
    """Local properties of a thread, as a SparkContext keeps them."""

    getLocalProperty = dict.get
    setLocalProperty = dict.__setitem__


def test_a_job_description_quotes_that_of_the_caller() -> None:
    sc: Any = Properties()
    set_description(sc, "RUN slot 3")
    assert sc[DESCRIPTION] == "spark_elastic RUN slot 3"
    sc[DESCRIPTION] = "mine"
    set_description(sc, "RUN slot 3")
    assert sc[DESCRIPTION] == "spark_elastic RUN slot 3 (mine)"


@pytest.mark.parametrize("before", ["mine", None])
def test_the_callers_description_is_restored(before: str | None) -> None:
    sc: Any = Properties({DESCRIPTION: before})
    session: Any = SimpleNamespace(sparkContext=sc)
    with describe_jobs(session, "writes rows"):
        assert sc[DESCRIPTION].startswith("spark_elastic writes rows")
    assert sc[DESCRIPTION] == before


@pytest.mark.parametrize("lost", [False, True])
def test_a_slot_job_leaves_neither_tag_nor_description_to_its_thread(lost: bool) -> None:
    tags: set[str] = set()
    during: list[tuple[int, str]] = []
    sc: Any = Properties({DESCRIPTION: "mine"})
    sc._jsc, sc.addJobTag, sc.removeJobTag = 1, tags.add, tags.remove

    def collect() -> list[str]:
        during.append((len(tags), sc[DESCRIPTION]))
        if lost:
            raise RuntimeError("ExecutorLostFailure")
        return ["released"]

    rdd = SimpleNamespace(mapPartitions=lambda task: SimpleNamespace(collect=collect))
    sc.parallelize = lambda launches, partitions: rdd
    task: Any = SimpleNamespace()  # nothing runs it
    launcher = SparkLauncher(sc, lambda spec: task, FakeClock())
    launcher.start(SlotSpec(address="", key=b"", attempt=1, job_name="RUN"), lambda event: None)
    try:
        assert launcher.run_slot(3).executor_lost == lost
    finally:
        launcher.close(1.0)
    assert during == [(1, "spark_elastic RUN slot 3 (mine)")]
    assert (tags, sc[DESCRIPTION]) == (set(), "mine")


def test_a_session_without_a_context_has_no_descriptions() -> None:
    with describe_jobs(SimpleNamespace(), "writes rows"):  # type: ignore[arg-type]
        pass


def test_the_error_of_a_block_in_which_the_session_stops_comes_through() -> None:
    sc: Any = Properties()
    session: Any = SimpleNamespace(sparkContext=sc)

    def stop(*_: object) -> None:
        raise AttributeError("'NoneType' object has no attribute 'setLocalProperty'")

    def write() -> None:
        with describe_jobs(session, "writes rows"):
            sc.setLocalProperty = stop
            raise ValueError("the write ended")

    with pytest.raises(ValueError, match="the write ended"):
        write()


def test_host_facts_are_those_of_this_process() -> None:
    found = collect_host_facts()
    assert found["python"] == platform.python_version()
    assert found["spark_elastic"] == spark_elastic.__version__
    assert found["host"]


def test_a_master_is_no_session() -> None:
    for given in ("local", ""):
        with pytest.raises(InvalidInput, match=f"spark must be a SparkSession; got '{given}'"):
            get_session(given)  # type: ignore[arg-type]
