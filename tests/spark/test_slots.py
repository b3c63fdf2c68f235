"""Slots on a real cluster: Spark's own retries do not matter, ports are kept, output reaches the driver."""

from __future__ import annotations

import random
import socket
import sys
from pathlib import Path

import cloudpickle
import psutil
import pytest
from pyspark.sql import SparkSession

from elastic_collectives import Group
from spark_elastic.monitoring.listener import JobListener
from spark_elastic.protocol.types import Limits, WorldView
from spark_elastic.testing.fakes import CountingProgram
from spark_elastic.worker.program import Outcome, WorkerHandle
from tests.spark.cluster import StandaloneCluster, await_true
from tests.spark.stories import HeldProgram, ScenarioListener, are_ranks_in_order, is_sum_exact, launch

pytestmark = [pytest.mark.spark, pytest.mark.native, pytest.mark.slow]


def free_port() -> int:
    """Below the ports that the kernel hands out, so that nobody else gets it by chance."""
    for port in random.sample(range(20000, 32000), 100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise RuntimeError("no port from 20000 to 32000 is free")


@pytest.mark.faults
def test_r18_killed_executors_are_proven_dead(spark: SparkSession, standalone: StandaloneCluster) -> None:
    """A world without survivors does not wait for what the driver's silence would end."""
    program = CountingProgram(steps=120, seconds=0.04)

    def kill_all() -> None:
        for pid in standalone.executor_pids():
            standalone.kill_executor(pid)

    result = launch(spark, program, Limits(3, 1, 3), ScenarioListener((30, None, kill_all)))
    reasons = ["for lack of a checkpoint" in world.reason for world in result.worlds]
    anew = reasons.index(True)
    waited = result.worlds[anew].seconds - result.worlds[anew - 1].seconds
    assert waited < Limits(3, 1, 3).driver_timeout / 2


class RankPrintingProgram(HeldProgram):
    """Prints its rank."""

    def run(self, world: WorldView, group: Group, session: WorkerHandle) -> Outcome:
        sys.stdout.write(f"I am {group.rank}\n")
        return super().run(world, group, session)


class Listener(JobListener):
    """Makes a file once two ranks have said who they are."""

    def __init__(self, heard: Path) -> None:
        self._heard = heard
        self.said: set[tuple[int | None, str]] = set()

    def on_output(self, worker: str, rank: int | None, line: str) -> None:
        if line.startswith("I am"):
            self.said.add((rank, line))
        if len(self.said) == 2:
            self._heard.touch()


@pytest.mark.scenario("S1")
def test_an_undisturbed_run_succeeds_with_lines_of_each_rank_and_ports_of_the_range(
    spark: SparkSession, tmp_path: Path
) -> None:
    cloudpickle.register_pickle_by_value(sys.modules[RankPrintingProgram.__module__])
    port, first = free_port(), free_port()
    program = RankPrintingProgram(tmp_path)
    listener, limits = Listener(program.over), Limits(2, 1, 2, gather_timeout=60.0)
    ports = {"driver_port": port, "worker_port_range": (first, first + 20)}
    result = launch(spark, program, limits, listener, advertise_address="localhost", **ports)
    assert [world.size for world in result.worlds] == [2]
    assert are_ranks_in_order(result)
    assert is_sum_exact(result, program)
    assert listener.said == {(0, "I am 0"), (1, "I am 1")}


def test_slot_jobs_carry_what_their_caller_set_and_children_die_with_their_executor(
    spark: SparkSession, standalone: StandaloneCluster, tmp_path: Path
) -> None:
    sc, program = spark.sparkContext, HeldProgram(tmp_path)
    children: list[psutil.Process] = []
    said: dict[str, set[str]] = {}

    def look_and_kill() -> None:
        store = sc._jsc.sc().statusStore()
        slots = set(sc.statusTracker().getJobIdsForGroup("mine"))
        listed = store.jobsList(None)
        jobs = [listed.apply(i) for i in range(listed.size()) if listed.apply(i).jobId() in slots]
        stages = store.activeStages()
        said["descriptions"] = {str(job.description().get()) for job in jobs}
        said["tagged"] = {str(job.jobTags().contains("theirs")) for job in jobs}
        said["pools"] = {str(stages.apply(i).schedulingPool()) for i in range(stages.size())}
        busy = standalone.busy_executors()
        children.extend(standalone.training_children(busy[0]))
        standalone.kill_executor(busy[0])
        program.over.touch()

    sc.setJobGroup("mine", "described")
    sc.addJobTag("theirs")
    sc.setLocalProperty("spark.scheduler.pool", "lane")
    try:
        striker = ScenarioListener((5, None, look_and_kill))
        launch(spark, program, Limits(2, 1, 2), striker, name="carried")
    finally:
        for name in ("spark.jobGroup.id", "spark.job.description", "spark.scheduler.pool"):
            sc.setLocalProperty(name, None)
        sc.removeJobTag("theirs")
    slots = {f"spark_elastic carried slot {job} (described)" for job in (1, 2)}
    assert said == {"descriptions": slots, "tagged": {"True"}, "pools": {"lane"}}
    assert children
    ended = "the executor's workers to end"
    await_true(lambda: not any(child.is_running() for child in children), ended, 10.0)
