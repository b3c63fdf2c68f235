"""How a slot job ended, read off Spark's own words: cancelled jobs end the training, lost ones are launched again."""

from __future__ import annotations

import pytest

pytest.importorskip("pyspark")

from spark_elastic.clusters.spark.slot_task import classify_error
from spark_elastic.driver.thread_launcher import SlotOutcome

LOST = (
    "An error occurred while calling z:org.apache.spark.api.python.PythonRDD.collectAndServe.\n"
    ": org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 3.0 failed 1 times, most "
    "recent failure: Lost task 0.0 in stage 3.0 (TID 3): ExecutorLostFailure (executor 1 exited)\n\tat scala..."
)


@pytest.mark.parametrize(
    "text",
    [
        "[SPARK_JOB_CANCELLED] Job 5 cancelled part of cancelled job group g SQLSTATE: XXKDA",
        "org.apache.spark.SparkException: Job 4 cancelled as part of cancellation of all jobs: it was cancelled",
        "org.apache.spark.SparkException: Job 2 cancelled because Stage 7 was cancelled",
        "(org.apache.spark.SparkSQLException) [OPERATION_CANCELED] Operation has been canceled. SQLSTATE: HY008",
    ],
)
def test_a_cancelled_job_is_distinguished_from_a_lost_one(text: str) -> None:
    end = classify_error(text)
    assert (end.cancelled, end.executor_lost) == (True, False)
    assert text.splitlines()[0] in end.reason


@pytest.mark.parametrize("cause", ["exited", "exited caused by: its container was cancelled"])
def test_a_lost_executor_is_not_a_cancel_and_its_cause_is_one_line(cause: str) -> None:
    end = classify_error(LOST.replace("exited", cause))
    assert (end.cancelled, end.executor_lost) == (False, True)
    assert end.reason.startswith("Lost task 0.0 in stage 3.0 (TID 3): ExecutorLostFailure (executor 1 exited")
    assert "\n" not in end.reason


RAISED = "org.apache.spark.SparkException: Job aborted: ValueError: no"
STOPPED = SlotOutcome("the SparkContext was stopped", cancelled=True)


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        (RAISED, SlotOutcome(RAISED)),  # lost no executor
        ("Job 3 cancelled because SparkContext was shut down", STOPPED),
        ("java.lang.IllegalStateException: Cannot call methods on a stopped SparkContext.", STOPPED),
    ],
)
def test_a_stopped_context_counts_as_a_cancel_and_a_task_that_raised_does_not(
    text: str, outcome: SlotOutcome
) -> None:
    assert classify_error(text) == outcome
