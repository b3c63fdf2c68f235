"""A client of Spark Connect that fits: `python connect_fit_job.py MASTER FOLDER`; its last line is JSON, what it saw.

First beside the executors' reach, with a worker killed; then out of it, with the coordinator's executor killed.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import torch

from spark_elastic.clusters.spark import payload
from spark_elastic.data.store import Store
from spark_elastic.runs.checkpoint import CheckpointStore
from spark_elastic.testing import ClusterFaults, InjectedFault
from spark_elastic.training.torch.callbacks import progress
from tests.component.torch.job import ledger_of
from tests.spark import estimators

EPOCHS = 8
NOBODY = "127.0.0.77"  # where nobody listens: what the client says of itself
NET = {"num_workers": 2, "batch_size": estimators.ROWS // 2, "epochs": EPOCHS, "checkpoint_steps": 1}


class Coordinators(logging.Handler):
    """Records where coordinators run; kills the executor of the first one once its run can be resumed."""

    def __init__(self, store: Store, run: str) -> None:
        super().__init__()
        self.kept = CheckpointStore(store, run)
        self.addresses: list[str] = []
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "runs in a task, at " in text:
            self.addresses.append(text.rpartition(" ")[2])
        if "will run in a task" in text or "continues from" in text:
            self.told.append(text)

    def inject_fault(self, gate: Path) -> None:
        """Blocks until it has struck; opens the gate behind which the workers wait."""
        while not (self.addresses and self.kept.read_published()):
            time.sleep(0.1)
        os.kill(find_executor_pid(listener(self.addresses[0])), signal.SIGKILL)
        gate.touch()


class GatedNet(estimators.Net):
    """In a worker, its fourth step waits for the gate."""

    def __init__(self, gate: Path) -> None:
        super().__init__()
        self.gate, self.calls = str(gate), 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        while progress() is not None and self.calls > 3 and not os.path.exists(self.gate):
            time.sleep(0.05)
        return super().forward(x)


def listener(address: str) -> int:
    """The process that listens there."""
    port = int(address.rpartition(":")[2])
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
            return connection.pid
    raise LookupError(f"nobody listens at {address}")


def find_executor_pid(pid: int) -> int:
    for process in [psutil.Process(pid), *psutil.Process(pid).parents()]:
        if any("CoarseGrainedExecutorBackend" in word for word in process.cmdline()):
            return process.pid
    raise LookupError(f"process {pid} belongs to no executor")


def fit_beside(spark: Any, folder: Path) -> dict[str, Any]:
    """Fit, with a worker killed; transform; all of it again from where it was saved."""
    from pyspark.ml import Pipeline, PipelineModel
    from pyspark.ml.feature import VectorAssembler

    from spark_elastic import ElasticTorchEstimator, ElasticTorchModel

    df = estimators.table(spark)
    faults = ClusterFaults([InjectedFault("kill worker", step=0, epoch=3, rank=1)], str(folder / "faults"))
    est = estimators.estimator(
        folder / "store", **NET, run_id="beside", ledger=True, callbacks=[faults.callback()]
    )
    model = est.fit(df)
    rows = ledger_of(folder / "store" / "runs" / "beside" / "ledger")
    shown = [row.prediction for row in model.transform(df).orderBy("id").collect()]
    model.write().overwrite().save(str(folder / "model"))
    model.write().overwrite().save(str(folder / "model"))
    again = ElasticTorchModel.load(str(folder / "model")).transform(df).orderBy("id").collect()
    est.save(str(folder / "estimator"))
    loaded = ElasticTorchEstimator.load(str(folder / "estimator"))
    loaded.setParams(feature_cols=["v"], run_id=None, callbacks=None, epochs=1, ledger=False)
    assembler = VectorAssembler(inputCols=["a", "b"], outputCol="v")
    piped = Pipeline(stages=[assembler, loaded]).fit(df)
    piped.save(str(folder / "pipeline"))
    through = PipelineModel.load(str(folder / "pipeline")).transform(df)
    return {
        "injected": len(faults.read_injected()),
        "exact": estimators.is_close(model, estimators.train_plain(df, EPOCHS, estimators.compute_mse)),
        "once": sorted(set(rows.values())) == [1] and len(rows) == EPOCHS * estimators.ROWS,
        "recoveries": len(model.summary.report.recoveries),
        "same": shown == [row.prediction for row in again],
        "piped": through.count(),
    }


def fit_afar(spark: Any, folder: Path) -> dict[str, Any]:
    """The same with a client that executors cannot reach, whose coordinator's executor is killed.

    Program and model travel as files of the session.
    """
    payload.INLINE_AT_MOST = 0
    df, store = estimators.table(spark), Store.open(str(folder / "store"))
    heard = Coordinators(store, "afar")
    logger = logging.getLogger("spark_elastic")
    logger.addHandler(heard)
    logger.setLevel(logging.INFO)
    est = estimators.estimator(
        folder / "store",
        **NET,
        run_id="afar",
        model=GatedNet(folder / "gate"),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        advertise_address=NOBODY,
        bind_address="127.0.0.1",
        driver_timeout=20.0,
    )
    striking = threading.Thread(target=heard.inject_fault, args=(folder / "gate",), daemon=True)
    striking.start()
    model = est.fit(df)
    return {
        "told": heard.told,
        "coordinators": len(heard.addresses),
        "exact": estimators.is_close(model, estimators.train_plain(df, EPOCHS, estimators.compute_mse)),
        "shown": model.transform(df).where("prediction is not null").count(),
        "began": model.summary.worlds[0].reason,
        "channels": [found.name for found in store.find() if found.name.startswith("channels")],
    }


def keras(spark: Any, folder: Path) -> list[float]:
    """Losses of a Keras model."""
    import keras

    from spark_elastic import ElasticKerasEstimator

    net = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    est = ElasticKerasEstimator(
        model=net,
        optimizer=keras.optimizers.SGD(0.05),
        loss="mse",
        feature_cols=["x"],
        label_cols=["y"],
        batch_size=8,
        epochs=2,
        num_workers=2,
        store=str(folder / "store"),
        verbose=0,
    )
    model = est.fit(estimators.table(spark))
    assert model.transform(estimators.table(spark)).where("prediction is null").count() == 0
    return [epoch["loss"] for epoch in model.history]


def main(master: str, folder: str) -> None:
    from pyspark.sql import SparkSession

    logging.basicConfig(level=logging.WARNING)
    for module in (estimators, sys.modules[__name__]):
        cloudpickle.register_pickle_by_value(module)
    builder = SparkSession.builder.remote(master).config("spark.ui.enabled", "false")
    spark = builder.config("spark.executor.memory", "512m").getOrCreate()
    folder_path = Path(folder)
    seen = {
        "beside": fit_beside(spark, folder_path),
        "afar": fit_afar(spark, folder_path),
        "keras": keras(spark, folder_path),
    }
    spark.stop()
    sys.stdout.write("\n" + json.dumps(seen) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
