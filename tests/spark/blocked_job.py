"""A fit where users are kept from Spark's inner parts: `python -m tests.spark.blocked_job MASTER FOLDER`.

Every call of them is refused at py4j's wire, as clusters in standard access mode do. (A refused SparkContext cannot be
played here: pyspark's own functions of a session of this kind ask for it.) A worker is killed. The last line is what
was seen, as JSON.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import cloudpickle
from py4j.clientserver import JavaClient
from py4j.protocol import Py4JError

from spark_elastic.testing import ClusterFaults, InjectedFault
from tests.spark import estimators

EPOCHS = 6
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


def fit(spark: Any, folder: Path) -> dict[str, Any]:
    df = estimators.table(spark)
    faults = ClusterFaults([InjectedFault("kill worker", step=0, epoch=2, rank=1)], str(folder / "faults"))
    est = estimators.estimator(
        folder / "store",
        num_workers=2,
        batch_size=estimators.ROWS // 2,
        epochs=EPOCHS,
        callbacks=[faults.callback()],
    )
    model = est.fit(df)
    model.save(str(folder / "model"))
    return {
        "exact": estimators.is_close(model, estimators.train_plain(df, EPOCHS, estimators.compute_mse)),
        "recoveries": len(model.summary.report.recoveries),
        "injected": len(faults.read_injected()),
        "shown": type(model).load(str(folder / "model")).transform(df).count(),
    }


def main(master: str, folder: str) -> None:
    from pyspark.sql import SparkSession

    logging.basicConfig(level=logging.WARNING)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("spark_elastic")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    cloudpickle.register_pickle_by_value(estimators)
    builder = SparkSession.builder.master(master).config("spark.ui.enabled", "false")
    for side in ("host", "bindAddress"):
        builder = builder.config(f"spark.driver.{side}", "127.0.0.1")
    spark = builder.config("spark.executor.memory", "512m").getOrCreate()
    asked = deny()
    seen = fit(spark, Path(folder))
    seen |= {"told": [text for text in said if "hosts are known by" in text], "asked": sorted(set(asked))}
    spark.stop()
    sys.stdout.write("\n" + json.dumps(seen) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
