"""A fault every 20 seconds on a real cluster of four executors while an estimator trains again and again.

    python tests/faults/soak_hour.py --minutes 60 --json benchmarks/results/soak_hour.json

Kills, stops, cuts and drains alternate over the ranks. Each fit is judged: rows missing or doubled per epoch, and its
float64 weights against those of an undisturbed fit. Memory, descriptors, threads of the driver and of the training
processes are noted every few seconds; nothing may grow. Exit status 0 when everything held.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "python")]

import cloudpickle  # noqa: E402
import numpy as np  # noqa: E402
import psutil  # noqa: E402
import torch  # noqa: E402

from benchmarks.parts.report import find_commit, machine  # noqa: E402
from spark_elastic import ElasticTorchEstimator  # noqa: E402
from spark_elastic.monitoring.report import WorldChange, WorldChangeKind  # noqa: E402
from spark_elastic.testing import ClusterFaults, InjectedFault  # noqa: E402
from spark_elastic.training.torch.callbacks import Callback, Training  # noqa: E402
from tests.component.torch.job import difference  # noqa: E402
from tests.spark.cluster import StandaloneCluster, cluster_environment, start_session  # noqa: E402
from tests.specification import STATES, check_journal  # noqa: E402

WORKERS, ROWS, BATCH, EPOCHS = 4, 4000, 8, 12
KINDS = ("kill executor", "stop", "cut", "drain", "kill worker", "kill slot")
TOLERANCE = 1e-9
GROWTH = 1.3  # of what was most, between the first and the last third of the time


class OrderedFaultCallback(Callback):
    """Injects the fault that an order in the folder names: NUMBER-RANK.json holds the kind of a fault."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def on_step_begin(self, training: Training, epoch: int, step: int) -> None:
        for order in Path(self._folder).glob(f"*-{training.rank}.json"):
            try:
                taken = order.rename(order.with_suffix(".taken"))
            except FileNotFoundError:
                continue  # a process that was stopped wakes up with the rank that another has by now
            kind = json.loads(taken.read_text())
            fault = InjectedFault(kind, step=0, seconds=6.0)
            ClusterFaults([fault], f"{self._folder}/struck-{order.stem}").inject(0, 0, 1)


class Attacker(threading.Thread):
    """Writes an order every so many seconds, and notes how the processes are."""

    def __init__(self, cluster: StandaloneCluster, folder: str, every: float) -> None:
        super().__init__(name="attacker", daemon=True)
        self._cluster, self._folder, self._every = cluster, folder, every
        self._began = time.monotonic()
        self.over = threading.Event()
        self.orders = 0
        self.samples: list[dict[str, float]] = []

    def run(self) -> None:
        kinds = itertools.cycle(KINDS)
        due = self._began + self._every
        while not self.over.wait(self._every / 4):
            self.samples.append(self._sample())
            if time.monotonic() >= due:
                due += self._every
                # A rank that the world does not have now may have it later; rank 0 is always there.
                order = Path(self._folder, f"{self.orders:05}-{self.orders * 3 % WORKERS}.json")
                order.write_text(json.dumps(next(kinds)))
                self.orders += 1

    def read_faults(self) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(Path(self._folder).glob("struck-*/*.json"))]

    def _sample(self) -> dict[str, float]:
        driver = psutil.Process()
        found = {"seconds": round(time.monotonic() - self._began, 1)}
        executors = map(self._cluster.training_children, self._cluster.executor_pids())
        children = map(_figures, itertools.chain(*executors))
        alive = [child for child in children if child is not None]
        for name, own, *others in zip(
            ("MB", "descriptors", "threads"), _figures(driver) or (), *alive, strict=True
        ):
            found[f"driver {name}"] = own
            found[f"worker {name}, most"] = max(others, default=0.0)
        return found | {"worker processes": len(alive)}


def _figures(process: psutil.Process) -> tuple[float, float, float] | None:
    try:
        return process.memory_info().rss / 2**20, process.num_fds(), process.num_threads()
    except psutil.Error:
        return None  # it ended meanwhile


def fit(df: Any, store: str, callbacks: list[Callback]) -> Any:
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).double()
    return ElasticTorchEstimator(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9),
        loss=squared_error,
        feature_cols="x",
        label_cols="y",
        batch_size=BATCH,
        epochs=EPOCHS,
        num_workers=WORKERS,
        min_workers=1,
        store=store,
        keep_data=True,
        checkpoint_seconds=5.0,  # what the loss of all may cost; less than a fit takes
        failure_budget=100_000,
        journal=f"{store}.journal",
        callbacks=callbacks,
        verbose=0,
    ).fit(df)


def squared_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(output[:, 0], target)


def table(spark: Any) -> Any:
    x = np.random.default_rng(3).normal(size=(ROWS, 16))
    rows = [(row.tolist(), float(np.abs(row).sum())) for row in x]
    return spark.createDataFrame(rows, "x array<double>, y double").repartition(WORKERS).cache()


