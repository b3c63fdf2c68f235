"""The driver of a training job on hosts that a test cuts off: trains, tells its worlds, judges weights and rows.

    python netns_job.py MASTER ADDRESS FOLDER LEASE EPOCHS

Standard output has one JSON object per line, each with "wall", the time: {"world": size} and {"lost": reason} as they
come, then {"verdict": ...}. Steps take their time while FOLDER/run/slow exists.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import signal
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1]), str(HERE.parents[1] / "python")]

import cloudpickle  # noqa: E402
import nets  # noqa: E402
import phases  # noqa: E402
import soak  # noqa: E402
import torch  # noqa: E402
from pyspark.sql import SparkSession  # noqa: E402

from spark_elastic import ElasticTorchEstimator  # noqa: E402
from spark_elastic.clusters.platforms.classic import ClassicPlatform  # noqa: E402
from spark_elastic.clusters.platforms.job_spec import JobSpec  # noqa: E402
from spark_elastic.driver.job import LaunchResult  # noqa: E402
from spark_elastic.monitoring.listener import JobListener  # noqa: E402
from spark_elastic.protocol.commands import AbortWorld, PublishWorld  # noqa: E402
from tests.spark.cluster import start_session  # noqa: E402


def say(**told: Any) -> None:
    sys.stdout.write(json.dumps(told | {"wall": time.time()}) + "\n")
    sys.stdout.flush()


class WorldLogHandler(logging.Handler):
    """Tells of the driver's worlds as they are published and end."""

    def emit(self, record: logging.LogRecord) -> None:
        command = record.args[0] if isinstance(record.args, tuple) and record.args else record.args
        if isinstance(command, PublishWorld):
            say(world=command.world.size)
        elif isinstance(command, AbortWorld):
            say(lost=command.reason)


def train(spark: SparkSession, folder: str, lease: float, epochs: int) -> dict[str, Any]:
    case = nets.CASES["mlp"]
    soak.make_table(spark, folder)
    torch.manual_seed(1)
    for name in ("records", "phases"):
        Path(folder, "run", name).mkdir(parents=True, exist_ok=True)
    estimator = ElasticTorchEstimator(
        model=nets.RecordingNet(case.net(), f"{folder}/run").double(),
        optimizer=case.optimizer(),
        loss=case.loss(),
        feature_cols=["id", "x"],
        label_cols="y",
        batch_size=soak.BATCH,
        epochs=epochs,
        num_workers=soak.WORKERS,
        store=f"{folder}/store",
        run_id="run",
        seed=soak.SEED,
        keep_data=True,
        ledger=True,
        lease=lease,
        verbose=0,
    )
    launched = []

    plainly = ClassicPlatform.launch

    def launch_recorded(
        self: ClassicPlatform, order: JobSpec, listener: JobListener | None = None
    ) -> LaunchResult:
        launched.append(plainly(self, order, listener))
        return launched[0]

    ClassicPlatform.launch = launch_recorded  # what all ranks came to; the fit itself keeps rank 0's
    weights = estimator.fit(spark.read.parquet(f"{folder}/table")).getModel().state_dict()
    return {
        "to plain loop": soak.difference(weights, soak.train_plain(case, folder, epochs)),
        "replicas": [json.loads(text)["digest"] for text in launched[0].results if text != "null"],
        "rows exact": soak.judge_run(folder, "run"),
    }


def main() -> None:
    master, address, folder, lease, epochs = sys.argv[1:6]
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logger = logging.getLogger("spark_elastic.driver")
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    logger.addHandler(WorldLogHandler())
    for module in (nets, phases):
        cloudpickle.register_pickle_by_value(module)
    torch.set_num_threads(1)  # the plain loop shares the machine with everybody else
    spark = start_session(master, driver_host=address, driver_bindAddress=address, executor_cores="1")
    try:
        say(verdict=train(spark, folder, float(lease), int(epochs)))
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
