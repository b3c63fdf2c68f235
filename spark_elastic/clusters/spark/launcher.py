"""Launches slots as single-task Spark jobs of a SparkContext, one thread per job.

Slot jobs inherit the caller's job group, pool and tags, and quote its description: the dispatcher thread is started
from the caller's thread and hands its local properties on. There is no barrier: a lost executor fails one job alone,
which the driver may launch again, and Spark's count of failures cannot end the training. Queued jobs make dynamic
allocation add executors. A cancelled job is reported as such.
"""

from __future__ import annotations

import logging
import queue
import secrets
from collections.abc import Callable
from typing import Any

from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark import InheritableThread, SparkContext
from pyspark.resource import ResourceProfile

from spark_elastic.clock import Clock
from spark_elastic.clusters.spark.host_facts import mark_jobs
from spark_elastic.clusters.spark.slot_task import CONTEXT_STOPPED, SlotTask, classify_error
from spark_elastic.driver.ports import Post, SlotOutcome, ThreadPerSlotLauncher
from spark_elastic.protocol.types import SlotSpec

log = logging.getLogger("spark_elastic.spark")


class SparkLauncher(ThreadPerSlotLauncher):
    """`driver.ports.Launcher` over a SparkContext of the classic (JVM) kind."""

    thread_class = InheritableThread

    def __init__(
        self,
        sc: SparkContext,
        make_task: Callable[[SlotSpec], SlotTask],
        clock: Clock,
        profile: ResourceProfile | None = None,
    ) -> None:
        """
        Args:
            make_task: builds the task that is shipped, once the driver listens.
            profile: what a slot takes of its executor; None: as any task.
        """
        super().__init__(clock)
        self._sc = sc
        self._profile = profile
        self._make_task = make_task
        self._task: SlotTask | None = None
        self._tag = ""
        self._launches: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._dispatcher: InheritableThread | None = None

    def start(self, spec: SlotSpec, post: Post) -> None:
        super().start(spec, post)
        # A tag of this launcher alone; Spark refuses commas in it.
        self._tag = f"spark_elastic-{spec.job_name}-{secrets.token_hex(4)}".replace(",", "_")
        self._task = self._make_task(spec)
        self._dispatcher = InheritableThread(target=self._dispatch, daemon=True)
        self._dispatcher.start()

    def launch(self, launch: int) -> None:
        self._launches.put(launch)

    def close(self, timeout: float) -> list[str]:
        deadline = self._clock.now() + timeout
        self._closing.set()
        self._launches.put(None)
        if self._dispatcher is not None:
            self._dispatcher.join(timeout)
        return super().close(max(0.0, deadline - self._clock.now()))

    def cancel(self) -> None:
        try:
            self._sc.cancelJobsWithTag(self._tag)
        except (Py4JError, AttributeError, OSError) as error:
            log.debug("nothing left to cancel: %s", error)  # the SparkContext is gone, and its jobs with it

    def run_slot(self, launch: int) -> SlotOutcome:
        assert self._task is not None
        try:
            # Without a JVM thread for each of Python's, later jobs of the user would bear the tag, too.
            with mark_jobs(self._sc, f"{self.spec.job_name} slot {launch}", self._tag):
                rdd = self._sc.parallelize([launch], 1)
                if self._profile is not None:
                    rdd = rdd.withResources(self._profile)
                results: list[Any] = rdd.mapPartitions(self._task).collect()
            return SlotOutcome(str(results[0]) if results else "the slot task returned nothing")
        except Exception as error:  # Spark has many ways to fail a job; the kind decides about a new launch
            return CONTEXT_STOPPED if self._is_gone(error) else classify_error(str(error))

    def explain_failed_start(self, error: Exception) -> SlotOutcome:
        return CONTEXT_STOPPED if self._is_gone(error) else super().explain_failed_start(error)

    def _is_gone(self, error: Exception) -> bool:
        """Whether the SparkContext was stopped, or its JVM has ended."""
        return self._sc._jsc is None or isinstance(error, Py4JNetworkError | ConnectionError)

    def _dispatch(self) -> None:
        """Start the slots' threads from a thread that has the caller's local properties."""
        while (launch := self._launches.get()) is not None:
            super().launch(launch)
