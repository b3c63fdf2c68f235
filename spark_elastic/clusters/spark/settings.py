"""What Spark's settings mean for a job: settings that harm it, the memory beside an executor, the GPUs of slots.

docs/spark-settings.md says what each setting does, and which do not matter. Imports no py4j.
"""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from pyspark.resource import ResourceProfile, ResourceProfileBuilder, TaskResourceRequests

from spark_elastic.data.available_memory import read_cgroup_limit
from spark_elastic.errors import InvalidInput
from spark_elastic.rendezvous.addresses import is_loopback

log = logging.getLogger("spark_elastic.spark")

Settings: TypeAlias = Mapping[str, str]  # of Spark, by their names
DRIVER_HOST = "spark.driver.host"
EXECUTOR_GPUS = "spark.executor.resource.gpu.amount"
TASK_GPUS = "spark.task.resource.gpu.amount"

# ---- settings by which Spark itself would end or harm a job

FEW_FAILURES = 100  # lost executors; an elastic job may well survive more
YARN_DEFAULT = "spark.executor.maxNumFailures"
YARN_OLD = "spark.yarn.max.executor.failures"
VALIDITY = ("spark.executor.failuresValidityInterval", "spark.yarn.executor.failuresValidityInterval")
ADDRESS_SPACE = "spark.executor.pyspark.memory"
IDLE_TIMEOUT, IDLE_KILL = "idleTimeoutSeconds", "killOnIdleTimeout"  # of processes that send Spark nothing
CLASSIC_PYTHON, CONNECT_PYTHON = "spark.python.worker.", "spark.sql.execution.pyspark.udf."
# Each of these encrypts what Spark's driver sends to executors, tasks included.
CRYPTO = ("spark.network.crypto.enabled", "spark.authenticate.enableSaslEncryption", "spark.ssl.rpc.enabled")
# All settings that a job looks at.
LOOKED_AT = (
    *("spark.app.name", "spark.master", DRIVER_HOST, "spark.ssl.enabled", "spark.task.cpus"),
    *(EXECUTOR_GPUS, TASK_GPUS, "spark.executor.cores", "spark.executor.memory", ADDRESS_SPACE),
    *("spark.executor.memoryOverhead", "spark.executor.memoryOverheadFactor"),
    *("spark.kubernetes.memoryOverheadFactor", YARN_DEFAULT, YARN_OLD, *VALIDITY, *CRYPTO),
    *(prefix + name for prefix in (CONNECT_PYTHON, CLASSIC_PYTHON) for name in (IDLE_KILL, IDLE_TIMEOUT)),
)


def is_ssl_enabled(settings: Mapping[str, str]) -> bool:
    """Whether Spark's own servers speak TLS: then ours do, too, unless the configuration says otherwise."""
    return settings.get("spark.ssl.enabled", "false").lower() == "true"


def check_settings(settings: Mapping[str, str], prefixes: Sequence[str]) -> None:
    """prefixes: of the settings for the Python processes in which slots run; the first that is set counts. Raises
    InvalidInput: Spark would kill the slots, which send it nothing until they end."""

    def read(name: str) -> str:
        return next((settings[each + name] for each in prefixes if each + name in settings), "").lower()

    if read(IDLE_KILL) == "true" and read(IDLE_TIMEOUT).rstrip("s") not in ("", "0"):
        raise InvalidInput(
            f"with {prefixes[0]}{IDLE_KILL}=true Spark kills every slot after {read(IDLE_TIMEOUT)} seconds, since a "
            "slot sends it nothing until its end: set it to false."
        )


def warn_about_settings(settings: Mapping[str, str], application: object, plain: str | None = None) -> None:
    """Log each harmful setting once per application: its context or session remembers which were logged."""
    warned: set[str] = vars(application).setdefault("_spark_elastic_warned", set())
    for remark in find_harmful_settings(settings, plain):
        if remark not in warned:
            warned.add(remark)
            log.warning("%s", remark)


