"""Faults on the user's own cluster, by a plan: the workers themselves cause each at its step.

Owns which fault strikes whom, and that each strikes once, whichever worlds repeat its step: the first worker to create
its object in the folder causes it. Knows no Spark: executors are ancestors of the training process. Main thread only.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from spark_elastic.clock import Clock, SystemClock
from spark_elastic.data.store import Store, url_of
from spark_elastic.errors import InvalidInput
from spark_elastic.torch.callbacks import Callback, Training

BlowKind = Literal["kill worker", "kill slot", "kill executor", "stop", "cut", "slow", "drain"]
KINDS: tuple[BlowKind, ...] = get_args(BlowKind)


@dataclass(frozen=True)
class Blow:
    """`kind` strikes the worker of `rank` (modulo the world's size) at the first step from (epoch, step) on.

    kill worker, kill slot, kill executor: SIGKILL to the training process, the Python worker of Spark above it, the
    JVM above that. stop: SIGSTOP to the training process for `seconds`. cut: all its TCP connections are broken. slow:
    for `seconds` each of its steps takes `pause` seconds longer; the log names it if that is above `stall_after`.
    drain: SIGPWR to the executor, which decommissions itself under `spark.decommission.enabled=true`, or else dies.
    """

    kind: BlowKind
    step: int
    epoch: int = 0
    rank: int = 0
    seconds: float = 5.0
    pause: float = 0.25


def seeded_blows(
    seed: int, count: int, steps: int, epochs: int = 1, kinds: Sequence[BlowKind] = KINDS
) -> tuple[Blow, ...]:
    """`count` blows in the order in which they are due, the same for the same arguments.

    steps: of an epoch; blows fall on different steps as long as there are enough.
    """
    draw = random.Random(seed)
    places = range(1, steps * epochs) if steps * epochs > 1 else range(1)
    chosen = draw.sample(places, count) if count <= len(places) else draw.choices(places, k=count)
    return tuple(
        Blow(
            draw.choice(kinds),
            place % steps,
            place // steps,
            draw.randrange(64),
            round(draw.uniform(1.0, 8.0), 1),
        )
        for place in sorted(chosen)
    )


class ClusterFaults:
    """Strikes the blows of a plan on a real cluster.

    folder: path or url that all hosts see, not used for faults before; each blow that was struck is an object there.
    In a hand-written loop call `strike`; pass `callbacks=[faults.callback()]` to an estimator.

    Raises:
        InvalidInput: a blow is not one of `KINDS`.
    """

    def __init__(
        self, blows: Sequence[Blow], folder: str | os.PathLike[str], clock: Clock | None = None
    ) -> None:
        for blow in blows:
            if blow.kind not in KINDS:
                raise InvalidInput(f"kind must be one of {', '.join(KINDS)}; got {blow.kind!r}.")
        self._left = dict(enumerate(blows))
        self._folder = url_of(folder)
        self._clock = clock or SystemClock()
        self._slow: tuple[float, float] | None = None  # until when, and by how much

    def strike(self, step: int, rank: int, size: int, epoch: int = 0) -> None:
        """Call it on every worker at the beginning of each step; it strikes what is due here."""
        self._linger()
        for number, blow in list(self._left.items()):
            if (epoch, step) >= (blow.epoch, blow.step) and blow.rank % size == rank:
                del self._left[number]
                self._once(number, blow, {"epoch": epoch, "step": step, "rank": rank, "size": size})

    def struck(self) -> list[dict[str, Any]]:
        """What was struck, in the order of the plan: kind, place, time (`wall`), and the process that was hit."""
        store = Store.open(self._folder)
        return [json.loads(store.read_bytes(name)) for name in sorted(store.list())]

    def callback(self) -> Any:
        """The plan as a callback of `ElasticTorchEstimator`. Needs torch."""

        return FaultCallback(self)

    def _once(self, number: int, blow: Blow, where: dict[str, Any]) -> None:
        target = _target(blow.kind)
        note = (
            asdict(blow) | where | {"wall": self._clock.wall(), "host": socket.gethostname(), "pid": target}
        )
        if Store.open(self._folder).create_exclusive(f"{number:06}.json", json.dumps(note).encode()):
            self._carry_out(blow, target)

    def _carry_out(self, blow: Blow, target: int) -> None:
        match blow.kind:
            case "stop":
                _wake_after(target, blow.seconds)
                os.kill(target, signal.SIGSTOP)
            case "cut":
                _break_connections()
            case "slow":
                self._slow = self._clock.now() + blow.seconds, blow.pause
            case "drain":
                os.kill(target, signal.SIGPWR)
            case _:
                os.kill(target, signal.SIGKILL)

    def _linger(self) -> None:
        if self._slow is not None and self._clock.now() < self._slow[0]:
            self._clock.sleep(self._slow[1])


def _target(kind: BlowKind) -> int:
    """The process that a blow hits.

    Raises:
        InvalidInput: this worker has no executor of its own above it, as in Spark's local mode.
    """
    if kind == "kill slot":
        return os.getppid()
    if kind not in ("kill executor", "drain"):
        return os.getpid()
    for pid in _ancestors(os.getpid()):
        if b"ExecutorBackend" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise InvalidInput(
        f"'{kind}' needs executors in processes of their own, and this worker is below none: use a cluster, or "
        'master("local-cluster[3,1,1024]"), or one of the other kinds.'
    )


def _ancestors(pid: int) -> Iterator[int]:
    while pid > 1:
        status = Path(f"/proc/{pid}/stat").read_text()
        pid = int(status.rpartition(")")[2].split()[1])
        yield pid


def _wake_after(pid: int, seconds: float) -> None:
    """By a process of its own, for the stopped one cannot wake itself."""
    subprocess.Popen(
        ["sh", "-c", f"sleep {seconds}; kill -CONT {pid}"], start_new_session=True, stdin=subprocess.DEVNULL
    )


def _break_connections() -> None:
    """Shut down every connected TCP socket of this process: both ends learn of it at once."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        if not entry.is_socket():
            continue
        connection = socket.socket(fileno=os.dup(int(entry.name)))
        with connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                try:
                    connection.getpeername()  # a socket that listens has none, and would listen no more
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # not connected


# A plan of faults as a callback of the torch estimator. Main thread of a training process; keeps no state.


class FaultCallback(Callback):
    """Strikes before the forward pass of each step."""

    def __init__(self, faults: ClusterFaults) -> None:
        self._faults = faults  # not part of the state: each process knows for itself what it has seen

    def on_step_begin(self, training: Training, epoch: int, step: int) -> None:
        self._faults.strike(step, training.rank, training.size, epoch)
