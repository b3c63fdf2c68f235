"""How a job ends, with a class of error, the report and the reason; and how its slots do, which have a thread each."""

from __future__ import annotations

import os
import queue
import re
import socket
import threading
from unittest.mock import Mock

import pytest

from spark_elastic.clock import SystemClock
from spark_elastic.clusters.local.launcher import HostSlots, LocalLauncher
from spark_elastic.config import ElasticConfig
from spark_elastic.driver.discovery import HandleDiscovery, HostPoller, JobHandle
from spark_elastic.driver.job import ERRORS, DriverOptions, LaunchResult, supervise, unpack_results
from spark_elastic.driver.ports import Post, ThreadPerSlotLauncher
from spark_elastic.errors import JobCancelled, JobFailed, NotEnoughWorkers, TimeLimitReached
from spark_elastic.monitoring.listener import JobListener
from spark_elastic.protocol.commands import End, JobOutcome
from spark_elastic.protocol.events import DriverEvent, LaunchEnded
from spark_elastic.protocol.types import Limits, SlotOutcome, SlotSpec
from spark_elastic.rendezvous.server import RendezvousServer
from spark_elastic.runs.checkpoint import OwnedRun
from tests.memory_store import make_memory_store


def test_a_success_has_its_results() -> None:
    assert unpack_results(End("all are done", JobOutcome.SUCCESS, results=("1", "2"))) == ("1", "2")


@pytest.mark.parametrize("outcome", [outcome for outcome in JobOutcome if outcome is not JobOutcome.SUCCESS])
def test_a_failed_job_is_an_error_with_its_reason(outcome: JobOutcome) -> None:
    with pytest.raises((JobFailed, JobCancelled), match=r"(?s)\Athe reason.*Traceback of it\Z") as caught:
        unpack_results(End("the reason", outcome, detail="Traceback of it"))
    assert type(caught.value) is ERRORS.get(outcome, JobFailed)


def test_a_job_whose_time_is_over_says_how_to_continue() -> None:
    with pytest.raises(TimeLimitReached, match=r"to continue from the newest checkpoint, .* run_id"):
        unpack_results(End("the job has had its 2 s (max_runtime)", JobOutcome.TIME_LIMIT))