def find_harmful_settings(settings: Mapping[str, str], plain: str | None = None) -> list[str]:
    """Settings that end the whole application, expose the job's key or limit workers unnoticed; a sentence each. plain:
    host of a Spark Connect server to which the session speaks without TLS."""
    master = settings.get("spark.master", "local")
    is_local = master.startswith("local") or is_loopback(settings.get(DRIVER_HOST, ""))
    is_encrypted = any(settings.get(name, "false").lower() == "true" for name in CRYPTO)
    limit = settings.get(YARN_DEFAULT, settings.get(YARN_OLD))
    is_high = limit is not None and limit.isdigit() and int(limit) >= FEW_FAILURES
    failures = "few executors (twice their number by default)" if limit is None else f"{limit} executors"
    table = (
        (
            plain is not None and not is_loopback(plain),
            f"a job's key travels to the Spark Connect server {plain} in the clear, and anyone who listens to it can "
            "take it and join a job. Connect with sc://...;use_ssl=true.",
        ),
        (
            # There Spark ends an application whose executors failed too often, whatever its jobs think.
            _limits_containers(master) and not is_high and not any(name in settings for name in VALIDITY),
            f"Spark ends the whole application after the failure of {failures}, and no job can prevent it: set "
            f"{YARN_DEFAULT} to 1000, or {VALIDITY[0]} to 10m.",
        ),
        (
            ADDRESS_SPACE in settings,
            f"{ADDRESS_SPACE}={settings.get(ADDRESS_SPACE)} limits the address space of each worker, not its memory, "
            "and frameworks reserve much more than they use, CUDA most of all: use spark.executor.memoryOverhead "
            "instead.",
        ),
        (
            not is_local and not is_encrypted,
            "a job's key travels inside Spark's tasks, which are not encrypted here, and anyone who listens to the "
            "network can take it and join a job. Set spark.authenticate=true and spark.network.crypto.enabled=true.",
        ),
    )
    return [sentence for is_harmful, sentence in table if is_harmful]


def _limits_containers(master: str) -> bool:
    return master == "yarn" or master.startswith("k8s://")


# ---- memory: whether the processes of the slots fit beside the executor. All sizes are in bytes.

MEBIBYTE = 1 << 20
UNITS = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
LEAST_OVERHEAD = 384 * MEBIBYTE


