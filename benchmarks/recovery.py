"""From SIGKILL to the next applied step of the slowest survivor: a killed child and a killed executor, beside torchrun.

Three workers on a real standalone cluster of this machine, default settings, a step that takes 30 ms. A step that was
interrupted is taken again by the next world; counted is the first step that a later world applied. The parts are
medians over all survivors and kills: when the kernel reports the end of what was killed, before which nobody can know
of it; detect (kill to the broken exchange), regroup (to the group of the next world),
sync, read (to the first rows), step. The peer is torchrun's elastic agent in the same run: three workers, the same
step, a checkpoint every ten steps.

Then worlds of plain local processes without a framework (`regroup`): a kill to the next world of all survivors, by
size (2 to 32 workers); a newcomer's first question to the first step with it; a drain; and the steps that these cost.
No kill and no size begins after `budget` seconds, of which each part has an equal share; what is left out is printed.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.parts.budget import Budget
from benchmarks.parts.regroup import local_rows
from benchmarks.parts.report import Row
from spark_elastic.training.torch.callbacks import Callback, Training

WORKERS, BATCH, ROWS, EPOCHS = 3, 8, 240, 1500
STEP = 0.030  # seconds
REPORTED = "the kernel reports its end"
PARTS = ("detect", "regroup", "sync", "read", "step")


class SlowNet(torch.nn.Module):
    """A forward pass of STEP seconds as long as the file `slow` exists."""

    def __init__(self, slow: str) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
        self._slow = slow

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if os.path.exists(self._slow):
            time.sleep(STEP)
        return self.net(x)


class StopOnceQuick(Callback):
    """Ends the training once nobody needs it: what is left of EPOCHS would take minutes on a slow machine."""

    def __init__(self, slow: str) -> None:
        self.slow = slow

    def on_epoch_end(self, training: Training, logs: dict[str, Any]) -> None:
        if not os.path.exists(self.slow):
            training.stop("all kills are done")


@dataclass
class Ledger:
    """What the workers wrote: one list of events per process, in order."""

    folder: Path
    events: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    def read(self) -> Ledger:
        self.events = {}
        for path in self.folder.glob("*.jsonl"):
            lines = [json.loads(text) for text in path.read_text().splitlines() if text.endswith("}")]
            if lines:
                self.events.setdefault(lines[0]["pid"], []).extend(lines)
        return self

    def members(self) -> dict[int, int]:
        """Processes that applied a step of the newest generation: process id -> size of its world."""
        last = {pid: lines[-1] for pid, lines in self.events.items() if lines[-1]["event"] != "broke"}
        applied = {
            pid: next((e for e in reversed(lines) if e["event"] == "applied"), None)
            for pid, lines in self.events.items()
            if pid in last
        }
        newest = max((e["generation"] for e in applied.values() if e), default=0)
        return {pid: e["world"] for pid, e in applied.items() if e and e["generation"] == newest}


class Killer(threading.Thread):
    """Waits for a full world, then kills a random member, `count` times or until the budget is spent."""

    def __init__(self, kind: str, count: int, ledger: Ledger, slow: Path, budget: Budget) -> None:
        super().__init__(daemon=True)
        self._kind = kind
        self._count = count
        self._ledger = ledger
        self._slow = slow
        self._budget = budget
        self._random = random.Random(count)
        self.kills: list[tuple[float, int]] = []  # wall seconds, victim
        self.reported: list[
            float
        ] = []  # seconds from each kill until the kernel says that the process has ended

    def run(self) -> None:
        for _ in self._budget.take(range(self._count), f"kills of a {self._kind}"):
            self._kill_one()
        self._slow.unlink()

    def _kill_one(self) -> None:
        while (members := self._find_full_world()) is None:
            if self.kills and self._budget.is_spent:
                return
            time.sleep(0.05)
        time.sleep(self._random.uniform(0.3, 1.0))
        victim = self._random.choice(members)
        process = psutil.Process(victim)
        target = process if self._kind == "child" else find_executor(process)
        ended = select.poll()
        descriptor = os.pidfd_open(target.pid)
        ended.register(descriptor, select.POLLIN)
        self.kills.append((time.time(), victim))
        target.kill()
        ended.poll()
        self.reported.append(time.time() - self.kills[-1][0])
        os.close(descriptor)
        time.sleep(1.0)

    def _find_full_world(self) -> list[int] | None:
        members = self._ledger.read().members()
        return sorted(members) if len(members) >= WORKERS and set(members.values()) == {WORKERS} else None


def find_executor(process: psutil.Process) -> psutil.Process:
    return next(p for p in process.parents() if "CoarseGrainedExecutorBackend" in " ".join(p.cmdline()))


def recoveries(ledger: Ledger, kills: list[tuple[float, int]]) -> tuple[list[float], dict[str, list[float]]]:
    """Seconds to the slowest survivor's next applied step, per kill; and the parts, per survivor and kill."""
    totals: list[float] = []
    parts: dict[str, list[float]] = {part: [] for part in PARTS}
    for moment, victim in kills:
        before = {
            pid: [e for e in lines if e["event"] == "applied" and e["wall"] <= moment]
            for pid, lines in ledger.events.items()
        }
        world = before[victim][-1]["generation"]
        survivors = [
            pid for pid, done in before.items() if pid != victim and done and done[-1]["generation"] == world
        ]
        slowest = 0.0
        for pid in survivors:
            times = first_times([e for e in ledger.events[pid] if e["wall"] > moment], world)
            slowest = max(slowest, times["applied"] - moment)
            marks = [moment, times["broke"], times["runs"], times["runs"], times["read"], times["applied"]]
            if "formed" in times and "synced" in times:
                marks[2], marks[3] = times["formed"], times["synced"]
            for part, begun, ended in zip(PARTS, marks[:-1], marks[1:], strict=True):
                parts[part].append(ended - begun)
        totals.append(slowest)
    return totals, parts


