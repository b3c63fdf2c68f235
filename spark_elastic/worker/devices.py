"""The one place that decides which device a worker trains on.

A slot's process decides once, from the setting `device` and from what Spark gave to the slot: `GpuClaims`. Each
training process applies it before anything of CUDA is loaded: `apply_device`. A worker sees only the GPU of its slot,
which is then `cuda:0` to it, whatever its rank on the machine is.

| `device` | Spark gave the slot a GPU | Spark gave it none |
|---|---|---|
| auto | that GPU | the CPU; what a hand-written loop sees is not changed |
| cuda | that GPU | the first GPU of the machine that no other slot of this user has taken |
| cpu | the CPU; no GPU is visible | the CPU; no GPU is visible |
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from pathlib import Path

from spark_elastic.errors import InvalidInput
from spark_elastic.protocol.slot_spec import SlotIdentity, SlotSpec
from spark_elastic.worker.context import get_process_context

GPU = "gpu"  # Spark's name of the resource
VISIBLE = "CUDA_VISIBLE_DEVICES"
DEVICES = Path("/dev")


class GpuClaims:
    """The GPUs that this process has taken for its slot, until it ends: the kernel then gives their locks back."""

    def __init__(self, folder: Path | None = None, devices: Path = DEVICES) -> None:
        """
        Args:
            folder: of the lock files; by default one of this user on this machine.
            devices: where the kernel shows GPUs.
        """
        self._folder = folder or Path(tempfile.gettempdir()) / f"spark-elastic-gpus-{os.getuid()}"
        self._devices = devices
        self._locks: list[int] = []

    def assign(self, spec: SlotSpec, identity: SlotIdentity, environment: Mapping[str, str]) -> SlotIdentity:
        """The slot with the GPU that its workers use, or with why it has none: `SlotIdentity.device_problem`."""
        if spec.device != "cuda" or identity.resources.get(GPU):
            return identity
        visible = list_visible_gpus(environment, self._devices)
        for number, gpu in enumerate(visible):
            for place in range(spec.slots_per_gpu):
                if self._take(f"{number}-{place}"):
                    return replace(identity, resources={**identity.resources, GPU: (gpu,)})
        return replace(identity, device_problem=_explain_missing_gpu(len(visible), spec.slots_per_gpu))

    def close(self) -> None:
        """Give the GPUs back."""
        for lock in self._locks:
            os.close(lock)
        self._locks = []

    def _take(self, name: str) -> bool:
        self._folder.mkdir(mode=0o700, exist_ok=True)
        lock = os.open(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            return False
        self._locks.append(lock)
        return True


def list_visible_gpus(environment: Mapping[str, str], devices: Path = DEVICES) -> list[str]:
    """What names the GPUs that processes with this environment can see: numbers, or ids of GPUs and MIG parts."""
    if VISIBLE in environment:
        return [name.strip() for name in environment[VISIBLE].split(",") if name.strip()]
    numbers = [path.name.removeprefix("nvidia") for path in devices.glob("nvidia[0-9]*")]
    return sorted(filter(str.isdecimal, numbers), key=int)


def _explain_missing_gpu(gpus: int, slots_per_gpu: int) -> str:
    if not gpus:
        return (
            "device='cuda', and this host shows no GPU: look at nvidia-smi and CUDA_VISIBLE_DEVICES there, give "
            "executors GPUs (spark.executor.resource.gpu.amount), or set device='cpu'."
        )
    count = "its GPU is" if gpus == 1 else f"all of its {gpus} GPUs are"
    return (
        f"device='cuda', and {count} taken by {gpus * slots_per_gpu} other slots of this host: lower num_workers, or "
        f"let more slots share a GPU by slots_per_gpu (now {slots_per_gpu})."
    )


def apply_device(spec: SlotSpec, identity: SlotIdentity, environment: MutableMapping[str, str]) -> None:
    """Let this training process see what its slot was given, and record what it trains on. Before CUDA is loaded.

    Raises:
        InvalidInput: the slot could not be given what the job asks for.
    """
    process = get_process_context()
    gpus = identity.resources.get(GPU, ())
    if spec.device == "cpu":
        environment[VISIBLE] = ""
        process.device = "cpu"
    elif spec.device in ("auto", "cuda"):
        if identity.device_problem:
            raise InvalidInput(identity.device_problem)
        process.device = "cuda" if gpus else "cpu"
        if gpus:
            environment[VISIBLE] = ",".join(find_gpu(gpu, environment) for gpu in gpus)
    else:
        process.device = spec.device  # of torch's names, for tests


def find_gpu(address: str, environment: Mapping[str, str]) -> str:
    """What CUDA calls a GPU that Spark calls `address`, in an environment that may show a part of the host's GPUs.

    Spark's address is a number among the host's GPUs, or an id. Where a resource manager shows a container only its
    own, numbers count these.

    Raises:
        InvalidInput: the environment does not show that GPU.
    """
    if VISIBLE not in environment:
        return address
    visible = list_visible_gpus(environment)
    if address in visible:
        return address
    if address.isdecimal() and int(address) < len(visible):
        return visible[int(address)]
    if len(visible) == 1:
        return visible[0]
    raise InvalidInput(
        f"Spark gave GPU {address!r} to this slot, and CUDA_VISIBLE_DEVICES shows {environment[VISIBLE]!r}: let it "
        "show all of the host's GPUs, or the slot's alone."
    )
