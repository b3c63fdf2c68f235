"""Programs whose session has no SparkContext, or a part of one; what a program saw is its last line, as JSON.

    python -m tests.spark.client_programs NAME MASTER FOLDER

A session of Spark Connect and a classic one cannot live in one process, hence these.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import torch
from py4j.clientserver import JavaClient
from py4j.protocol import Py4JError

from spark_elastic.clusters.spark import payload
from spark_elastic.data.store import Store
from spark_elastic.runs.checkpoint import CheckpointStore
from spark_elastic.training.torch.callbacks import progress
from tests.component.torch.job import ledger_of
from tests.spark import estimators
from tests.spark.cluster import find_executor, start_session

SECRET = "marked-7f3a9c51e0"


def look() -> tuple[int, str]:
    """The length of a worker's secret, and its GPUs."""
    return len(os.environ["TOKEN"]), os.environ.get("CUDA_VISIBLE_DEVICES", "any")


def read_sentence(call: Any) -> str:
    from spark_elastic.errors import ElasticError

    try:
        call()
    except ElasticError as error:
        return str(error)
    return "nothing was refused"


def connect(master: str, **settings: str) -> Any:
    from pyspark.sql import SparkSession

    usual = {"spark.ui.enabled": "false", "spark.executor.memory": "512m"}
    return SparkSession.builder.remote(master).config(map=usual | settings).getOrCreate()


def run_over_connect(master: str, folder: Path) -> dict[str, Any]:
    """A run, and a fit with a worker killed; what cannot work is said before any job. The folder gets an event log."""
    import spark_elastic

    keys: list[str] = []
    make = secrets.token_bytes

    def make_key(size: int | None = None) -> bytes:
        made = make(size)
        if size == 32:
            keys.append(made.hex())
        return made

    secrets.token_bytes = make_key
    (folder / "events").mkdir()
    logged = {"enabled": "true", "dir": (folder / "events").as_uri(), "compress": "false"}
    spark = connect(master, **{f"spark.eventLog.{name}": value for name, value in logged.items()})
    seen: dict[str, Any] = {
        "number": read_sentence(lambda: spark_elastic.run(look)),
        "ship": read_sentence(lambda: spark_elastic.run(look, num_workers=2, ship=True)),
        "results": list(spark_elastic.run(look, num_workers=2, env={"TOKEN": SECRET}, device="cpu")),
        "fit": estimators.fit_through_a_kill(spark, folder),
    }
    spark.stop()
    return {**seen, "keys": keys}


# ---- as clusters in standard access mode