def test_an_interrupt_right_behind_the_servers_start_frees_its_port(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = RendezvousServer.start, list[int]()

    def start_and_interrupt(self: RendezvousServer) -> None:
        start(self)
        started.append(int(self.address.rpartition(":")[2]))
        raise KeyboardInterrupt

    monkeypatch.setattr(RendezvousServer, "start", start_and_interrupt)
    hosts, clock = {"localhost": 1}, SystemClock()
    launcher = LocalLauncher(None, HostSlots(hosts), clock)
    discovery = HostPoller(lambda: hosts, clock)
    with pytest.raises(KeyboardInterrupt):
        supervise(launcher, discovery, DriverOptions(), Limits(1, 1, 1), ElasticConfig(), "job")
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", started[0]))


class NoRoom:
    """A cluster that starts nothing."""

    def start(self, spec: SlotSpec, post: Post) -> None: ...

    def launch(self, job: int) -> None: ...

    def close(self, timeout: float) -> list[str]:
        return []


def run_failing_job(run: OwnedRun | None) -> LaunchResult:
    clock, limits = SystemClock(), Limits(1, 1, 1, start_timeout=0.2)
    return supervise(
        NoRoom(), HostPoller(dict, clock), DriverOptions(run=run), limits, ElasticConfig(), "job"
    )


def test_what_a_function_of_the_user_asks_of_a_handle_at_the_jobs_end_is_not_asked_of_the_next_job() -> None:
    handle, asked, closing = JobHandle(), list[object](), threading.Event()

    class Canceller(JobListener):
        def on_message(self, text: str) -> None:
            if closing.wait(10.0) and not asked:
                threading.Event().wait(0.3)  # the job's other parts end meanwhile
                handle.cancel("good enough")

    class Closing(NoRoom):
        def close(self, timeout: float) -> list[str]:
            closing.set()
            return []

    limits, discovery = Limits(1, 1, 1, start_timeout=0.2), HandleDiscovery(handle)
    with pytest.raises(NotEnoughWorkers):
        supervise(Closing(), discovery, DriverOptions(), limits, ElasticConfig(), "job", Canceller())
    HandleDiscovery(handle).start(asked.append)
    assert not asked


def test_the_error_of_a_job_has_its_report() -> None:
    with pytest.raises(NotEnoughWorkers) as failed:
        run_failing_job(None)
    assert failed.value.report.seconds > 0.1
    assert failed.value.report.phases["training"] == 0.0


def test_r10_a_job_that_fails_after_its_run_was_taken_over_says_so_and_names_the_driver() -> None:
    store = make_memory_store()
    run = OwnedRun.acquire(store, "mine")
    with pytest.raises(NotEnoughWorkers):
        run_failing_job(run)
    OwnedRun.acquire(store, "mine")
    by = f"attempt 2, process {os.getpid()} on {socket.gethostname()}"
    with pytest.raises(JobCancelled, match=re.escape(by)) as lost:
        run_failing_job(OwnedRun(store, "mine", run.attempt, ()))
    assert lost.value.report is not None


# ---- a thread for each slot, which posts the slot's end, and the cancelling of the rest


class Slots(ThreadPerSlotLauncher):
    """Slots that run until they are released, or cancelled for the second time."""

    def __init__(self) -> None:
        super().__init__(SystemClock())
        self.released = threading.Event()
        self.cancels = 0
        self.ignores_cancels = False
        self.posted: queue.SimpleQueue[DriverEvent] = queue.SimpleQueue()
        self.start(SlotSpec(address="", key=b"", attempt=1), self.posted.put)

    def run_slot(self, launch: int) -> SlotOutcome:
        assert self.released.wait(60.0)
        return SlotOutcome("released", executor_lost=True)

    def cancel(self) -> None:
        self.cancels += 1
        if self.cancels > 1 and not self.ignores_cancels:
            self.released.set()


def wait_for_end(slots: Slots, launch: int) -> LaunchEnded:
    slots.launch(launch)
    end = slots.posted.get(timeout=20.0)
    assert isinstance(end, LaunchEnded)
    assert end.launch == launch
    return end


def test_the_end_of_a_slot_is_posted_with_its_launch() -> None:
    slots = Slots()
    slots.released.set()
    end = wait_for_end(slots, 7)
    assert (end.reason, end.cancelled, end.executor_lost) == ("released", False, True)
    assert slots.close(1.0) == []
    assert slots.cancels == 0


@pytest.mark.parametrize("fails", ["run_slot", "start", "__init__"])  # that of Spark's threads asks the JVM
def test_a_slot_that_could_not_be_started_ends_with_the_error(fails: str) -> None:
    """The driver launches it again."""
    refuse = Mock(side_effect=RuntimeError("can't start new thread"))
    parts = {"thread_class": type("FullProcess", (threading.Thread,), {fails: refuse})}
    slots = type("FailingSlots", (Slots,), {fails: refuse} if fails == "run_slot" else parts)()
    assert wait_for_end(slots, 2).reason == "it could not be started: RuntimeError: can't start new thread"
    assert slots.close(1.0) == []


def test_close_cancels_running_slots_until_they_end_and_names_those_that_do_not() -> None:
    slots, stuck = Slots(), Slots()
    slots.launch(1)
    assert slots.close(9.0 * slots.grace) == []
    assert slots.cancels == 2
    assert slots.posted.empty()
    stuck.ignores_cancels = True
    stuck.launch(3)
    assert stuck.close(0.6) == ["slot launch 3"]
    stuck.released.set()
