"""Carries slots as single-task Spark jobs, one thread per job.

Slot jobs inherit the caller's job group, pool and tags, and quote its description: the dispatcher thread is started
from the caller's thread and hands its local properties on. A lost executor fails one job alone, which the driver may
launch again; a cancelled one is reported as such.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from py4j.protocol import Py4JError, Py4JNetworkError
from pyspark import InheritableThread, SparkContext
from pyspark.resource import ResourceProfile

from spark_elastic.clock import Clock
from spark_elastic.driver.ports import Contact, Post
from spark_elastic.protocol.events import LaunchEnded
from spark_elastic.spark.address import has_context
from spark_elastic.spark.slot_task import SlotTask

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession


# How a Spark job ended, read off Spark's own words: cancelled, its executor lost, or failed in another way.


CANCELLED = (
    "SPARK_JOB_CANCELLED",
    "cancelled job",
    "cancelled part of",
    "was cancelled",
    "JOB_GROUP_CANCELLED",
    "OPERATION_CANCELED",  # Spark Connect's word
)
EXECUTOR_LOST = "ExecutorLostFailure"
STOPPED = ("SparkContext was shut down", "SparkContext has been shut down", "stopped SparkContext")


class SlotEnd(NamedTuple):
    """How a slot job ended, as `LaunchEnded` has it."""

    reason: str
    cancelled: bool = False
    host_lost: bool = False


def classify(text: str) -> SlotEnd:
    """Why a Spark job failed, in one line; text: of the error."""
    if any(word in text for word in STOPPED):
        return SlotEnd("the SparkContext was stopped", cancelled=True)
    if any(word in text for word in CANCELLED):
        return SlotEnd(f"the slot job was cancelled: {_first_line(text)}", cancelled=True)
    return SlotEnd(_first_line(text), host_lost=EXECUTOR_LOST in text)


def join_all(threads: Sequence[threading.Thread], clock: Clock, deadline: float) -> None:
    """Wait for all of them until `deadline`."""
    for thread in threads:
        thread.join(max(0.0, deadline - clock.now()))


def _first_line(text: str) -> str:
    """The line of a py4j error that says what happened."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = next((line for line in lines if "org.apache.spark" in line), lines[0] if lines else "")
    return said[:300]


# What Spark's UI says of our jobs. A local property of the calling thread, to which Spark Connect has no way.
#
# Owns the words; they name the run and the slot, never a key or a value of `env`. Any thread.


DESCRIPTION = "spark.job.description"


def set_description(sc: SparkContext, what: str) -> None:
    """Say of this thread's next jobs what they are, and in brackets what the caller said of them."""
    said = sc.getLocalProperty(DESCRIPTION)
    sc.setLocalProperty(DESCRIPTION, f"spark_elastic {what}{f' ({said})' if said else ''}")


@contextmanager
def describe_jobs(session: SparkSession, what: str) -> Iterator[None]:
    """The same for jobs of the caller's thread; afterwards it is as it was."""
    if not has_context(session):
        yield
        return
    sc = session.sparkContext
    before = sc.getLocalProperty(DESCRIPTION)
    set_description(sc, what)
    try:
        yield
    finally:
        sc.setLocalProperty(DESCRIPTION, before)  # type: ignore[arg-type]


log = logging.getLogger("spark_elastic.spark")

CANCEL_EVERY = 0.5  # seconds between two cancels of what still runs at the end


class SparkLauncher:
    """`driver.ports.Launcher` over a SparkContext of the classic (JVM) kind.

    make_task: builds the shipped task once the contact is known. profile: what a slot takes of its executor; None: as
    any task.
    """

    def __init__(
        self,
        sc: SparkContext,
        make_task: Callable[[Contact], SlotTask],
        clock: Clock,
        profile: ResourceProfile | None = None,
    ) -> None:
        self._sc = sc
        self._profile = profile
        self._make_task = make_task
        self._clock = clock
        self._tag = ""
        self._name = ""
        self._orders: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._carriers: list[InheritableThread] = []
        self._dispatcher: InheritableThread | None = None

    def start(self, contact: Contact, post: Post) -> None:
        # A tag of this launch alone; Spark refuses commas in it.
        self._name = contact.job_name
        self._tag = f"spark_elastic-{contact.job_name}-{secrets.token_hex(4)}".replace(",", "_")
        task = self._make_task(contact)
        self._dispatcher = InheritableThread(target=self._dispatch, args=(task, post), daemon=True)
        self._dispatcher.start()

    def launch(self, job: int) -> None:
        self._orders.put(job)

    def close(self, timeout: float) -> list[str]:
        """Slots were released by message before; what still runs is cancelled at Spark."""
        deadline = self._clock.now() + timeout
        self._closing.set()
        self._orders.put(None)
        if self._dispatcher is None:
            return []
        self._dispatcher.join(timeout)
        join_all(self._carriers, self._clock, min(deadline, self._clock.now() + timeout / 3))
        # More than once: a job that was just being submitted is not cancelled by the first.
        while self._alive() and self._clock.now() < deadline:
            self._cancel()
            join_all(self._carriers, self._clock, min(deadline, self._clock.now() + CANCEL_EVERY))
        return [thread.name for thread in self._alive()]

    def _alive(self) -> list[InheritableThread]:
        return [thread for thread in self._carriers if thread.is_alive()]

    def _cancel(self) -> None:
        try:
            self._sc.cancelJobsWithTag(self._tag)
        except (Py4JError, AttributeError, OSError) as error:
            log.debug("nothing left to cancel: %s", error)  # the SparkContext is gone, and its jobs with it

    def _dispatch(self, task: SlotTask, post: Post) -> None:
        while (job := self._orders.get()) is not None:
            carrier = InheritableThread(
                target=self._carry, args=(task, job, post), name=f"slot job {job}", daemon=True
            )
            self._carriers.append(carrier)
            carrier.start()

    def _carry(self, task: SlotTask, job: int, post: Post) -> None:
        if self._closing.is_set():
            return
        end = self._run(task, job)
        if not self._closing.is_set():
            post(LaunchEnded(self._clock.now(), job, *end))

    def _run(self, task: SlotTask, job: int) -> SlotEnd:
        try:
            self._sc.addJobTag(self._tag)
            set_description(self._sc, f"{self._name} slot {job}")
            rdd = self._sc.parallelize([job], 1)
            if self._profile is not None:
                rdd = rdd.withResources(self._profile)
            results: list[Any] = rdd.mapPartitions(task).collect()
            return SlotEnd(str(results[0]) if results else "the slot task returned nothing")
        except Exception as error:  # Spark's many ways to fail a job; which one decides about a new launch
            if self._sc._jsc is None or isinstance(error, Py4JNetworkError | ConnectionError):
                return SlotEnd("the SparkContext was stopped", cancelled=True)
            return classify(str(error))
