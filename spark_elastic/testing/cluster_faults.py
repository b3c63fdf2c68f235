"""Faults on the user's own cluster, by a plan: the workers themselves inject each fault at its step.

Each fault is injected once, in whichever worlds its step is repeated: the first worker that creates the fault's object
in the folder injects it. An executor is found among the ancestors of the training process. Main thread only."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from spark_elastic.clock import Clock, SystemClock
from spark_elastic.data.store import Store, parse_store_url
from spark_elastic.errors import InvalidInput
from spark_elastic.training.torch.callbacks import Callback, Training
from spark_elastic.worker.context import get_process_context
from spark_elastic.worker.entry import shut_down_connections

FaultKind = Literal["kill worker", "kill slot", "kill executor", "stop", "cut", "slow", "drain"]
KINDS: tuple[FaultKind, ...] = get_args(FaultKind)


@dataclass(frozen=True)
class InjectedFault:
    """A fault of one worker, at the first step from (epoch, step) on.

    kill worker, kill slot, kill executor: SIGKILL to the training process, the Python worker of Spark above it, the
    JVM above that. stop: SIGSTOP to the training process for `seconds`. cut: all its TCP connections are broken. slow:
    for `seconds` each of its steps takes `pause` seconds longer; the log names it if that is above `stall_after`.
    drain: SIGPWR to the executor, which decommissions itself under `spark.decommission.enabled=true`, or else dies.
    """

    kind: FaultKind  # as described above
    step: int  # of the epoch, from 0
    epoch: int = 0  # from 0
    rank: int = 0  # of the worker, modulo the world's size
    seconds: float = 5.0  # how long a worker is stopped or slow
    pause: float = 0.25  # seconds by which a slow worker's steps are longer


def generate_faults(
    seed: int, count: int, steps: int, epochs: int = 1, kinds: Sequence[FaultKind] = KINDS
) -> tuple[InjectedFault, ...]:
    """`count` faults in the order in which they are due, the same for the same arguments.

    steps: of an epoch. The faults have different steps if there are enough steps.
    """
    draw = random.Random(seed)
    places = range(1, steps * epochs) if steps * epochs > 1 else range(1)
    chosen = draw.sample(places, count) if count <= len(places) else draw.choices(places, k=count)
    faults = []
    for place in sorted(chosen):
        kind, rank, seconds = draw.choice(kinds), draw.randrange(64), round(draw.uniform(1.0, 8.0), 1)
        faults.append(InjectedFault(kind, place % steps, place // steps, rank, seconds))
    return tuple(faults)


class ClusterFaults:
    """Injects the faults of a plan on a real cluster.

    folder: path or url that all hosts see, not used for faults before; each injected fault is an object there.
    In a hand-written loop call `inject`; pass `callbacks=[faults.callback()]` to an estimator.

    Raises:
        InvalidInput: the kind of a fault is not one of `KINDS`.
    """

    def __init__(
        self, faults: Sequence[InjectedFault], folder: str | os.PathLike[str], clock: Clock | None = None
    ) -> None:
        for fault in faults:
            if fault.kind not in KINDS:
                raise InvalidInput(f"kind must be one of {', '.join(KINDS)}; got {fault.kind!r}.")
        self._left = dict(enumerate(faults))
        self._folder = parse_store_url(folder)
        self._clock = clock or SystemClock()
        self._slow = 0.0, 0.0  # (time until which steps are slow, seconds added to each)

    def inject(self, step: int, rank: int, size: int, epoch: int = 0) -> None:
        """Inject the faults that are due on this worker. Call it on every worker at the beginning of each step."""
        if self._clock.now() < self._slow[0]:
            self._clock.sleep(self._slow[1])
        for number, fault in list(self._left.items()):
            if (epoch, step) >= (fault.epoch, fault.step) and fault.rank % size == rank:
                del self._left[number]
                self._inject_once(number, fault, {"epoch": epoch, "step": step, "rank": rank, "size": size})

    def read_injected(self) -> list[dict[str, Any]]:
        """The faults injected so far, in the order of the plan: kind, place, time (`wall`), and the process (`pid`)."""
        store = Store.open(self._folder)
        return [json.loads(store.read_bytes(name)) for name in sorted(store.list())]

    def callback(self) -> Any:
        """The plan as a callback of `ElasticTorchEstimator`. Needs torch."""
        return FaultCallback(self)

    def _inject_once(self, number: int, fault: InjectedFault, where: dict[str, Any]) -> None:
        target = _find_target(fault.kind)
        own = {"wall": self._clock.wall(), "host": socket.gethostname(), "pid": target}
        note = asdict(fault) | where | own
        if Store.open(self._folder).create_exclusive(f"{number:06}.json", json.dumps(note).encode()):
            self._execute(fault, target)

    def _execute(self, fault: InjectedFault, target: int) -> None:
        match fault.kind:
            case "stop":  # a stopped process cannot continue itself
                command = ["sh", "-c", f"sleep {fault.seconds}; kill -CONT {target}"]
                subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL)
                os.kill(target, signal.SIGSTOP)
            case "cut":
                shut_down_connections(socket.AF_INET, socket.AF_INET6)
            case "slow":
                self._slow = self._clock.now() + fault.seconds, fault.pause
            case "drain":
                os.kill(target, signal.SIGPWR)
            case _:
                os.kill(target, signal.SIGKILL)


def _find_target(kind: FaultKind) -> int:
    """The process that gets the signal. Raises InvalidInput: no executor is among this worker's ancestors."""
    if kind == "kill slot":
        return get_process_context().slot
    if kind not in ("kill executor", "drain"):
        return os.getpid()
    pid = get_process_context().slot
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if b"ExecutorBackend" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise InvalidInput(
        f"'{kind}' needs executors in processes of their own, and this worker is below none: use a cluster, or "
        'master("local-cluster[3,1,1024]"), or one of the other kinds.'
    )


class FaultCallback(Callback):
    """A plan of faults for the torch estimator; injects them before the forward pass of each step."""

    def __init__(self, faults: ClusterFaults) -> None:
        self._faults = faults  # not part of the training's state: each process has its own

    def on_step_begin(self, training: Training, epoch: int, step: int) -> None:
        self._faults.inject(step, training.rank, training.size, epoch)
