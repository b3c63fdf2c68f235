"""Whether what a slot starts fits beside the executor: measured on its processes, compared with Spark's settings.

`room_of` reads the settings on the driver; `shortage` is called by the slot's main thread on the executor. Bytes
throughout. Must not know how workers are started.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from spark_elastic.data.reading.host_memory import cgroup_limit

MEBIBYTE = 1 << 20
UNITS = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
LEAST_OVERHEAD = 384 * MEBIBYTE


@dataclass(frozen=True)
class Room:
    """heap: of the executor's JVM. beside: what the cluster manager grants beside it, None where it grants nothing.

    slots: of one executor.
    """

    heap: int
    beside: int | None
    slots: int

    def shortage(
        self, worker: int, spare: int | None = None, server: int | None = None, proc: Path = Path("/proc")
    ) -> str | None:
        """Why the processes of the executor's slots will not fit, all slots being like this one; None where they do.

        worker, spare: process ids; without a spare: there will be one, like the worker. server: of their fork server.
        """
        try:
            mapped = int((proc / str(worker) / "statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            pids = [worker, worker if spare is None else spare] + ([] if server is None else [server])
            sizes = [_share_of(proc / str(pid)) for pid in pids]
        except (OSError, ValueError):
            return None  # it has ended, which is told elsewhere
        most, _ = resource.getrlimit(resource.RLIMIT_AS)
        return judge(
            self,
            sum(sizes) * self.slots,
            mapped,
            None if most == resource.RLIM_INFINITY else most,
            cgroup_limit(),
        )


def _share_of(process: Path) -> int:
    """Its memory; of what it shares with others, segments among that, its part."""
    fields = dict(line.split(":", 1) for line in (process / "smaps_rollup").read_text().splitlines()[1:])
    return int(fields["Pss"].split()[0]) * 1024


def judge(room: Room, need: int, mapped: int, address_space: int | None, limit: int | None) -> str | None:
    """need: all processes of an executor's slots. mapped: by one. address_space: its limit. limit: of a cgroup."""
    if address_space is not None and mapped * 5 > address_space * 4:
        return (
            f"a worker has mapped {_mib(mapped)} of the {_mib(address_space)} that spark.executor.pyspark.memory "
            "lets it map: raise that, or unset it and raise spark.executor.memoryOverhead."
        )
    beside = room.beside
    if limit is not None:
        beside = min(limit - room.heap, limit if beside is None else beside)
    if beside is None or need <= beside:
        return None
    return (
        f"the {room.slots} workers of an executor and their spares take {_mib(need)} by now, and there are "
        f"{_mib(max(0, beside))} beside its JVM: set spark.executor.memoryOverhead to {_mib(need * 3 // 2)} or more."
    )


def room_of(settings: Mapping[str, str]) -> Room:
    """What the settings of an application grant; on YARN and Kubernetes the overhead, elsewhere nothing is counted."""
    heap = parse(settings.get("spark.executor.memory", "1g"))
    cores, cpus = settings.get("spark.executor.cores", "1"), settings.get("spark.task.cpus", "1")
    slots = max(1, int(cores) // max(1, int(cpus)))
    gpus = int(settings.get("spark.executor.resource.gpu.amount", "0"))
    if gpus:  # each slot takes a whole one
        slots = min(slots, gpus)
    master = settings.get("spark.master", "")
    if master != "yarn" and not master.startswith("k8s://"):
        return Room(heap, None, slots)
    default = (
        "0.1" if master == "yarn" else "0.4"
    )  # Kubernetes grants more to programs that are not the JVM's
    share = float(settings.get("spark.executor.memoryOverheadFactor", default))
    said = settings.get("spark.executor.memoryOverhead")
    overhead = max(LEAST_OVERHEAD, int(heap * share)) if said is None else parse(said)
    return Room(heap, overhead + parse(settings.get("spark.executor.pyspark.memory", "0")), slots)


def parse(text: str) -> int:
    """Spark's way to write a size, mebibytes where there is no unit: 512m, 2g, 1024."""
    text = text.strip().lower()
    if len(text) > 2 and text.endswith("b") and text[-2] in UNITS:
        text = text[:-1]
    if text[-1] in UNITS:
        return int(text[:-1]) * UNITS[text[-1]]
    return int(text) * MEBIBYTE


def _mib(amount: int) -> str:
    return f"{amount // MEBIBYTE}m"
