"""The task of a slot: its host and address, the bytes that it gets, and how it ended, read off Spark's own words."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import cloudpickle
import pytest
from py4j.protocol import Py4JJavaError

import spark_elastic
from spark_elastic.clock import SystemClock
from spark_elastic.clusters.spark import host_facts as session
from spark_elastic.clusters.spark import slot_task
from spark_elastic.clusters.spark.classic import SparkLauncher
from spark_elastic.clusters.spark.payload import (
    BROADCAST_FROM,
    INLINE_AT_MOST,
    InlinePayload,
    SplitPayload,
    make_program_payload,
    share,
)
from spark_elastic.clusters.spark.settings import ExecutorMemory
from spark_elastic.clusters.spark.slot_task import SlotTask, classify_error, find_host
from spark_elastic.data.store import Store
from spark_elastic.driver.ports import ThreadPerSlotLauncher
from spark_elastic.errors import DriverUnreachable, InvalidInput
from spark_elastic.protocol.types import SlotIdentity, SlotOutcome, SlotSpec
from spark_elastic.rendezvous.addresses import find_address_towards
from spark_elastic.runs.checkpoint import CheckpointPolicy
from spark_elastic.worker.function_program import FunctionProgram

ADDRESS = "10.0.0.7"


def process(proc: Path, pid: int, parent: int, *words: str) -> None:
    (proc / str(pid)).mkdir(parents=True)
    (proc / str(pid) / "cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in words))
    (proc / str(pid) / "stat").write_text(f"{pid} (a name) with) S {parent} 1 1 0")


DAEMON = ("python", "-m", "pyspark.daemon")
HIDDEN = (f"{ADDRESS}-{socket.gethostname()}", 0)
EXECUTOR = ("java", "CoarseGrainedExecutorBackend", "--executor-id", "12", "--cores", "1")


@pytest.mark.parametrize(
    ("processes", "found"),
    [
        ([(os.getpid(), 70, *DAEMON), (70, 60, *DAEMON), (60, 1, *EXECUTOR)], ("12", 60)),
        ([(os.getpid(), 70, *DAEMON), (70, 1, "java", "SparkSubmit", "pyspark-shell")], ("driver", 70)),
        ([], HIDDEN),  # all of /proc
        ([(os.getpid(), 1, *DAEMON)], HIDDEN),  # an isolated one, as platforms start it, is no local mode
    ],
)
def test_the_executor_is_found_in_the_ancestors_command_line(
    processes: list[Any], found: tuple[str, int], tmp_path: Path
) -> None:
    for each in processes:
        process(tmp_path, *each)
    assert find_host(ADDRESS, tmp_path) == found


def test_hosts_that_hide_their_processes_differ_by_address_and_boot(tmp_path: Path) -> None:
    ids = set()
    machines = [("10.0.0.1", "a" * 36), ("10.0.0.2", "a" * 36), ("10.0.0.1", "b" * 36)]
    for number, (address, boot) in enumerate(machines):
        proc = tmp_path / str(number)
        process(proc, os.getpid(), 70, "python", "-m", "pyspark.daemon")
        (proc / "sys" / "kernel" / "random").mkdir(parents=True)
        (proc / "sys" / "kernel" / "random" / "boot_id").write_text(boot)
        ids.add(find_host(address, proc)[0])
    assert ids == {"10.0.0.1-aaaaaaaa", "10.0.0.2-aaaaaaaa", "10.0.0.1-bbbbbbbb"}


def test_the_address_towards_a_driver_on_this_machine_is_loopback() -> None:
    assert find_address_towards("127.0.0.1", 7) == "127.0.0.1"
    with pytest.raises(DriverUnreachable, match=r"no-such-host\.invalid:7077 .*advertise_address"):
        find_address_towards("no-such-host.invalid", 7077)


@pytest.mark.parametrize(
    ("driver", "known", "expected"),
    [
        ("machine-a", "10.0.0.5", "10.0.0.5"),
        ("machine-a", "127.0.1.1", "127.0.1.1"),
        ("127.0.0.1", "10.0.0.5", "127.0.1.1"),
        ("machine-a", "192.0.2.9", "127.0.1.1"),  # not this machine's
    ],
)
def test_beside_a_driver_whose_name_is_loopback_the_executors_address_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: str, known: str, expected: str
) -> None:
    """As where /etc/hosts gives the machine's own name the address 127.0.1.1."""
    process(tmp_path, os.getpid(), 60, "python", "-m", "pyspark.daemon")
    process(tmp_path, 60, 1, "java", "--executor-id", "12", "--hostname", "machine-a.lan")
    monkeypatch.setattr(session, "find_address_towards", lambda host, port: "127.0.1.1")
    monkeypatch.setattr(session, "is_own_address", lambda host: host == "10.0.0.5")
    monkeypatch.setattr(socket, "gethostbyname", {"machine-a.lan": known}.__getitem__)
    assert session.find_reachable_address(driver, 1, tmp_path) == expected
    assert session.find_own_address(driver, tmp_path) == expected


@pytest.mark.parametrize("towards", [None, "no-such-host.invalid"])
def test_without_a_way_to_the_driver_the_executors_address_counts_before_a_loopback_one_of_this_machines_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, towards: str | None
) -> None:
    process(tmp_path, os.getpid(), 1, "java", "--executor-id", "12", "--hostname", "machine-a.lan")
    monkeypatch.setattr(session, "is_own_address", lambda host: host == "10.0.0.5")
    names = {"machine-a.lan": "10.0.0.5", socket.gethostname(): "127.0.1.1"}
    monkeypatch.setattr(socket, "gethostbyname", names.__getitem__)
    assert session.find_own_address(towards, tmp_path) == "10.0.0.5"