EPOCHS = 8
NOBODY = "127.0.0.77"  # where nobody listens: what the client says of itself
NET = {"num_workers": 2, "batch_size": estimators.ROWS // 2, "epochs": EPOCHS, "checkpoint_steps": 1}
REFUSED_OF_SESSION = "sparkContext _sc _jsc _jvm _jsparkSession _jconf addFile emptyRDD broadcast"
REFUSED_OF_DATAFRAME = "rdd toJSON foreach foreachPartition _jdf _sc _jmap localCheckpoint checkpoint"


def refuse() -> list[str]:
    """From here on. Returns the list of what is asked for, whether Spark's own client would refuse it or not."""
    from pyspark.sql.connect.conf import RuntimeConf
    from pyspark.sql.connect.dataframe import DataFrame
    from pyspark.sql.connect.session import SparkSession

    asked: list[str] = []

    def deny(name: str) -> Any:
        def raise_refusal(*arguments: Any) -> Any:
            asked.append(name)
            raise RuntimeError(f"{name} is not supported on clusters in standard access mode")

        return property(raise_refusal)

    for kind, names in (SparkSession, REFUSED_OF_SESSION), (DataFrame, REFUSED_OF_DATAFRAME):
        for name in names.split():
            setattr(kind, name, deny(name))
    for name in ("get", "set"):
        allowed = getattr(RuntimeConf, name)

        def check_setting(conf: Any, key: str, *values: Any, allowed: Any = allowed) -> Any:
            # pyspark 4.3's own functions ask for the second kind.
            if not key.startswith(("spark.sql.", "spark.python.sql.")):
                raise RuntimeError(f"[CONFIG_NOT_AVAILABLE] Configuration {key} is not available")
            return allowed(conf, key, *values)

        setattr(RuntimeConf, name, check_setting)
    return asked


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
        if "will run in a task" in text or "the run continues from" in text:
            self.told.append(text)

    def inject_fault(self, gate: Path) -> None:
        """Blocks until it has struck; opens the gate behind which the workers wait."""
        while not (self.addresses and self.kept.read_published()):
            time.sleep(0.1)
        find_executor(psutil.Process(find_listener(self.addresses[0]))).kill()
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


def find_listener(address: str) -> int:
    """The process that listens there."""
    port = int(address.rpartition(":")[2])
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
            return connection.pid
    raise LookupError(f"nobody listens at {address}")


def fit_beside(spark: Any, folder: Path) -> dict[str, Any]:
    """A fit with a worker killed, and one of the saved estimator in a pipeline."""
    from pyspark.ml import Pipeline, PipelineModel
    from pyspark.ml.feature import VectorAssembler

    from spark_elastic import ElasticTorchEstimator

    df = estimators.table(spark)
    seen = estimators.fit_through_a_kill(spark, folder, EPOCHS, run_id="beside", ledger=True)
    rows = ledger_of(folder / "store" / "runs" / "beside" / "ledger")
    once = sorted(set(rows.values())) == [1] and len(rows) == EPOCHS * estimators.ROWS
    estimators.estimator(folder / "store", **NET).save(str(folder / "estimator"))
    loaded = ElasticTorchEstimator.load(str(folder / "estimator")).setParams(feature_cols=["v"], epochs=1)
    assembler = VectorAssembler(inputCols=["a", "b"], outputCol="v")
    piped = Pipeline(stages=[assembler, loaded]).fit(df)
    piped.save(str(folder / "pipeline"))
    through = PipelineModel.load(str(folder / "pipeline")).transform(df)
    return {"fit": seen, "once": once, "piped": through.count()}


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


def fit_over_connect(master: str, folder: Path) -> dict[str, Any]:
    """First beside the executors' reach, with a worker killed; then out of it, with the coordinator's executor killed.

    The session refuses what Databricks' documentation of standard access mode (Unity Catalog) says that it does: the
    SparkContext and its functions, RDDs, Spark's JVM objects and settings other than Spark SQL's.
    """
    logging.basicConfig(level=logging.WARNING)
    spark, asked = connect(master), refuse()
    seen = {
        "beside": fit_beside(spark, folder),
        "afar": fit_afar(spark, folder),
        "keras": keras(spark, folder),
    }
    spark.stop()
    return {**seen, "asked": asked}


DENIED = ("schedulerBackend", "statusTracker", "queryExecution", "getCurrentUser")


def deny() -> list[str]:
    """From here on; the methods that were asked for."""
    asked: list[str] = []
    send = JavaClient.send_command

    def check_whitelist(client: Any, command: str, *arguments: Any, **named: Any) -> Any:
        kind, _, method, *_ = [*command.split("\n"), "", ""]
        if kind == "c" and method in DENIED:
            asked.append(method)
            raise Py4JError(f"py4j.security.Py4JSecurityException: Method {method}() is not whitelisted")
        return send(client, command, *arguments, **named)

    JavaClient.send_command = check_whitelist
    return asked


def fit_where_py4j_denies(master: str, folder: Path) -> dict[str, Any]:
    """Every call of Spark's inner parts is refused at py4j's wire, as clusters in standard access mode do; a worker is
    killed. (A refused SparkContext cannot be played here: pyspark's own functions of such a session ask for it.)
    """
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("spark_elastic")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    spark, asked = start_session(master), deny()
    fit = estimators.fit_through_a_kill(spark, folder)
    spark.stop()
    return {"fit": fit, "told": [text for text in said if "hosts are known by" in text], "asked": asked}


PROGRAMS: dict[str, Callable[[str, Path], dict[str, Any]]] = {
    program.__name__: program for program in (run_over_connect, fit_over_connect, fit_where_py4j_denies)
}


def main(name: str, master: str, folder: str) -> None:
    for module in (estimators, sys.modules[__name__]):
        cloudpickle.register_pickle_by_value(module)
    seen = PROGRAMS[name](master, Path(folder))
    sys.stdout.write("\n" + json.dumps(seen) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
