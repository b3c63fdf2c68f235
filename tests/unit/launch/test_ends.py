"""Each way in which a job ends without a result is an error of a class of its own, with the reason and the detail."""

from __future__ import annotations

import pytest

from spark_elastic.driver.job import unpack_results
from spark_elastic.errors import (
    FailureBudgetExceeded,
    JobCancelled,
    JobFailed,
    NotEnoughWorkers,
    OutOfMemory,
    TimeLimitReached,
    WorkerFailed,
)
from spark_elastic.protocol.commands import End, JobOutcome

ENDS = {
    JobOutcome.USER_ERROR: WorkerFailed,
    JobOutcome.NOT_ENOUGH_WORKERS: NotEnoughWorkers,
    JobOutcome.FAILURE_BUDGET: FailureBudgetExceeded,
    JobOutcome.RESET_LIMIT: FailureBudgetExceeded,
    JobOutcome.OUT_OF_MEMORY: OutOfMemory,
    JobOutcome.TIME_LIMIT: TimeLimitReached,
    JobOutcome.CANCELLED: JobCancelled,
    JobOutcome.DEFECT: JobFailed,
}
WITH_DETAIL = (WorkerFailed, FailureBudgetExceeded, OutOfMemory)


def test_a_success_has_its_results() -> None:
    assert unpack_results(End("all are done", JobOutcome.SUCCESS, results=("1", "2"))) == ("1", "2")


@pytest.mark.parametrize("outcome", [outcome for outcome in JobOutcome if outcome is not JobOutcome.SUCCESS])
def test_a_failed_job_is_an_error_with_its_reason(outcome: JobOutcome) -> None:
    kind = ENDS[outcome]
    with pytest.raises((JobFailed, JobCancelled), match=r"\Athe reason") as caught:
        unpack_results(End("the reason", outcome, detail="Traceback of it"))
    assert type(caught.value) is kind
    assert str(caught.value).endswith("Traceback of it") == (kind in WITH_DETAIL)


def test_a_job_whose_time_is_over_says_how_to_continue() -> None:
    with pytest.raises(TimeLimitReached, match=r"to continue from the newest checkpoint, .* run_id"):
        unpack_results(End("the job has had its 2 s (max_runtime)", JobOutcome.TIME_LIMIT))
