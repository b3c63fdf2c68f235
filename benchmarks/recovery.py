"""From SIGKILL to the next applied step of the slowest survivor: a killed child and a killed executor, beside torchrun.

Three workers on a real standalone cluster of this machine, default settings, a step that takes 30 ms. A step that was
interrupted is taken again by the next world; counted is the first step that a later world applied. The parts are
medians over all survivors and kills: when the kernel reports the end of what was killed, before which nobody can know
of it; detect (kill to the broken exchange), regroup (to the group of the next world),
sync, read (to the first rows), step. The peer is torchrun's elastic agent in the same run: three workers, the same
step, a checkpoint every ten steps.

Then worlds of plain local processes without a framework (`regroup`): a kill to the next world of all survivors, by
size (2 to 32 workers); a newcomer's first question to the first step with it; a drain; and the steps that these cost.
"""

from __future__ import annotations

import os
import random
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.parts.budget import within_budget
from benchmarks.parts.regroup import local_rows
from benchmarks.parts.report import Row
from benchmarks.parts.trial import Trial, find_firsts, find_last, kill_one, note
from spark_elastic.training.torch.callbacks import Callback, Training

WORKERS, BATCH, ROWS, EPOCHS = 3, 8, 240, 1500
STEP = 0.030  # seconds
REPORTED = "the kernel reports its end"
PARTS = ("detect", "regroup", "sync", "read", "step")


class SlowNet(torch.nn.Module):
    """A forward pass of STEP seconds until the file `stop` appears."""

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


def kill_and_watch(kind: str, reported: list[float], trial: Trial) -> float:
    """Kill a member or its executor. reported: gets the seconds until the kernel says that the process has ended."""
    from tests.spark.cluster import find_executor

    time.sleep(random.uniform(0.3, 1.0))
    victim = psutil.Process(trial.choose_victim())
    target = victim if kind == "child" else find_executor(victim)
    ended, descriptor = select.poll(), os.pidfd_open(target.pid)
    ended.register(descriptor, select.POLLIN)
    moment = time.time()
    target.kill()
    ended.poll()
    reported.append(time.time() - moment)
    os.close(descriptor)
    return moment


def recoveries(trial: Trial) -> tuple[list[float], dict[str, list[float]]]:
    """Seconds to the slowest survivor's next applied step, per kill; and the parts, per survivor and kill."""
    totals: list[float] = []
    parts: dict[str, list[float]] = {part: [] for part in PARTS}
    for done in trial.done:
        firsts = find_firsts(trial, *done).values()
        survivors = [times for times in firsts if {"broke", "applied"} <= times.keys()]
        totals.append(max(times["applied"] for times in survivors))
        for times in survivors:
            marks = [0.0, times["broke"], times["runs"], times["runs"], times["read"], times["applied"]]
            if "formed" in times and "synced" in times:
                marks[2], marks[3] = times["formed"], times["synced"]
            for part, begun, ended in zip(PARTS, marks[:-1], marks[1:], strict=True):
                parts[part].append(ended - begun)
    return totals, parts


def kill_in_a_fit(kind: str, kills: int, folder: Path) -> tuple[list[float], dict[str, list[float]]]:
    from spark_elastic import ElasticTorchEstimator
    from tests.spark.cluster import StandaloneCluster, cluster_environment, start_session

    ledger = folder / "store" / "runs" / kind / "ledger"
    stop = str(ledger / "stop")
    generator = random.Random(1)
    rows = [([generator.random() for _ in range(20)], generator.random()) for _ in range(ROWS)]
    net = SlowNet(stop)
    estimator = ElasticTorchEstimator(
        model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.01), loss=lambda out, y: ((out[:, 0] - y) ** 2),
        feature_cols="x", label_cols="y", batch_size=BATCH, epochs=EPOCHS, num_workers=WORKERS,
        store=str(folder / "store"), run_id=kind, ledger=True, failure_budget=kills + 10, verbose=0,
        callbacks=[StopOnceQuick(stop)],
    )  # fmt: skip
    reported: list[float] = []
    trial = Trial(ledger, WORKERS, [partial(kill_and_watch, kind, reported)] * kills)
    os.environ.update(cluster_environment(folder))
    with StandaloneCluster(folder / f"cluster-{kind}") as cluster:
        cluster.start_workers(WORKERS)
        with start_session(cluster.url, executor_cores="1") as spark:
            trial.start()
            estimator.fit(spark.createDataFrame(rows, "x array<float>, y float"))
    totals, parts = recoveries(trial.finish())
    return totals, {REPORTED: reported, **parts}


# ---- the peer


def torchrun(kills: int, folder: Path) -> list[float]:
    """Seconds from the kill of a worker to the slowest worker's next step, under torchrun's elastic agent."""
    log = folder / "torchrun"
    log.mkdir()
    environment = dict(
        os.environ, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={WORKERS}"]
    command += [f"--max-restarts={kills + 2}", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:29555"]
    command += ["--rdzv-id=peer", "-m", "benchmarks.recovery", str(log)]
    trial = Trial(log, WORKERS, [kill_one] * kills)
    with (log / "output").open("wb") as output:
        agent = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            trial.start()
            trial.finish()
        finally:
            agent.send_signal(signal.SIGTERM)
            agent.wait(60)
    return [find_last(trial, *done, "applied") for done in trial.done]


def train_under_torchrun(log: Path) -> None:
    """A worker under torchrun: the same step, a checkpoint every ten steps."""
    torch.distributed.init_process_group("gloo")
    checkpoint = log / "checkpoint.pt"
    net = SlowNet(str(log / "stop"))
    if checkpoint.exists():
        net.load_state_dict(torch.load(checkpoint))
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    for step in range(100_000):
        optimizer.zero_grad()
        model(torch.rand(BATCH, 20)).mean().backward()
        optimizer.step()
        note(str(log), "applied", generation, WORKERS)
        if step % 10 == 9 and torch.distributed.get_rank() == 0:
            torch.save(net.state_dict(), f"{checkpoint}.new")
            os.replace(f"{checkpoint}.new", checkpoint)


def measure(
    kills: int = 20, peer_kills: int = 3, local_sizes: tuple[int, ...] = (2, 4, 8, 16, 32)
) -> list[Row]:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="recovery-") as temporary:
        peer = statistics.median(torchrun(peer_kills, Path(temporary)))
        for kind in within_budget(("child", "executor"), "kills of one kind:"):
            totals, parts = kill_in_a_fit(kind, kills, Path(temporary))
            p99 = sorted(totals)[min(len(totals) - 1, int(0.99 * len(totals)))]
            rows.append(Row(f"{kind} killed: p50 to the next step", statistics.median(totals), peer, "s"))
            rows.append(Row(f"{kind} killed: p99 to the next step", p99, peer, "s"))
            medians = {part: statistics.median(seconds) for part, seconds in parts.items()}
            rows += [Row(f"{kind} killed: {part}, median", m, None, "s") for part, m in medians.items()]
        rows += local_rows(Path(temporary), local_sizes, min(10, kills))
    return rows


if __name__ == "__main__":  # as torchrun starts it
    train_under_torchrun(Path(sys.argv[1]))
