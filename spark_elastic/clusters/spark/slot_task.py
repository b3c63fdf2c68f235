"""The body of a slot launch, which runs the slot's agent inside Spark's Python worker, and how its Spark job ended. It
catches every error and returns a sentence: Spark would count a raised error as a task failure, and the driver alone
decides what is launched again."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pyspark import TaskContext

from spark_elastic.clock import SystemClock
from spark_elastic.clusters.spark import host_facts
from spark_elastic.clusters.spark.payload import Payload
from spark_elastic.clusters.spark.settings import ExecutorMemory
from spark_elastic.errors import ElasticError
from spark_elastic.protocol.messages import SPARK_STOPPED
from spark_elastic.protocol.types import SlotId, SlotIdentity, SlotOutcome, SlotSpec
from spark_elastic.rendezvous.addresses import split_address
from spark_elastic.rendezvous.client import RendezvousClient
from spark_elastic.worker.slot_agent import SlotAgent


@dataclass(frozen=True)
class SlotTask:
    """The task of a slot, shipped to an executor."""

    spec: SlotSpec  # the same for all slots of the job
    program: Payload  # the pickled program, fetched once by each executor
    memory: ExecutorMemory  # what Spark's settings leave for the processes of an executor's slots

    def __call__(self, launches: Iterable[int]) -> Iterator[str]:
        """Serve the slot launch of each number in turn; yields why each ended."""
        for launch in list(launches):  # consumed, so that Spark uses the Python worker again
            try:
                yield self._serve(launch)
            except Exception as error:  # the driver reads it as the job's result, and decides what follows
                yield str(error) if isinstance(error, ElasticError) else f"{type(error).__name__}: {error}"

    def _serve(self, launch: int) -> str:
        # Not at the top: a client for Spark Connect alone imports this module, and has no such class.
        from pyspark import SparkFiles

        context = TaskContext.get()
        assert context is not None
        address = host_facts.find_reachable_address(*split_address(self.spec.address))
        host, host_pid = find_host(address)
        identity = SlotIdentity(
            slot=SlotId.build(launch, context.attemptNumber()),
            host=host,
            host_pid=host_pid,
            address=address,
            resources={name: tuple(each.addresses) for name, each in context.resources().items()},
            files=SparkFiles.getRootDirectory(),
        )
        payload, clock, spec = self.program.value, SystemClock(), self.spec
        known = spec.address, spec.key, spec.attempt, clock
        with RendezvousClient(*known, certificate=spec.certificate) as client:
            facts, shortage = host_facts.collect_host_facts(), self.memory.find_shortage
            return SlotAgent(spec, identity, payload, client, clock, facts, shortage).run()


def find_host(address: str, proc: Path = host_facts.PROC) -> tuple[str, int]:
    """Spark's id of the executor that this task runs in, "driver" in local mode, and the process id of its JVM.

    Spark does not tell Python workers: the id stands in the command line of their ancestor. Where platforms hide it,
    this machine's address and boot make the id: containers of one machine share the boot, those of several may share
    the address. The process id is then 0."""
    words, pid = host_facts.find_executor(proc)
    if b"--executor-id" in words:
        return words[words.index(b"--executor-id") + 1].decode(), pid
    return ("driver", pid) if pid else (f"{address}-{_read_boot(proc)}", 0)


def _read_boot(proc: Path) -> str:
    try:
        return (proc / "sys" / "kernel" / "random" / "boot_id").read_text(encoding="ascii")[:8]
    except OSError:  # hidden, too
        return socket.gethostname()


CANCELLED = (
    *("SPARK_JOB_CANCELLED", "cancelled job", "cancelled part of", "was cancelled", "JOB_GROUP_CANCELLED"),
    "OPERATION_CANCELED",  # Spark Connect's word
)
EXECUTOR_LOST = "ExecutorLostFailure"
PY4J_HEADER = "An error occurred while calling"
NEWEST_FAILURE = "most recent failure: "
STOPPED = ("SparkContext was shut down", "SparkContext has been shut down", "stopped SparkContext")
CONTEXT_STOPPED = SlotOutcome(SPARK_STOPPED, cancelled=True)


def classify_error(text: str) -> SlotOutcome:
    """How a Spark job ended that failed with an error of this text."""
    if any(marker in text for marker in STOPPED):
        return CONTEXT_STOPPED
    if EXECUTOR_LOST in text:  # first: its cause is any text
        return SlotOutcome(_first_line(text), executor_lost=True)
    if any(marker in text for marker in CANCELLED):
        return SlotOutcome(f"the slot job was cancelled: {_first_line(text)}", cancelled=True)
    return SlotOutcome(_first_line(text))


def _first_line(text: str) -> str:
    """The line of a py4j error that says what happened; of a stage that failed, its newest failure."""
    lines = [line.strip().removeprefix(": ") for line in text.splitlines() if line.strip()]
    called = [line for line in lines if not line.startswith(PY4J_HEADER)] or lines
    first = next((line for line in called if "org.apache.spark" in line), called[0] if called else "")
    return (first.partition(NEWEST_FAILURE)[2] or first)[:300]
