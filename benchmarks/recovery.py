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
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.parts.regroup import Act, Budget, RegroupTrial, find_event_after, kill_one, local_rows
from benchmarks.parts.report import Row
from spark_elastic.training.torch.callbacks import Callback, Training
from tests.spark.cluster import StandaloneCluster, cluster_environment, find_executor, start_session

WORKERS, BATCH, ROWS, EPOCHS = 3, 8, 240, 1500
STEP = 0.030  # seconds
REPORTED = "the kernel reports its end"
PARTS = ("detect", "regroup", "sync", "read", "step")


class SlowNet(torch.nn.Module):
    """A forward pass of STEP seconds until the file `stop` exists."""

    def __init__(self, stop: str) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
        self._stop = stop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not os.path.exists(self._stop):
            time.sleep(STEP)
        return self.net(x)


class StopOnceQuick(Callback):
    """Ends the training once nobody needs it: what is left of EPOCHS would take minutes on a slow machine."""

    def __init__(self, stop: str) -> None:
        self.stop = stop

    def on_epoch_end(self, training: Training, logs: dict[str, Any]) -> None:
        if os.path.exists(self.stop):
            training.stop("all kills are done")


def make_kill(kind: str, seed: int, reported: list[float]) -> Act:
    """Kills a random member, or its executor. reported: gets the seconds until the kernel says that it has ended."""
    rng = random.Random(seed)

    def kill(trial: RegroupTrial) -> float:
        time.sleep(rng.uniform(0.3, 1.0))
        process = psutil.Process(rng.choice(trial.members()))
        target = process if kind == "child" else find_executor(process)
        ended, descriptor = select.poll(), os.pidfd_open(target.pid)
        ended.register(descriptor, select.POLLIN)
        moment = time.time()
        target.kill()
        ended.poll()
        reported.append(time.time() - moment)
        os.close(descriptor)
        return moment

    return kill


def open_trial(ledger: Path, kills: int, kill: Act, budget: Budget, what: str) -> RegroupTrial:
    """Kills in a training whose workers write this ledger."""
    acts = (kill for _ in budget.take(range(kills), what))
    return RegroupTrial(ledger, WORKERS, acts, "*.jsonl")


def recoveries(trial: RegroupTrial) -> tuple[list[float], dict[str, list[float]]]:
    """Seconds to the slowest survivor's next applied step, per kill; and the parts, per survivor and kill."""
    totals: list[float] = []
    parts: dict[str, list[float]] = {part: [] for part in PARTS}
    events = defaultdict(list)
    for line in trial.lines():
        events[line["pid"]].append(line)
    for moment, world in trial.done:
        slowest = 0.0
        for lines in events.values():
            applied = [(e["wall"] > moment, e["generation"]) for e in lines if e["event"] == "applied"]
            if (False, world) not in applied or not any(late and its > world for late, its in applied):
                continue  # it was no member, or is the victim
            times = first_times([e for e in lines if e["wall"] > moment], world)
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

    ledger, reported = folder / "store" / "runs" / kind / "ledger", list[float]()
    stop = str(ledger / "stop")
    generator = random.Random(1)
    rows = [([generator.random() for _ in range(20)], generator.random()) for _ in range(ROWS)]
    df = spark.createDataFrame(rows, "x array<float>, y float")
    net = SlowNet(stop)
    estimator = ElasticTorchEstimator(
        model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.01), loss=lambda out, y: ((out[:, 0] - y) ** 2),
        feature_cols="x", label_cols="y", batch_size=BATCH, epochs=EPOCHS, num_workers=WORKERS,
        store=str(folder / "store"), run_id=kind, ledger=True, failure_budget=kills + 10, verbose=0,
        callbacks=[StopOnceQuick(stop)],
    )  # fmt: skip
    trial = open_trial(ledger, kills, make_kill(kind, kills, reported), budget, f"kills of a {kind}")
    trial.start(lambda event: None)
    estimator.fit(df)
    trial.finish()
    totals, parts = recoveries(trial)
    return totals, {REPORTED: reported, **parts}


# ---- the peer


def torchrun(kills: int, folder: Path, budget: Budget) -> list[float]:
    """Seconds from the kill of a worker to the slowest worker's next step, under torchrun's elastic agent."""
    log = folder / "torchrun"
    log.mkdir()
    own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **own}
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={WORKERS}"]
    command += [f"--max-restarts={kills + 2}", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:29555"]
    command += ["--rdzv-id=peer"]
    command += ["-m", "benchmarks.recovery", str(log)]
    acts = (kill_one for _ in budget.take(range(kills), "kills under torchrun"))
    trial = RegroupTrial(log, WORKERS, acts)
    with (log / "output").open("wb") as output:
        agent = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            trial.start(lambda event: None)
            trial.finish()
        finally:
            agent.terminate()
            agent.wait(60)
    return [find_event_after(trial, *done, "applied")[0] for done in trial.done]


def train_under_torchrun(log: Path) -> None:
    """A worker under torchrun: the same step, a checkpoint every ten steps."""
    torch.distributed.init_process_group("gloo")
    checkpoint = log / "checkpoint.pt"
    net = SlowNet("")
    if checkpoint.exists():
        net.load_state_dict(torch.load(checkpoint))
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    line: dict[str, Any] = {"event": "applied", "pid": os.getpid(), "size": WORKERS}
    line["generation"] = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with (log / f"{os.getpid()}.lines").open("a", buffering=1) as lines:
        for step in range(100_000):
            optimizer.zero_grad()
            model(torch.rand(BATCH, 20)).mean().backward()
            optimizer.step()
            lines.write(json.dumps({**line, "at": time.monotonic(), "step": step}) + "\n")
            if step % 10 == 9 and torch.distributed.get_rank() == 0:
                torch.save(net.state_dict(), f"{checkpoint}.new")
                os.replace(f"{checkpoint}.new", checkpoint)


def on_cluster(
    kind: str, kills: int, folder: Path, budget: Budget
) -> tuple[list[float], dict[str, list[float]]]:
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