def first_times(events: list[dict[str, Any]], world: int) -> dict[str, float]:
    """When each kind of event was first seen: `broke` in the world that was hit, the others in the one that went on."""
    after = next(e["generation"] for e in events if e["event"] == "applied" and e["generation"] > world)
    times: dict[str, float] = {}
    for event in events:
        if event["generation"] == (world if event["event"] == "broke" else after):
            times.setdefault(event["event"], event["wall"])
    return times


def kill_in_a_fit(
    spark: Any, kind: str, kills: int, folder: Path, budget: Budget
) -> tuple[list[float], dict[str, list[float]]]:
    from spark_elastic import ElasticTorchEstimator

    slow = folder / f"slow-{kind}"
    slow.touch()
    ledger = Ledger(folder / "store" / "runs" / kind / "ledger")
    generator = random.Random(1)
    rows = [([generator.random() for _ in range(20)], generator.random()) for _ in range(ROWS)]
    df = spark.createDataFrame(rows, "x array<float>, y float")
    net = SlowNet(str(slow))
    estimator = ElasticTorchEstimator(
        model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.01), loss=lambda out, y: ((out[:, 0] - y) ** 2),
        feature_cols="x", label_cols="y", batch_size=BATCH, epochs=EPOCHS, num_workers=WORKERS,
        store=str(folder / "store"), run_id=kind, ledger=True, failure_budget=kills + 10, verbose=0,
        callbacks=[StopOnceQuick(str(slow))],
    )  # fmt: skip
    killer = Killer(kind, kills, ledger, slow, budget)
    killer.start()
    estimator.fit(df)
    if slow.exists():
        sys.exit(f"training ended after {len(killer.kills)} of {kills} kills: raise EPOCHS.")
    totals, parts = recoveries(ledger.read(), killer.kills)
    return totals, {REPORTED: killer.reported, **parts}


# ---- the peer


