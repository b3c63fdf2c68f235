"""A fit and a run where a session refuses what standard access mode refuses: `python -m ... MASTER FOLDER`.

Databricks' documentation of standard access mode (Unity Catalog) names the SparkContext and its functions, RDDs,
Spark's JVM objects and settings other than Spark SQL's. The session is one of Spark Connect, as there. Each refused
name raises and is recorded, whether Spark's own client would have refused it or not. A worker is killed. The last line
is what was seen, as JSON.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import cloudpickle

from spark_elastic.testing import ClusterFaults, InjectedFault
from tests.spark import estimators

EPOCHS = 4
OF_SESSION = (
    "sparkContext",
    "_sc",
    "_jsc",
    "_jvm",
    "_jsparkSession",
    "_jconf",
    "addFile",
    "emptyRDD",
    "broadcast",
)
OF_DATAFRAME = (
    "rdd",
    "toJSON",
    "foreach",
    "foreachPartition",
    "_jdf",
    "_sc",
    "_jmap",
    "localCheckpoint",
    "checkpoint",
)


class Refusal(Exception):
    """What such a cluster raises."""


def refuse() -> list[str]:
    """From here on. Returns the list of what is asked for."""
    from pyspark.sql.connect.conf import RuntimeConf
    from pyspark.sql.connect.dataframe import DataFrame
    from pyspark.sql.connect.session import SparkSession

    asked: list[str] = []

    def deny(name: str) -> Any:
        def raise_refusal(*arguments: Any) -> Any:
            asked.append(name)
            raise Refusal(f"{name} is not supported on clusters in standard access mode")

        return property(raise_refusal)

    for name in OF_SESSION:
        setattr(SparkSession, name, deny(name))
    for name in OF_DATAFRAME:
        setattr(DataFrame, name, deny(name))
    for name in ("get", "set"):
        allowed = getattr(RuntimeConf, name)

        def check_setting(conf: Any, key: str, *values: Any, allowed: Any = allowed) -> Any:
            # pyspark 4.3's own functions ask for the second kind.
            if not key.startswith(("spark.sql.", "spark.python.sql.")):
                raise Refusal(f"[CONFIG_NOT_AVAILABLE] Configuration {key} is not available")
            return allowed(conf, key, *values)

        setattr(RuntimeConf, name, check_setting)
    return asked


def return_double_rank() -> int:
    import spark_elastic.torch as hvd

    return 2 * int(hvd.rank())


def main(master: str, folder: str) -> None:
    from pyspark.sql import SparkSession

    import spark_elastic

    logging.basicConfig(level=logging.WARNING)
    for module in (estimators, sys.modules[__name__]):
        cloudpickle.register_pickle_by_value(module)
    spark = SparkSession.builder.remote(master).config("spark.ui.enabled", "false").getOrCreate()
    asked = refuse()
    df = estimators.table(spark)
    faults = ClusterFaults([InjectedFault("kill worker", step=0, epoch=1, rank=1)], f"{folder}/faults")
    model = estimators.estimator(
        Path(folder) / "store",
        num_workers=2,
        batch_size=estimators.ROWS // 2,
        epochs=EPOCHS,
        callbacks=[faults.callback()],
    ).fit(df)
    model.save(f"{folder}/model")
    seen = {
        "injected": len(faults.read_injected()),
        "exact": estimators.is_close(model, estimators.train_plain(df, EPOCHS, estimators.compute_mse)),
        "shown": type(model).load(f"{folder}/model").transform(df).count(),
        "run": list(spark_elastic.run(return_double_rank, num_workers=2, verbose=0)),
        "asked": sorted(set(asked)),
    }
    spark.stop()
    sys.stdout.write("\n" + json.dumps(seen) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