def count_lost_steps(change: WorldChange) -> int:
    """Steps that a change must not cost: only a restart from a checkpoint goes back, and a loss breaks one step."""
    lost = change.steps_lost or 0  # None: no step was reported before
    return max(0, lost - {WorldChangeKind.RESTART: lost, WorldChangeKind.LOSS: 1}.get(change.kind, 0))


def measure_growth(samples: list[dict[str, float]]) -> dict[str, float]:
    """Of each figure: the most in the last third over the most in the first. Less would say how busy the hour was."""
    third = max(1, len(samples) // 3)
    names = [name for name in samples[0] if name != "seconds"]
    return {
        name: max(s[name] for s in samples[-third:]) / max(1.0, *(s[name] for s in samples[:third]))
        for name in names
    }


def soak(spark: Any, cluster: StandaloneCluster, folder: str, options: argparse.Namespace) -> dict[str, Any]:
    df = table(spark)
    calm = fit(df, f"{folder}/store", [])
    weights = calm.getModel().state_dict()
    orders = Path(folder, "orders")
    orders.mkdir()
    attacker = Attacker(cluster, str(orders), options.every)
    attacker.start()
    fits: list[dict[str, Any]] = []
    end = time.monotonic() + options.minutes * 60
    try:
        while time.monotonic() < end:
            model = fit(df, f"{folder}/store", [OrderedFaultCallback(str(orders))])
            report = model.summary.report
            fits.append(
                {
                    "seconds": report.seconds,
                    "goodput": report.goodput,
                    "recoveries": len(report.recoveries),
                    "steps lost": report.steps_lost,
                    "lost beyond P3": sum(map(count_lost_steps, report.world_changes)),
                    "lost by": [str(change) for change in report.world_changes if change.steps_lost],
                    "rows missing or doubled": sum(e.missing + e.duplicated for e in report.epochs),
                    "to undisturbed": difference(model.getModel().state_dict(), weights),
                }
            )
            sys.stdout.write(json.dumps(fits[-1]) + "\n")
            sys.stdout.flush()
    finally:
        attacker.over.set()
        attacker.join()
    missing = set(STATES) - check_journal(Path(folder, "store.journal"))
    verdict = {"rules": "held", "not reached": sorted(missing)}
    return judge(fits, attacker, calm.summary.report.goodput) | verdict


def judge(fits: list[dict[str, Any]], attacker: Attacker, calm: float) -> dict[str, Any]:
    struck = [fault["kind"] for fault in attacker.read_faults()]
    growth = measure_growth(attacker.samples)
    row = {
        "goodput, median of fits": statistics.median(f["goodput"] for f in fits),
        "goodput undisturbed": calm,
        "fits": len(fits),
        "faults": len(struck),
        "recoveries": sum(f["recoveries"] for f in fits),
        "steps lost": sum(f["steps lost"] for f in fits),
        "rows missing or doubled": sum(f["rows missing or doubled"] for f in fits),
        "to undisturbed, most": max(f["to undisturbed"] for f in fits),
    }
    beyond = sum(f["lost beyond P3"] for f in fits)
    right = row["rows missing or doubled"] == 0 and row["to undisturbed, most"] < TOLERANCE
    held = beyond == 0 and right and len(struck) > 0
    bounded = all(value < GROWTH for value in growth.values())
    return {
        "name": "soak_hour",
        "machine": machine(),
        "commit": find_commit(),
        "date": time.strftime("%Y-%m-%d"),
        "held": held and bounded,
        "rows": [
            {"case": case, "ours": ours, "peer": None, "unit": "", "ratio": None}
            for case, ours in row.items()
        ],
        "kinds": {kind: struck.count(kind) for kind in KINDS},
        "last third over first": growth,
        "fits": fits,
        "samples": {
            name: [round(sample[name], 1) for sample in attacker.samples] for name in attacker.samples[0]
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between faults")
    parser.add_argument("--json", type=Path, help="where the record goes")
    options = parser.parse_args()
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        os.environ.update(cluster_environment(Path(folder)))
        with StandaloneCluster(Path(folder, "cluster")) as cluster:
            cluster.start_workers(WORKERS)
            result = on_spark(cluster, folder, options)
    if options.json is not None:
        options.json.write_text(json.dumps(result) + "\n")
    shown = {name: value for name, value in result.items() if name not in ("samples", "fits")}
    sys.stdout.write(json.dumps(shown) + "\n")
    return 0 if result["held"] and not result["not reached"] else 1


def on_spark(cluster: StandaloneCluster, folder: str, options: argparse.Namespace) -> dict[str, Any]:
    spark = start_session(cluster.url, decommission_enabled="true")
    try:
        return soak(spark, cluster, folder, options)
    finally:
        spark.stop()


if __name__ == "__main__":
    sys.exit(main())