def torchrun(kills: int, folder: Path, budget: Budget) -> list[float]:
    """Seconds from the kill of a worker to the slowest worker's next step, under torchrun's elastic agent."""
    log = folder / "torchrun"
    log.mkdir()
    environment = dict(
        os.environ, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={WORKERS}"]
    command += [f"--max-restarts={kills + 2}", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:29555"]
    command += ["--rdzv-id=peer"]
    with (log / "output").open("wb") as output:
        agent = subprocess.Popen(
            [*command, "-m", "benchmarks.recovery", str(log)], env=environment, stdout=output, stderr=output
        )
        try:
            return [one_torchrun_kill(log) for _ in budget.take(range(kills), "kills under torchrun")]
        finally:
            agent.send_signal(signal.SIGTERM)
            agent.wait(60)


def one_torchrun_kill(log: Path) -> float:
    pids = await_steps(log, time.time())
    moment = time.time()
    os.kill(min(pids), signal.SIGKILL)
    return max(await_steps(log, moment, excluding=pids).values()) - moment


def await_steps(log: Path, since: float, excluding: Any = ()) -> dict[int, float]:
    """Process id -> time of its first step after `since`, once WORKERS processes took one."""
    deadline = time.time() + 120
    while time.time() < deadline:
        found: dict[int, float] = {}
        for path in log.glob("*.steps"):
            times = [float(text) for text in path.read_text().split("\n")[:-1]]
            later = [t for t in times if t > since]
            if later and int(path.stem) not in excluding:
                found[int(path.stem)] = later[0]
        if len(found) >= WORKERS:
            return found
        time.sleep(0.02)
    sys.exit("torchrun did not recover within 120 s")


def train_under_torchrun(log: Path) -> None:
    """A worker under torchrun: the same step, a checkpoint every ten steps."""
    torch.distributed.init_process_group("gloo")
    checkpoint = log / "checkpoint.pt"
    net = SlowNet("/dev/null")
    if checkpoint.exists():
        net.load_state_dict(torch.load(checkpoint))
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with (log / f"{os.getpid()}.steps").open("a", buffering=1) as steps:
        for step in range(100_000):
            optimizer.zero_grad()
            model(torch.rand(BATCH, 20)).mean().backward()
            optimizer.step()
            steps.write(f"{time.time()}\n")
            if step % 10 == 9 and torch.distributed.get_rank() == 0:
                torch.save(net.state_dict(), f"{checkpoint}.new")
                os.replace(f"{checkpoint}.new", checkpoint)


def on_cluster(
    kind: str, kills: int, folder: Path, budget: Budget
) -> tuple[list[float], dict[str, list[float]]]:
    from tests.spark.cluster import StandaloneCluster, cluster_environment, start_session

    os.environ.update(cluster_environment(folder))
    with StandaloneCluster(folder / f"cluster-{kind}") as cluster:
        cluster.start_workers(WORKERS)
        spark = start_session(cluster.url, executor_cores="1")
        try:
            return kill_in_a_fit(spark, kind, kills, folder, budget)
        finally:
            spark.stop()


def measure(
    kills: int = 20,
    peer_kills: int = 3,
    local_sizes: tuple[int, ...] = (2, 4, 8, 16, 32),
    budget: float = 600.0,
) -> list[Row]:
    rows: list[Row] = []
    whole = Budget(budget)
    with tempfile.TemporaryDirectory(prefix="recovery-") as temporary:
        peer = statistics.median(torchrun(peer_kills, Path(temporary), whole.share(4)))
        for left, kind in ((3, "child"), (2, "executor")):
            totals, parts = on_cluster(kind, kills, Path(temporary), whole.share(left))
            p99 = sorted(totals)[min(len(totals) - 1, int(0.99 * len(totals)))]
            rows.append(Row(f"{kind} killed: p50 to the next step", statistics.median(totals), peer, "s"))
            rows.append(Row(f"{kind} killed: p99 to the next step", p99, peer, "s"))
            medians = {part: statistics.median(seconds) for part, seconds in parts.items()}
            rows += [Row(f"{kind} killed: {part}, median", m, None, "s") for part, m in medians.items()]
        rows += local_rows(Path(temporary), local_sizes, min(10, kills), whole)
    return rows


if __name__ == "__main__":  # as torchrun starts it
    train_under_torchrun(Path(sys.argv[1]))
