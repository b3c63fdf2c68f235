"""`spark_elastic.attach`: a job of a run, seen and steered from any process that reaches the run's store.

All goes through objects of the store, which `driver.run_board` writes and reads every few seconds: the driver need not
be reachable, and the process that has begun the job may be gone. Any thread.
"""

from __future__ import annotations

import itertools
import uuid
from typing import Any

from spark_elastic.clock import Clock, RunningClock, SystemClock
from spark_elastic.clusters.run.call import Results
from spark_elastic.data.store import Store, parse_document
from spark_elastic.driver import run_board
from spark_elastic.driver.discovery import JobHandle
from spark_elastic.driver.job import unpack_results
from spark_elastic.errors import InvalidInput, JobFailed
from spark_elastic.monitoring.report import JobReport
from spark_elastic.protocol.commands import JobOutcome
from spark_elastic.protocol.events import DriverEvent
from spark_elastic.runs.checkpoint import check_name, describe_owner
from spark_elastic.worker.program import decode_result

SILENT_AFTER = 6 * run_board.EVERY  # seconds without news of its driver after which a job counts as lost
LOOK_EVERY = 0.5  # seconds between two looks while `result` waits


def attach(run_id: str, store: str, storage_options: dict[str, Any] | None = None) -> AttachedJob:
    """The newest job of a run, whether it runs or has ended.

    Args:
        run_id: as given to `fit` or `run`.
        store: path or url of the store that was given to it.
        storage_options: fsspec's options for that store.

    Raises:
        InvalidInput: there is no such run.
        StoreError: the store cannot be read.
    """
    check_name(run_id)
    job = AttachedJob(Store.open(store, **(storage_options or {})), run_id, RunningClock(SystemClock()))
    job.status()
    return job


class AttachedJob(JobHandle):
    """`drain` and `cancel` as of a `JobHandle`, within some seconds; and what the job tells of itself."""

    def __init__(self, store: Store, run_id: str, clock: Clock) -> None:
        super().__init__(clock)
        self._store, self._run_id = store, run_id

    def __repr__(self) -> str:
        attempt, shown = self._read()
        return f"<{self._describe(attempt)}: {self._get_stage(shown)}>"

    @property
    def has_ended(self) -> bool:
        """Whether the job's driver says that it has ended."""
        return self._read()[1].end is not None

    def status(self) -> dict[str, Any]:
        """What the status page shows, some seconds old: stage, size, slots, metrics, events and so on."""
        shown = self._read()[1]
        return {**shown.status, "stage": self._get_stage(shown)}

    @property
    def report(self) -> JobReport:
        """Where the time of the job went so far."""
        return self._read()[1].report

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the job's end, and return what it returned: what `run` returns, or of a fit a dict with its
        "history". `fit` with the same run_id returns the model, without training again.

        Args:
            timeout: in seconds; None: as long as the job's driver lives.

        Raises:
            JobFailed, JobCancelled: as the call that runs the job.
            TimeoutError: it still runs.
        """
        began = seen = self._clock.now()
        beat: object = None
        while True:
            attempt, shown = self._read()
            if shown.end is not None:
                break
            now, newest = self._clock.now(), (attempt, shown.beat)
            beat, seen = newest, seen if newest == beat else now
            if now - seen > SILENT_AFTER:
                raise JobFailed(
                    f"{self._describe(attempt)} has no driver any more: call fit or run with the same run_id, "
                    "and it continues."
                )
            if timeout is not None and now - began > timeout:
                raise TimeoutError(f"{self._describe(attempt)} still runs after {timeout:g} s")
            self._clock.sleep(LOOK_EVERY)
        results = unpack_results(shown.end)
        first = parse_document(results[0], "The run's result", lambda value: value)
        if isinstance(first, dict):
            return first
        return Results(map(decode_result, results, itertools.count()), self.report)

    def _send(self, event: DriverEvent) -> None:
        attempt, shown = self._read()
        if shown.end is not None:
            outcome = shown.end.outcome
            how = "succeeded" if outcome is JobOutcome.SUCCESS else outcome.value
            job = self._describe(attempt)
            raise InvalidInput(f"{job} has ended ({how}): nothing is left to drain or cancel.")
        name = f"{run_board.requests_folder(self._run_id)}/{attempt:06d}-{uuid.uuid4().hex}"
        self._store.write_bytes(name, run_board.encode_request(event))

    def _read(self) -> tuple[int, run_board.Shown]:
        attempt, shown = run_board.read_board(self._store, self._run_id)
        if attempt == 0:
            raise InvalidInput(
                f"there is no run {self._run_id!r} in the store {self._store.url}: give run_id and store as to the fit "
                "or run that began it."
            )
        return attempt, shown

    def _get_stage(self, shown: run_board.Shown) -> str:
        return "ended" if shown.end is not None else str(shown.status.get("stage", "starting"))

    def _describe(self, attempt: int) -> str:
        return f"run {self._run_id!r} ({describe_owner(self._store, self._run_id, attempt)})"
