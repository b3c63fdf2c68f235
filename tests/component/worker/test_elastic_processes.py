"""The whole elastic machinery over plain processes, without a JVM and without a framework.

The program's result is known in closed form, so that every lost, doubled or torn step shows in it.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from spark_elastic.clock import SystemClock
from spark_elastic.config import ElasticConfig
from spark_elastic.driver.discovery import CombinedDiscovery
from spark_elastic.driver.job import DriverOptions, LaunchResult, supervise
from spark_elastic.monitoring.listener import JobListener
from spark_elastic.protocol.types import Limits, WorkerId
from spark_elastic.testing.fakes import CountingProgram, ProcessLauncher
from spark_elastic.worker.context import get_context
from spark_elastic.worker.function_program import FunctionProgram
from spark_elastic.worker.program import decode_result
from tests.component.worker.losses import Job
from tests.component.worker.moments import HeldProgram

pytestmark = [pytest.mark.native, pytest.mark.timeout(120)]


def run(program: Any, workers: int, listener: JobListener | None = None, **named: Any) -> LaunchResult:
    cluster = ProcessLauncher(program, SystemClock(), room=workers, **named)
    limits, config = Limits(workers, 1, workers, gather_timeout=60.0), ElasticConfig()
    return supervise(cluster, CombinedDiscovery(), DriverOptions(), limits, config, "test", listener)


def fork() -> int | None:
    """Exit code of a process as a DataLoader begins its workers; None: it hangs."""
    child = multiprocessing.get_context("fork").Process(target=int)
    child.start()
    child.join(10.0)
    if child.exitcode is None:
        child.kill()
        return None
    return child.exitcode


def test_a_function_forks_processes() -> None:
    result = run(FunctionProgram(fork), 1)
    assert [decode_result(text, 0) for text in result.results] == [0]


def set_up_once() -> tuple[WorkerId, str, bool]:
    """Rank 0 waits for rank 1, which is killed in the first world, and rank 2 has returned then."""
    if hasattr(sys, "set_up"):
        raise RuntimeError("a library was set up twice in one process")
    sys.set_up = True  # type: ignore[attr-defined]
    worker: Any = get_context()
    group = worker.group
    if group.fence[1] == 1 and group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if group.fence[1] == 1 and group.rank == 0:
        group.barrier()
    place = f"{os.environ['RANK']} of {os.environ['WORLD_SIZE']} at {os.environ['MASTER_ADDR']}"
    return worker.worker, place, int(os.environ["MASTER_PORT"]) > 0


def test_a_function_without_a_loop_begins_again_in_new_processes_of_the_same_workers() -> None:
    result = run(FunctionProgram(set_up_once), 3, spare_after=100.0)
    assert len(result.worlds) == 2
    workers, places, ports = zip(*(decode_result(text, 0) for text in result.results), strict=True)
    assert [worker.number for worker in workers].count(1) == 2
    assert places == tuple(f"{rank} of {len(places)} at 127.0.0.1" for rank in range(len(places)))
    assert all(ports)


def test_the_job_starts_again_when_all_workers_die_at_once() -> None:
    job = Job(HeldProgram(20, 0.02), size=2, until=lambda now: len(now.sizes) >= 2)

    def inject_fault() -> None:
        for worker in job.workers():
            worker.kill()

    job.act_at_step(10, inject_fault)
    assert len(job.run().worlds) >= 2


class RaisingListener(JobListener):
    """A listener that fails at everything."""

    def on_progress(self, metrics: Mapping[str, Any]) -> None:
        raise OSError("the terminal is gone")

    def on_world(self, size: int, reason: str) -> None:
        raise OSError("the terminal is gone")


def test_a_job_survives_a_failing_listener_and_a_dead_proxy_in_the_environment(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    program = CountingProgram(20, 0.03)
    result = run(program, 3, RaisingListener())
    assert [json.loads(text)["rank"] for text in result.results] == [0, 1, 2]
    assert {json.loads(text)["sum"] for text in result.results} == {program.expected_sum()}
    assert "the job listener failed" in caplog.text
