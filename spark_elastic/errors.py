"""Every error a user of spark_elastic can meet, in one tree.

ElasticError                      everything below
├── InvalidInput (ValueError)     an argument, column or setting is wrong; the sentence says what to change
├── PreflightError                a host cannot run the job: versions, function or store
├── JobFailed                     training ended without a result
│   ├── WorkerFailed              user code raised; carries traceback, step and position
│   ├── NotEnoughWorkers          below `min_workers` past the deadline; names who was waited for
│   ├── OutOfMemory               workers were killed again and again because memory ran out
│   ├── TimeLimitReached          `max_runtime` is over; the newest checkpoint stays
│   ├── CoordinatorLost           it ran in a task, whose executor was lost, and there is no run to go on with
│   └── FailureBudgetExceeded     too many failures inside the window
├── JobCancelled                  the user or Spark cancelled the job, or another driver took its run over
├── DriverUnreachable             the rendezvous server does not answer; names host:port
├── Unauthorized                  a request without the job's key
├── StaleGeneration               a message of a world that is over
├── PeersMissing                  a wait for other workers reached its deadline; names who was missing
├── ConnectionClosed              this side closed its connection to the driver while a request was open
└── StoreError                    the store cannot be read or written
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any


class ElasticError(Exception):
    """Root of all errors of spark_elastic."""


class InvalidInput(ElasticError, ValueError):
    """An argument, column or setting is wrong. The message is one sentence that says what to change."""


class PreflightError(ElasticError):
    """A host cannot run the job; the message names host, package and both versions."""


class JobFailed(ElasticError):
    """Training ended without a result. report: as `JobCancelled.report`."""

    report: Any = None


class WorkerFailed(JobFailed):
    """User code raised on a worker, or kept worlds from going on; the message holds its traceback or the reason, and
    the position."""


class NotEnoughWorkers(JobFailed):
    """Fewer than `min_workers` workers came within the deadline."""


class OutOfMemory(JobFailed):
    """The kernel killed workers again and again because memory ran out; the message names the setting to raise."""


class TimeLimitReached(JobFailed):
    """The job had its `max_runtime` and stopped at a step boundary; its newest checkpoint stays."""


class CoordinatorLost(JobFailed):
    """The job's driver ran in a task, and that task was lost; a run goes on from its newest checkpoint."""


class FailureBudgetExceeded(JobFailed):
    """More failures inside the window than the job allows."""


class JobCancelled(ElasticError):
    """The user or Spark cancelled the job, or another driver took its run over. report: a `JobReport` of where its time
    went, as far as it came; None where it was never begun."""

    report: Any = None


class DriverUnreachable(ElasticError):
    """The rendezvous server on the driver does not answer."""


class Unauthorized(ElasticError):
    """A request that does not prove the job's key."""


class StaleGeneration(ElasticError):
    """A message that belongs to a world that is over."""


class PeersMissing(ElasticError):
    """A wait for other workers reached its deadline; the message names who was missing."""


class ConnectionClosed(ElasticError):
    """This side closed its connection to the driver while a request was open."""


class StoreError(ElasticError):
    """The store cannot be read or written."""
