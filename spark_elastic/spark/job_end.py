"""How a Spark job ended, read off Spark's own words: cancelled, its executor lost, or failed in another way."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from spark_elastic.clock import Clock

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


class JobEnd(NamedTuple):
    """How a slot job ended, as `SlotJobEnded` has it."""

    reason: str
    cancelled: bool = False
    host_lost: bool = False


def classify(text: str) -> JobEnd:
    """Why a Spark job failed, in one line; text: of the error."""
    if any(word in text for word in STOPPED):
        return JobEnd("the SparkContext was stopped", cancelled=True)
    if any(word in text for word in CANCELLED):
        return JobEnd(f"the slot job was cancelled: {_first_line(text)}", cancelled=True)
    return JobEnd(_first_line(text), host_lost=EXECUTOR_LOST in text)


def join_all(threads: Sequence[threading.Thread], clock: Clock, deadline: float) -> None:
    """Wait for all of them until `deadline`."""
    for thread in threads:
        thread.join(max(0.0, deadline - clock.now()))


def _first_line(text: str) -> str:
    """The line of a py4j error that says what happened."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = next((line for line in lines if "org.apache.spark" in line), lines[0] if lines else "")
    return said[:300]