@dataclass(frozen=True)
class ExecutorMemory:
    """What Spark's settings grant to an executor. The driver reads it; slots compare their processes with it."""

    heap: int  # of the executor's JVM
    overhead: int | None  # what the cluster manager grants beside the JVM; None: it does not count
    slots: int  # slots of one executor

    def find_shortage(
        self, worker: int, spare: int | None = None, server: int | None = None, proc: Path = Path("/proc")
    ) -> str | None:
        """Why the processes of the executor's slots will not fit, if all slots are like this one; None if they do.
        Process ids: spare: None: none runs, and it will be like the worker. server: the fork server; None: there is
        none."""
        try:
            mapped = int((proc / str(worker) / "statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            pids = [worker, worker if spare is None else spare] + ([] if server is None else [server])
            sizes = [_measure_memory(proc / str(pid)) for pid in pids]
        except (OSError, ValueError):
            return None  # it has ended; the slot notices that elsewhere
        most, _ = resource.getrlimit(resource.RLIMIT_AS)
        limits = None if most == resource.RLIM_INFINITY else most, read_cgroup_limit()
        return explain_shortage(self, sum(sizes) * self.slots, mapped, *limits)


def _measure_memory(process: Path) -> int:
    """The memory of a process; of what it shares with others, such as shared segments, its part."""
    fields = dict(line.split(":", 1) for line in (process / "smaps_rollup").read_text().splitlines()[1:])
    return int(fields["Pss"].split()[0]) * 1024


def explain_shortage(
    memory: ExecutorMemory, need: int, mapped: int, address_space: int | None, limit: int | None
) -> str | None:
    """Why memory will not suffice, in a sentence, or None. need: by all processes of an executor's slots. mapped:
    address space that one process has mapped; address_space: the limit of that. limit: of the control group."""
    if address_space is not None and mapped * 5 > address_space * 4:
        return (
            f"a worker has mapped {_mib(mapped)} of the {_mib(address_space)} that {ADDRESS_SPACE} "
            "lets it map: raise that, or unset it and raise spark.executor.memoryOverhead."
        )
    beside = memory.overhead
    if limit is not None:
        beside = min(limit - memory.heap, limit if beside is None else beside)
    if beside is None or need <= beside:
        return None
    return (
        f"the {memory.slots} workers of an executor and their spares take {_mib(need)} by now, and there are "
        f"{_mib(max(0, beside))} beside its JVM: set spark.executor.memoryOverhead to {_mib(need * 3 // 2)} or more."
    )


def read_executor_memory(settings: Settings, device: str = "auto", slots_per_gpu: int = 1) -> ExecutorMemory:
    """What the settings of an application grant. YARN and Kubernetes limit the overhead, other managers do not."""
    heap = parse_size(settings.get("spark.executor.memory", "1g"))
    cores, cpus = settings.get("spark.executor.cores", "1"), settings.get("spark.task.cpus", "1")
    slots = max(1, int(cores) // max(1, int(cpus)))
    gpus = int(settings.get(EXECUTOR_GPUS, "0"))
    if gpus and device != "cpu":
        slots = min(slots, gpus * slots_per_gpu)
    master = settings.get("spark.master", "")
    if not _limits_containers(master):
        return ExecutorMemory(heap, None, slots)
    # In cluster mode, Spark sets the factor for Kubernetes to 0.4 for a Python program.
    default = "0.1" if master == "yarn" else settings.get("spark.kubernetes.memoryOverheadFactor", "0.1")
    share = float(settings.get("spark.executor.memoryOverheadFactor", default))
    said = settings.get("spark.executor.memoryOverhead")
    overhead = max(LEAST_OVERHEAD, int(heap * share)) if said is None else parse_size(said)
    return ExecutorMemory(heap, overhead + parse_size(settings.get(ADDRESS_SPACE, "0")), slots)


def parse_size(text: str) -> int:
    """A size as Spark writes it: 512m, 2g, or 1024 for mebibytes."""
    text = text.strip().lower()
    if len(text) > 2 and text.endswith("b") and text[-2] in UNITS:
        text = text[:-1]
    if text[-1] in UNITS:
        return int(text[:-1]) * UNITS[text[-1]]
    return int(text) * MEBIBYTE


def _mib(amount: int) -> str:
    return f"{amount // MEBIBYTE}m"


# ---- the GPUs of slots, by a stage-level resource profile where Spark's own tasks get others


def choose_gpus_of_slot(settings: Mapping[str, str], device: str, slots_per_gpu: int) -> float | None:
    """The GPUs that a slot asks Spark for: a whole one, or the part that the job asks for, also where Spark's own tasks
    get none or share them. None: as many as Spark's own tasks get, which is right."""
    if int(settings.get(EXECUTOR_GPUS, "0")) == 0:
        return None
    wanted = 0.0 if device == "cpu" else 1 / slots_per_gpu
    given = float(settings.get(TASK_GPUS, "0"))
    enough = given == wanted or (wanted == 1.0 and given > 1)
    return None if enough else wanted


def make_slot_profile(
    settings: Settings, take: Callable[[ResourceProfile], Any], device: str = "auto", slots_per_gpu: int = 1
) -> ResourceProfile | None:
    """The resource profile of slots; None: the application's own. take: makes Spark accept a profile, or raises."""
    if device == "cpu" and int(settings.get(EXECUTOR_GPUS, "0")):
        log.warning("executors have GPUs, which this job leaves idle: it trains on the CPU (device='cpu')")
    gpus = choose_gpus_of_slot(settings, device, slots_per_gpu)
    if gpus is None:
        return None
    requests = TaskResourceRequests().cpus(int(settings.get("spark.task.cpus", "1")))
    if gpus:
        requests = requests.resource("gpu", gpus)
    share = {0.0: "no GPU", 1.0: "a whole GPU each"}.get(gpus, f"1/{slots_per_gpu} of a GPU each")
    try:
        profile: ResourceProfile = ResourceProfileBuilder().require(requests).build
        take(profile)
    except Exception as error:  # py4j's or Spark Connect's, with Spark's reason
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = next((line for line in lines if "upported" in line), lines[0] if lines else repr(error))
        log.warning(
            "slots should take %s, and this cluster has no stage-level resources (%s): %s",
            share,
            reason[:200],
            f"set {TASK_GPUS}={gpus:g}" if gpus else f"unset {TASK_GPUS}",
        )
        return None
    log.info("slots take %s, by a stage-level resource profile", share)
    return profile
