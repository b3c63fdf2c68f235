"""`attach`: a job is seen, steered and waited for through its store alone."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from spark_elastic import attach
from spark_elastic.clusters.run import attached
from spark_elastic.data.store import Store
from spark_elastic.driver import run_board
from spark_elastic.errors import InvalidInput, JobCancelled, JobFailed
from spark_elastic.runs.checkpoint import acquire_attempt
from tests.component.torch.hand_written import Run, count
from tests.patience import until

pytestmark = [pytest.mark.native, pytest.mark.timeout(120)]

cloudpickle.register_pickle_by_value(sys.modules[count.__module__])


def test_a_job_is_seen_drained_and_cancelled_from_elsewhere_and_its_end_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_board, "EVERY", 0.2)
    given: dict[str, Any] = {"run_id": "mine", "store": str(tmp_path)}
    first = Run(count, (100_000, 1), room=2, num_workers=2, **given)
    seen: list[Any] = []

    def steer() -> None:
        job = attach(**given)
        until(lambda: job.status()["size"] == 2 and "step" in job.status()["metrics"])
        seen.append((repr(job), job.has_ended))
        job.drain(rank=1)
        until(lambda: job.status()["size"] == 1)
        job.cancel("enough")

    thread = threading.Thread(target=steer)
    first.at(3, thread.start)
    with pytest.raises(JobCancelled, match="enough"):
        first.results()
    thread.join()
    assert seen[0][1:] == (False,)
    assert seen[0][0].startswith("<run 'mine' (attempt 1, process ")
    job = attach(**given)
    with pytest.raises(JobCancelled, match="enough"):
        job.result()
    assert (job.has_ended, len(job.report.world_changes)) == (True, 2)
    for request in (job.cancel, lambda: job.drain(rank=0)):
        with pytest.raises(
            InvalidInput, match=r"run 'mine' \(attempt 1, .* has ended \(cancelled\): nothing is"
        ):
            request()
    results = Run(count, (job.status()["metrics"]["step"] + 3, 1), room=1, num_workers=1, **given).results()
    assert (attach(**given).result(), job.result()) == (results, results)

    acquire_attempt(Store.open(str(tmp_path)), "mine")  # of a driver that dies at once
    with pytest.raises(TimeoutError, match=r"attempt 3, .*still runs after 0 s"):
        job.result(timeout=0)
    monkeypatch.setattr(attached, "SILENT_AFTER", 0.1)
    with pytest.raises(JobFailed, match=r"run 'mine' \(attempt 3, .*\) has no driver any more: call fit or"):
        job.result()


def test_a_run_that_never_was_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"there is no run 'mnie' in the store .*: give run_id and store"):
        attach("mnie", str(tmp_path))
