"""The description of a slot: the driver knows `SlotSpec` at the launch, the slot itself its `SlotIdentity`.

Both travel unchanged from the slot to its training processes. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from spark_elastic.config import ElasticConfig
from spark_elastic.protocol.types import Fence, HostId, Position, SlotId, WorkerId

if TYPE_CHECKING:
    from typing_extensions import Self

_SETTINGS = ElasticConfig()


@dataclass(frozen=True, kw_only=True)
class SlotSpec:
    """What the driver knows of a slot when it launches it; the same for all slots of a job.

    A field with the name of an `ElasticConfig` setting takes its value: a new slot setting is one more line here.
    """

    address: str  # host:port of the driver's rendezvous server
    # The job's secret. It travels inside the cluster's own task channel, never in a command line or an environment.
    key: bytes = field(repr=False)
    attempt: int  # number of the driver that holds the run: the first half of every fence
    job_name: str = ""  # the job's name, for logs and Spark's UI
    # Certificate of the driver's server, PEM. None: plain HTTP, and workers do not encrypt either.
    certificate: str | None = None
    # Modules that a process must be able to import before it reports that it is warm.
    preload: tuple[str, ...] = ()
    # Early imports of the program, of `worker.imports`: those and its variables, which may be secret.
    imports: tuple[str, ...] = field(default=(), repr=False)

    # The run's, with which hosts keep commits in memory: R23 (kept commits). None: they keep none.
    commit_key: bytes | None = field(default=None, repr=False)

    # Settings of `ElasticConfig` under their names; times in seconds.

    # For so long commits stay in a host's memory once their worker has ended.
    orphan_timeout: float = _SETTINGS.orphan_timeout

    collective_timeout: float = _SETTINGS.collective_timeout  # the longest wait for peers in one collective
    # After so long a silence of the driver a worker ends itself.
    driver_timeout: float = _SETTINGS.driver_timeout
    # From when the slot's first worker is warm until a spare is started.
    spare_after: float = _SETTINGS.spare_after
    # Processes are forked from a fork server; False: each is spawned.
    fork_workers: bool = _SETTINGS.fork_workers
    # First and last port at which workers may listen; None: any.
    worker_port_range: tuple[int, int] | None = _SETTINGS.worker_port_range
    # The interface whose address peers dial; None: the one on the way to the driver.
    network_interface: str | None = _SETTINGS.network_interface
    # Threads that a worker computes with; None: as the slot's environment says, on Spark `spark.task.cpus`.
    cpus_per_worker: int | None = _SETTINGS.cpus_per_worker
    device: str = _SETTINGS.device  # what workers train on: auto, cuda, cpu or, in tests, a name of torch's
    slots_per_gpu: int = _SETTINGS.slots_per_gpu  # how many slots share a GPU

    @property
    def forks_imports(self) -> bool:
        """Whether a fork server makes imports for the slot's processes."""
        return self.fork_workers and bool(self.imports)

    @classmethod
    def from_config(cls, config: ElasticConfig, **known: Any) -> Self:
        """With the settings of a job's configuration, and `known` for the other fields."""
        settings = {f.name for f in fields(cls)} & {f.name for f in fields(config)}
        return cls(**{name: getattr(config, name) for name in settings}, **known)


@dataclass(frozen=True, kw_only=True)
class SlotIdentity:
    """Which slot a process belongs to."""

    slot: SlotId  # its id, which names the attempt of the task
    host: HostId = ""  # the host that carries the slot: a Spark executor
    # The process whose end is the host's end: a Spark executor's JVM. 0: none is known.
    host_pid: int = 0
    address: str = "127.0.0.1"  # the address of this machine at which peers reach the worker
    # What Spark gave to the slot: addresses by the name of the resource, such as {"gpu": ("0",)}.
    resources: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # The folder of the files that `SparkContext.addFile` gave to the slot's host; "": there is none.
    files: str = ""
    # Why the slot has no GPU although the job asks for one, for which the driver refuses it; "": nothing is wrong.
    device_problem: str = ""


@dataclass(frozen=True, kw_only=True)
class WorkerIdentity(SlotIdentity):
    """Which worker of its slot a training process is, once its slot has made it one."""

    worker: WorkerId  # its number grows from worker to worker of the slot
    # First and last port at which the worker may listen. None: any.
    ports: tuple[int, int] | None = None
    # The world that another process left as this worker, since its program has to begin again. None: there was none.
    left: Fence | None = None
    position: Position | None = None  # where that process stood

    @classmethod
    def of_slot(cls, slot: SlotIdentity, **own: Any) -> Self:
        return cls(**{f.name: getattr(slot, f.name) for f in fields(slot)}, **own)
