"""All errors that spark_elastic raises, in one tree below `ElasticError`."""

from __future__ import annotations

import os
import sysconfig
import traceback
from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any


MAX_COLUMNS_SHOWN = 12


class ElasticError(Exception):
    """Root of all errors of spark_elastic."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in a notebook: the sentence, then the user's lines; `traceback.print_exc()` shows all."""
        places = (os.path.dirname(__file__), sysconfig.get_path("stdlib"))
        frames = [f for f in traceback.extract_tb(self.__traceback__) if not f.filename.startswith(places)]
        own = [frame for frame in frames if "-packages" + os.sep not in frame.filename]
        return ["".join([*traceback.format_exception_only(type(self), self), *traceback.format_list(own)])]


class InvalidInput(ElasticError, ValueError):
    """An argument, column or setting is wrong. The message is one sentence that says what to change."""


class PreflightError(ElasticError):
    """A host cannot run the job; the message names host, package and both versions."""


class JobFailed(ElasticError):
    """Training ended without a result."""

    report: Any = None  # a `JobReport` of the job so far; None if the job never started


class WorkerFailed(JobFailed):
    """User code raised on a worker, or kept worlds from progressing. The message has the traceback or the reason, and
    the position."""


class NotEnoughWorkers(JobFailed):
    """Fewer than `min_workers` workers joined before the deadline."""


class OutOfMemory(JobFailed):
    """The kernel killed workers repeatedly because memory ran out. The message names the setting to raise."""


class TimeLimitReached(JobFailed):
    """The job reached its `max_runtime` and stopped at a step boundary. Its newest checkpoint stays."""


class CoordinatorLost(JobFailed):
    """The job's driver ran in a task, and that task was lost. A run resumes from its newest checkpoint."""


class FailureBudgetExceeded(JobFailed):
    """More failures within the failure window than the job allows."""


class JobCancelled(ElasticError):
    """The user or Spark cancelled the job, or another driver took over its run."""

    report: Any = None  # a `JobReport` of the job so far; None if the job never started


class DriverUnreachable(ElasticError):
    """The rendezvous server on the driver does not answer."""


class Unauthorized(ElasticError):
    """A request did not prove the job's key."""


class StaleGeneration(ElasticError):
    """A message belongs to a world that has ended."""


class ConnectionClosed(ElasticError):
    """This side closed its connection to the driver while a request was open."""


class StoreError(ElasticError):
    """The store cannot be read or written."""


# Names that other libraries have for ours, where the letters do not say so.
_SYNONYMS = {"lr": "learning_rate", "n_epochs": "epochs", "workers": "num_workers"}


def suggest_name(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: " (did you mean 'epochs'?)", or "" if no known name is near."""
    names = list(known)
    near = get_close_matches(name, names, 3) if _SYNONYMS.get(name) not in names else [_SYNONYMS[name]]
    return f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""


def format_columns(name: str, columns: Sequence[str]) -> str:
    """What there is instead of an unknown column: all of a few columns, the nearest ones of a wide table."""
    if len(columns) <= MAX_COLUMNS_SHOWN:
        return f"the columns {list(columns)}{suggest_name(name, columns)}"
    near = get_close_matches(name, columns, 3)
    return f"{len(columns)} columns" + (f", of which the nearest are {near}" if near else "")


def add_note(error: BaseException, note: str) -> None:
    """`error.add_note(note)`, which exceptions have from Python 3.11 on."""
    vars(error).setdefault("__notes__", []).append(note)