def test_a_slot_registers_under_the_address_that_others_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[SlotIdentity] = []

    def make_agent(spec: SlotSpec, identity: SlotIdentity, *rest: object) -> Any:
        registered.append(identity)
        return SimpleNamespace(run=lambda: "released")

    context = SimpleNamespace(attemptNumber=lambda: 0, resources=dict)
    monkeypatch.setattr(slot_task, "TaskContext", SimpleNamespace(get=lambda: context))
    ways = {("machine-a", 7): ADDRESS}
    monkeypatch.setattr(slot_task.host_facts, "find_reachable_address", lambda *driver: ways[driver])
    monkeypatch.setattr(slot_task, "SlotAgent", make_agent)
    monkeypatch.setattr("pyspark.SparkFiles", SimpleNamespace(getRootDirectory=lambda: "/files"))
    spec = SlotSpec(address="machine-a:7", key=b"key", attempt=1)
    task = SlotTask(spec, InlinePayload(b""), ExecutorMemory(heap=1, overhead=None, slots=1))
    assert list(task([3])) == ["released"]
    assert [identity.address for identity in registered] == [ADDRESS]


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
def test_a_stopped_context_counts_as_a_cancel_and_a_raise_does_not(text: str, outcome: SlotOutcome) -> None:
    assert classify_error(text) == outcome


def test_slots_that_cannot_be_started_since_the_jvm_is_gone_end_the_job() -> None:
    """Launched again and again, they would keep the driver waiting for `start_timeout`."""
    posted: list[Any] = []
    thread = type(
        "ThreadOfTheJvm", (threading.Thread,), {"__init__": Mock(side_effect=ConnectionRefusedError)}
    )
    context: Any = SimpleNamespace(_jsc=object())
    launcher = type("Launcher", (SparkLauncher,), {"thread_class": thread})(context, Any, SystemClock())
    ThreadPerSlotLauncher.start(launcher, SlotSpec(address="", key=b"", attempt=1), posted.append)
    ThreadPerSlotLauncher.launch(launcher, 4)
    (end,) = posted
    assert (end.launch, SlotOutcome(end.reason, end.cancelled, end.executor_lost)) == (4, STOPPED)


def test_host_facts_are_those_of_this_process() -> None:
    facts = session.collect_host_facts()
    own = {"python": platform.python_version(), "spark_elastic": spark_elastic.__version__}
    assert own.items() <= facts.items()
    assert facts["host"]


@pytest.mark.parametrize("given", ["local", ""])
def test_a_master_is_no_session(given: Any) -> None:
    with pytest.raises(InvalidInput, match=f"spark must be a SparkSession; got '{given}'"):
        session.get_session(given)


# ---- bytes of tasks: with the plan where they are few, else as a file


class Session:
    """One that takes files."""

    def __init__(self) -> None:
        self.files: list[bytes] = []

    def addArtifacts(self, path: str, file: bool) -> None:
        assert file
        self.files.append(Path(path).read_bytes())


def test_the_file_of_a_program_holds_neither_environment_nor_store_options() -> None:
    """Others may read it: it lies on the server and on executors until the session ends."""
    session: Any = Session()
    store = Store.open("memory://jobs", token="store-7f3a9c51e0")
    policy, secrets = CheckpointPolicy("run", 1), ("env-7f3a9c51e0", "store-7f3a9c51e0")
    many = bytes(INLINE_AT_MOST + 1)
    token = {"TOKEN": secrets[0]}
    program = FunctionProgram(len, (many,), environment=token, checkpoint_target=(store, policy))
    carrier = make_program_payload(session, program)
    (file,) = session.files
    assert not [secret for secret in secrets if secret.encode() in file]
    assert not [secret for secret in secrets if secret in repr(carrier)]
    assert isinstance(carrier, SplitPayload)
    carrier = replace(carrier, bulk=InlinePayload(file))  # as the executor reads it
    loaded = cloudpickle.loads(carrier.value)
    assert (loaded.environment, loaded.pickled_call) == (program.environment, program.pickled_call)
    assert loaded._checkpoint_target[0].filesystem.storage_options == store.filesystem.storage_options


@pytest.mark.parametrize(
    ("java", "raised"),
    [("java.lang.OutOfMemoryError: Java heap space", InvalidInput), ("java.io.IOException", Py4JJavaError)],
)
def test_few_bytes_are_no_broadcast_and_more_than_the_drivers_heap_are_an_error(
    java: str, raised: type[Exception]
) -> None:
    class FullContext:
        def broadcast(self, content: bytes) -> None:
            raise BroadcastError("calling", None)

    class BroadcastError(Py4JJavaError):  # type: ignore[misc,unused-ignore]
        def __init__(self, message: str, exception: Any) -> None:
            Exception.__init__(self, message)

        def __str__(self) -> str:
            return java

    context: Any = FullContext()
    with share(context, b"few", "the program") as shipped:
        assert shipped.value == b"few"
    with pytest.raises(raised, match=r"spark\.driver\.memory to 1g|IOException"):
        with share(context, bytes(BROADCAST_FROM), "the program"):
            pass


SLOW = "numpy", "fsspec", "asyncio", "elastic_collectives"


@pytest.mark.parametrize("module", ["probe", "slot_task"])
def test_a_slot_begins_without_what_takes_long_to_import(module: str) -> None:
    code = f"import sys, spark_elastic.clusters.spark.{module}; print(*sys.modules.keys() & {SLOW!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout == "\n"
