"""The one place that decides which device a worker trains on.

A slot's process decides once, from the setting `device` and from what Spark gave to the slot (`GpuClaims`; docs/gpu.md
has the table). Each training process applies it before CUDA is loaded: `apply_device`. A worker sees only the GPU of
its slot, which is then `cuda:0` to it, whatever its rank on the machine is.
"""

from __future__ import annotations

import fcntl
import importlib.util
import itertools
import os
import re
import tempfile
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from spark_elastic.config import ElasticConfig
from spark_elastic.errors import InvalidInput
from spark_elastic.protocol.types import SlotIdentity, SlotSpec

GPU = "gpu"  # Spark's name of the resource
VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"  # in which CUDA numbers the GPUs of a machine
DEVICES = Path("/dev")
IDS = ("GPU-", "MIG-")


class GpuClaims:
    """The GPUs that this process has taken for its slot, until it ends: the kernel then gives their locks back."""

    def __init__(self, folder: Path | None = None, devices: Path = DEVICES) -> None:
        """folder: of the lock files; None: one of this user on this machine. devices: where the kernel shows GPUs."""
        self._folder = folder
        self._devices = devices
        self._locks: list[int] = []

    def assign(self, spec: SlotSpec, identity: SlotIdentity, environment: Mapping[str, str]) -> SlotIdentity:
        """The slot with the GPU that its workers use, or with why it has none: `SlotIdentity.device_problem`."""
        if spec.device != "cuda" or identity.resources.get(GPU):
            return identity
        visible = list_visible_gpus(environment, self._devices)
        try:
            for place in range(spec.slots_per_gpu):  # a second slot of a GPU once each has one
                for gpu in visible:
                    if self._take(f"{gpu}-{place}"):
                        return replace(identity, resources={**identity.resources, GPU: (gpu,)})
        except OSError as error:
            why = f"no file says which slot has which GPU ({error}): set TMPDIR to a folder that can be written."
            return replace(identity, device_problem=why)
        return replace(identity, device_problem=_explain_missing_gpu(len(visible), spec.slots_per_gpu))

    def close(self) -> None:
        for lock in self._locks:
            os.close(lock)
        self._locks = []

    def _take(self, name: str) -> bool:
        # Only here: a host without GPUs may have no folder for temporary files
        folder = self._folder or Path(tempfile.gettempdir()) / f"spark-elastic-gpus-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        file = folder / name.replace("/", "_")  # MIG instances had names such as MIG-GPU-5a1f/1/0
        lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            return False
        self._locks.append(lock)
        return True


def list_visible_gpus(environment: Mapping[str, str], devices: Path = DEVICES) -> list[str]:
    """What names the GPUs that processes with this environment can see: numbers, or ids of GPUs and MIG parts."""
    if VISIBLE in environment:  # CUDA reads it up to the first name that it does not know, such as -1
        names = (name.strip() for name in environment[VISIBLE].split(","))
        return list(itertools.takewhile(lambda name: name.isdecimal() or name.startswith(IDS), names))
    files = [path for path in devices.glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal()]
    return [str(number) for number in range(len(files))]  # a container has its host's numbers in their names


def set_accelerate_device(environment: MutableMapping[str, str], devices: Path = DEVICES) -> None:
    """Let Accelerate train on the CPU where no GPU is shown, unless the user has set what it does: it, and so Hugging
    Face's Trainer, takes a process without a GPU for one that trains alone."""
    others = () if VISIBLE in environment else (devices / "kfd", devices / "dxg")  # of AMD, and in WSL
    if not list_visible_gpus(environment, devices) and not any(path.exists() for path in others):
        environment.setdefault("ACCELERATE_USE_CPU", "true")


def _explain_missing_gpu(gpus: int, slots_per_gpu: int) -> str:
    if not gpus:
        return (
            "device='cuda', and this host shows no GPU: look at nvidia-smi and CUDA_VISIBLE_DEVICES there, give "
            "executors GPUs (spark.executor.resource.gpu.amount), or set device='cpu'."
        )
    count = "its GPU is" if gpus == 1 else f"all of its {gpus} GPUs are"
    slots = gpus * slots_per_gpu
    others = "another slot" if slots == 1 else f"{slots} other slots"
    return (
        f"device='cuda', and {count} taken by {others} of this host: lower num_workers, or let more slots share a GPU "
        f"by slots_per_gpu (now {slots_per_gpu})."
    )


