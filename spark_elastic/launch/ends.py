"""How a job's end is told to its caller: its results, or an error of the class that fits. Pure."""

from __future__ import annotations

from spark_elastic.errors import (
    FailureBudgetExceeded,
    JobCancelled,
    JobFailed,
    NotEnoughWorkers,
    OutOfMemory,
    TimeLimitReached,
    WorkerFailed,
)
from spark_elastic.protocol.commands import End, Outcome


def results(end: End) -> tuple[str, ...]:
    """What the workers returned, in rank order.

    Raises:
        JobFailed: with its subclasses; JobCancelled: the user or Spark ended it.
    """
    match end.outcome:
        case Outcome.SUCCESS:
            return end.results
        case Outcome.USER_ERROR:
            raise WorkerFailed(f"{end.reason}\n{end.detail}")
        case Outcome.NOT_ENOUGH_WORKERS:
            raise NotEnoughWorkers(end.reason)
        case Outcome.OUT_OF_MEMORY:
            raise OutOfMemory(f"{end.reason}\n{end.detail}".rstrip())
        case Outcome.FAILURE_BUDGET | Outcome.RESET_LIMIT:
            raise FailureBudgetExceeded(f"{end.reason}\n{end.detail}".rstrip())
        case Outcome.TIME_LIMIT:
            raise TimeLimitReached(end.reason)
        case Outcome.CANCELLED:
            raise JobCancelled(end.reason)
    raise JobFailed(end.reason)
