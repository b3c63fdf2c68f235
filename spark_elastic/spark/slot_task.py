"""The body of a slot job: runs the slot's agent inside Spark's Python worker.

Executed in the main thread of the task. It catches everything and returns a sentence: a raised error would count as
a task failure at Spark, and the driver alone decides what is launched again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pyspark import TaskContext

from spark_elastic.clock import SystemClock
from spark_elastic.config import ElasticConfig
from spark_elastic.driver.ports import Contact
from spark_elastic.rendezvous.client import RendezvousClient
from spark_elastic.spark.address import collect_host_facts, find_address_towards
from spark_elastic.spark.payload import Payload
from spark_elastic.spark.settings import ExecutorMemory
from spark_elastic.worker.entry import Header
from spark_elastic.worker.slot_agent import SlotAgent, SlotPlan


@dataclass(frozen=True)
class SlotTask:
    """Shipped to the executor; `program` is the pickled program, sent once per executor."""

    contact: Contact
    program: Payload
    port_range: tuple[int, int] | None
    preload: tuple[str, ...]
    collective_timeout: float
    driver_timeout: float
    cpus_per_worker: int | None
    room: ExecutorMemory
    spare_after: float
    imports: tuple[str, ...]  # before a training process is forked; see `Header`

    def __call__(self, jobs: Iterable[int]) -> Iterator[str]:
        numbers = list(jobs)  # consumed, so that Spark uses the Python worker again
        for job in numbers:
            try:
                yield self._serve(job)
            except Exception as error:  # told to the driver as the job's result, which decides what follows
                yield f"slot job {job} ended: {error}"

    def _serve(self, job: int) -> str:
        context = TaskContext.get()
        assert context is not None
        slot = f"{job}-{context.attemptNumber()}"
        clock = SystemClock()
        host, port = _split(self.contact.address)
        local = find_address_towards(host, port)

        def header(status_fd: int, payload_bytes: int) -> Header:
            return Header(
                parent=os.getpid(),
                address=self.contact.address,
                key=self.contact.key.hex(),
                attempt=self.contact.attempt,
                slot=slot,
                bind=local,
                port_range=self.port_range,
                preload=self.preload,
                collective_timeout=self.collective_timeout,
                driver_timeout=self.driver_timeout,
                payload_bytes=payload_bytes,
                status_fd=status_fd,
                threads=self.cpus_per_worker,
                certificate=self.contact.certificate,
                imports=self.imports,
                resources={name: tuple(held.addresses) for name, held in context.resources().items()},
            )

        executor, payload = executor_id(), self.program.value
        plan = SlotPlan(
            slot,
            job,
            executor,
            collect_host_facts(),
            payload,
            header,
            self.driver_timeout,
            self.room.shortage,
            self.spare_after,
        )
        to = self.contact
        with RendezvousClient(to.address, to.key, to.attempt, clock, certificate=to.certificate) as client:
            return SlotAgent(plan, client, clock).run()


def tasks_of(
    program: Payload,
    preload: tuple[str, ...],
    imports: tuple[str, ...],
    config: ElasticConfig,
    room: ExecutorMemory,
) -> Callable[[Contact], SlotTask]:
    """What a launch ships, once the contact is known. imports: see `Header`."""

    def make(contact: Contact) -> SlotTask:
        return SlotTask(
            contact,
            program,
            config.worker_port_range,
            preload,
            config.collective_timeout,
            config.driver_timeout,
            config.cpus_per_worker,
            room,
            config.spare_after,
            imports,
        )

    return make


def executor_id(proc: Path = Path("/proc")) -> str:
    """Spark's id of the executor that this task runs in; "driver" in local mode.

    Spark does not tell Python workers; the executor's command line, an ancestor of this process, does.
    """
    pid = os.getpid()
    try:
        while pid > 1:
            words = (proc / str(pid) / "cmdline").read_bytes().split(b"\0")
            if b"--executor-id" in words:
                return words[words.index(b"--executor-id") + 1].decode()
            pid = int((proc / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()[1])
    except OSError:
        pass  # other users' processes are hidden here; an executor would be of this user
    return "driver"


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