def apply_device(spec: SlotSpec, identity: SlotIdentity, environment: MutableMapping[str, str]) -> None:
    """Let this training process see what its slot was given, and record what it trains on. Before CUDA is loaded.
    Raises InvalidInput: the slot could not be given what the job asks for."""
    from spark_elastic.worker.context import get_process_context  # it imports the engine

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
            environment.setdefault(ORDER, "PCI_BUS_ID")  # nvidia-smi's, which Spark's addresses are
            if len(gpus) > 1 and "MIG-" in environment[VISIBLE]:
                raise InvalidInput(
                    f"a process can use one MIG instance, and Spark gave {len(gpus)} to a slot: set "
                    "spark.task.resource.gpu.amount=1."
                )
    else:
        process.device = spec.device  # of torch's names, for tests


def find_gpu(address: str, environment: Mapping[str, str]) -> str:
    """What CUDA calls a GPU that Spark calls `address`, a number or an id. Raises InvalidInput: it is not shown."""
    if VISIBLE not in environment:
        return address
    visible = list_visible_gpus(environment)
    return visible[find_gpu_number(address, visible)]


def find_gpu_number(address: str, visible: Sequence[str]) -> int:
    """The number of a GPU as frameworks count those that they see. visible: as in CUDA_VISIBLE_DEVICES."""
    if address in visible:
        return visible.index(address)
    if address.isdecimal() and int(address) < len(visible):
        return int(address)
    if len(visible) == 1:
        return 0
    raise InvalidInput(
        f"Spark gave GPU {address!r} to this task, and CUDA shows {', '.join(visible) or 'none'}: let "
        "CUDA_VISIBLE_DEVICES show all of the host's GPUs, or the task's alone."
    )


# What hosts report before workers start; no framework is imported.


def collect_gpu_facts(environment: Mapping[str, str], devices: Path = DEVICES) -> dict[str, str]:
    """How many GPUs this process can see, and the CUDA or ROCm that torch is built for ("" for none)."""
    facts = {"gpus": str(len(list_visible_gpus(environment, devices)))}
    torch = importlib.util.find_spec("torch")
    if torch is not None and torch.origin is not None:
        with suppress(OSError):
            text = (Path(torch.origin).parent / "version.py").read_text(encoding="utf-8")
            builds = re.findall(r"^(?:cuda|hip)\b.*= '([^']+)'", text, re.MULTILINE)
            facts["torch_cuda"] = "".join(builds[:1])
    return facts


def check_host_device(
    host: Mapping[str, object], device: str, needs: Sequence[str], assigned: bool
) -> str | None:
    """Why a host cannot give its slots the device of a job. assigned: Spark gives GPUs, and its word is taken."""
    if device != "cuda":
        return None
    name = host.get("host", "unknown")
    if "torch" in needs and host.get("torch_cuda") == "":
        return (
            f"device='cuda', and torch {host.get('torch', '')} on host {name} is built without CUDA: install torch for "
            "CUDA there, or set device='cpu'."
        )
    if not assigned and host.get("gpus") == "0":
        return f"host {name}: {_explain_missing_gpu(0, 1)}"
    return None


def require_gpus(config: ElasticConfig, workers: int, environment: Mapping[str, str]) -> None:
    """Refuse a job whose workers all run on this machine, if it shows fewer GPUs than they need."""
    gpus = len(list_visible_gpus(environment))
    slots = gpus * config.slots_per_gpu
    if config.device != "cuda" or slots >= workers:
        return
    if not gpus:
        raise InvalidInput(_explain_missing_gpu(0, 1))
    raise InvalidInput(
        f"this host shows {gpus} GPUs, for {slots} slots, where the job needs {workers} workers: give "
        "--min-np fewer workers, or let more slots share a GPU by SPARK_ELASTIC_SLOTS_PER_GPU."
    )
