"""`spark_elastic.run` on a real cluster."""

from __future__ import annotations

import io
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from pyspark.sql import SparkSession

import spark_elastic
from spark_elastic.clusters.spark.host_facts import get_session
from spark_elastic.errors import InvalidInput, PreflightError
from tests.component.torch.hand_written import count
from tests.scenarios import Fault
from tests.spark.cluster import StandaloneCluster
from tests.spark.stories import ActAtStep

pytestmark = [pytest.mark.spark, pytest.mark.native]

STEPS = 20

for name in (__name__, count.__module__):
    cloudpickle.register_pickle_by_value(sys.modules[name])


def describe_worker(greeting: str) -> tuple[object, ...]:
    import os

    from pyspark import SparkFiles

    forked = "spark_elastic.worker.fork_server" in sys.modules
    added = os.path.exists(SparkFiles.get(os.path.basename(__file__)))
    world = os.environ["RANK"], spark_elastic.task_resources(), os.environ["WORLD_SIZE"]
    return greeting, *world, forked, added


def test_run_uses_all_room_of_spark_and_returns_results_in_rank_order(spark: SparkSession) -> None:
    spark.sparkContext.addFile(__file__)
    # On the active session.
    results = spark_elastic.run(describe_worker, args=("hello",), stdout=io.StringIO(), gather_timeout=60.0)
    assert results == [("hello", str(rank), {}, "3", True, True) for rank in range(3)]


def count_through_a_kill(cluster: StandaloneCluster, fault: Fault, *given: object) -> tuple[Any, ActAtStep]:
    """The loop on the active session, one of whose executors is killed: its results, and what it printed."""
    stream = ActAtStep(lambda: fault(cluster.kill_executor, cluster.executor_pids()[0]))
    settings: dict[str, Any] = {"num_proc": 3, "min_np": 1, "stdout": stream, "gather_timeout": 60.0}
    results = spark_elastic.run(count, (STEPS, *given), **settings)
    stream.thread.join()
    return results, stream


def test_a_hand_written_loop_survives_a_killed_executor(
    spark: SparkSession, standalone: StandaloneCluster, fault: Fault
) -> None:
    results, stream = count_through_a_kill(standalone, fault, 1, False, {10: 2})
    assert {result["number"] for result in results} == {STEPS}
    assert stream.getvalue().count("world of ") >= 2
    assert results.report.recoveries


@pytest.mark.faults
@pytest.mark.scenario("G16")
@pytest.mark.timeout(180)
def test_w3_uncommitted_steps_are_counted_once_although_an_executor_dies_and_another_joins(
    spark: SparkSession, standalone: StandaloneCluster, fault: Fault
) -> None:
    """The loss goes back to the commit of step 8; who joins finds the values of step 14, which nobody committed."""
    results, _ = count_through_a_kill(standalone, fault, 4, True, {10: 2, 14: 3})
    assert {result["number"] for result in results} == {STEPS}
    assert results.report.recoveries
    ends = {tuple(result["trained"][-(STEPS - 8) :]) for result in results}
    assert ends == {tuple(range(8, STEPS)), tuple(range(14, STEPS))}


def test_other_threads_than_the_one_that_made_the_session_find_it(spark: SparkSession) -> None:
    """Spark knows an active session only in the thread that made it; parallel jobs are started by others."""
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(get_session, None).result()
    assert found.sparkContext is spark.sparkContext


def test_a_captured_session_broadcast_or_frame_is_refused_by_its_name(spark: SparkSession) -> None:
    shared, table = spark.sparkContext.broadcast(3), spark.range(3)
    sc = spark.sparkContext
    for fn, name in (
        (lambda: spark.range(3), "'spark', a SparkSession"),
        (lambda: sc.version, "'sc', a SparkContext"),
        (lambda: shared.value, "'shared', a Broadcast"),
        (lambda: table.count() + 1, "'table', a DataFrame"),
    ):
        with pytest.raises(InvalidInput, match=name):
            spark_elastic.run(fn, spark=spark)


def test_a_host_that_lacks_a_package_is_named_before_any_slot_starts(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_beside_the_driver.py").write_text("def train():\n    return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import only_beside_the_driver

    with pytest.raises(PreflightError, match=r"cannot load the function .*only_beside_the_dri"):
        spark_elastic.run(only_beside_the_driver.train, spark=spark)
    del sys.modules["only_beside_the_driver"]
    elsewhere = {"advertise_address": "127.0.0.2", "bind_address": "127.0.0.1"}
    with pytest.raises(PreflightError, match=r"cannot reach the driver at 127\.0\.0\.2:.*advertise_address"):
        spark_elastic.run(describe_worker, args=("nobody",), spark=spark, **elsewhere)


def world_size() -> str:
    import os

    return os.environ["WORLD_SIZE"]


def test_r17_jobs_that_need_all_slots_each_do_not_wait_for_each_other(spark: SparkSession) -> None:
    def run_one(number: int) -> list[str]:
        how: dict[str, Any] = {"num_proc": 3, "min_np": 3, "start_timeout": 120, "stdout": io.StringIO()}
        return spark_elastic.run(world_size, spark=spark, **how)

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(run_one, range(3))) == [["3"] * 3] * 3
