"""R12, P6: the driver's server is harmed, held up or attacked while a job runs; training does not pause for it."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

import psutil
import pytest

from spark_elastic.protocol.messages import WorkerExited
from spark_elastic.rendezvous.messages import VERSION, path_of
from tests.component.rendezvous.driver_side import RawClient
from tests.component.worker.losses import Job, sizes
from tests.component.worker.moments import HeldProgram
from tests.scenarios import Fault

pytestmark = [pytest.mark.native, pytest.mark.timeout(120)]


def server_port(job: Job) -> int:
    return int(job.cluster.spec.address.rpartition(":")[2])


def break_server(job: Job) -> None:
    """Its thread gets a SystemExit, and its listening socket is of no more use.

    In this order: a loop that saw its socket break may be cleaning up by the time it gets the exception.
    """
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "spark-elastic-rendezvous"]
    ident = ctypes.c_ulong(thread.ident or 0)
    (listening,) = [
        connection.fd
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == server_port(job)
    ][:1]
    with socket.socket(fileno=os.dup(listening)) as broken:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit))
        broken.shutdown(socket.SHUT_RDWR)


def test_r12_training_survives_the_end_of_its_server(fault: Fault, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(HeldProgram(30, 0.03))

    def inject_fault() -> None:
        fault(break_server, job)
        job.workers()[1].kill()

    job.act_at_step(10, inject_fault)
    result = job.run()
    assert "starts again on the same port" in caplog.text
    assert sizes(result)[0] == 3
    assert any("WorkerExited" in line for line in job.journal), "the loss was heard all the same"


class BlockedServerJob(Job):
    """Progress is told in the server's thread: who holds that up holds up the server."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.seconds = 0.0
        self.steps = [0]

    def delay_answers(self, seconds: float) -> None:
        self.seconds = seconds

    def on_progress(self, metrics: Mapping[str, Any]) -> None:
        super().on_progress(metrics)
        self.steps.append(metrics["step"])
        seconds, self.seconds = self.seconds, 0.0
        time.sleep(seconds)


def test_r12_a_server_stopped_for_longer_than_a_lease_evicts_no_worker(fault: Fault) -> None:
    last = 110
    job = BlockedServerJob(
        HeldProgram(last + 1, 0.03), until=lambda now: not job.seconds and now.step == last
    )
    job.act_at_step(10, lambda: fault(job.delay_answers, 3.2))
    result = job.run(lease=2.0)
    assert sizes(result) == [3]
    leap = max(after - before for before, after in itertools.pairwise(job.steps))
    assert leap > 20, "steps went on while nobody served"


@pytest.mark.scenario("G12")
def test_p6_a_client_without_the_key_gets_nothing_and_the_job_continues(fault: Fault) -> None:
    """All that such a client may try is in tests/component/rendezvous."""
    job = Job(HeldProgram(30, 0.03), size=2, faults=fault.on)
    answers: list[int] = []

    def attack() -> None:
        lie = {"worker": "1-0.1", "slot": "1-0", "exit_code": -9, "reason": ""}
        body = json.dumps({"v": VERSION, "attempt": job.cluster.spec.attempt, "message": lie}).encode()
        thief, insider = (
            RawClient(server_port(job), b"guess"),
            RawClient(server_port(job), job.cluster.spec.key),
        )
        path, session = path_of(WorkerExited), insider.session()
        for proof in (None, thief.sign(path, body, session)):
            answers.append(thief.request(path, body, proof)[0])

    job.act_at_step(10, lambda: fault(attack))
    result = job.run()
    assert answers == [401, 401]
    assert sizes(result) == [2], "a forged request was accepted"
