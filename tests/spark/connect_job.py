"""A client of Spark Connect: `python connect_job.py MASTER FOLDER`; its last line is what it saw, as JSON.

A session of this kind and a classic one cannot live in one process, hence this one.
"""

from __future__ import annotations

import io
import json
import os
import secrets
import signal
import sys
from pathlib import Path
from typing import Any

SECRET = "marked-7f3a9c51e0"
STEPS = 20


def executor() -> int:
    """The process of this worker's executor; of its slot's task where that is the driver's own."""
    pid, slot = os.getppid(), os.getppid()
    while pid > 1:
        if b"CoarseGrainedExecutorBackend" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return slot


def train(folder: str, whom: str) -> tuple[int, list[int], int, str]:
    """Steps; in the tenth, rank 1 of the first world kills itself or its executor. Steps, worlds, secret, GPUs."""
    import numpy as np

    from spark_elastic.handwritten.elastic_loop import elastic
    from spark_elastic.handwritten.object_state import ObjectState
    from spark_elastic.worker.context import get_context

    sizes: list[int] = []

    def loop(state: Any) -> None:
        worker = get_context()
        assert worker is not None
        assert worker.group is not None
        sizes.append(worker.group.size)
        while state.step < STEPS:
            if state.step == STEPS // 2 and worker.group.rank == 1:
                try:
                    os.close(os.open(f"{folder}/killed", os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    pass  # that was in an earlier world
                else:
                    os.kill(os.getpid() if whom == "worker" else executor(), signal.SIGKILL)
                    signal.pause()
            # The survivor waits in the tenth step for the one that comes in its place.
            total = np.array([1.0])
            worker.group.allreduce(total)
            if total[0] == 2.0 or state.step < STEPS // 2:
                state.step += 1
            state.commit()

    state = ObjectState(step=0)
    elastic(loop)(state)
    return state.step, sizes, len(os.environ["TOKEN"]), os.environ.get("CUDA_VISIBLE_DEVICES", "any")


def fit(spark: Any, folder: str) -> dict[str, Any]:
    """A fit of two steps, and its model's predictions."""
    import cloudpickle

    from tests.spark import estimators

    cloudpickle.register_pickle_by_value(estimators)
    df, half = estimators.table(spark), estimators.ROWS // 2
    model = estimators.estimator(Path(folder, "store"), num_workers=2, batch_size=half, epochs=2).fit(df)
    return {
        "exact": estimators.is_close(model, estimators.train_plain(df, 2, estimators.compute_mse)),
        "shown": model.transform(df).where("prediction is not null").count() == estimators.ROWS,
    }


def read_sentence(call: Any) -> str:
    from spark_elastic.errors import ElasticError

    try:
        call()
    except ElasticError as error:
        return str(error)
    return "nothing was refused"


def main(master: str, folder: str) -> None:
    from pyspark.sql import SparkSession

    import spark_elastic

    keys: list[str] = []
    make = secrets.token_bytes

    def make_key(size: int | None = None) -> bytes:
        found = make(size)
        if size == 32:
            keys.append(found.hex())
        return found

    secrets.token_bytes = make_key
    builder = SparkSession.builder.remote(master).config("spark.ui.enabled", "false")
    builder = builder.config("spark.executor.memory", "512m")
    logged = {"enabled": "true", "dir": Path(folder, "events").as_uri(), "compress": "false"}
    for name, value in logged.items():
        builder = builder.config(f"spark.eventLog.{name}", value)
    Path(folder, "events").mkdir()
    spark = builder.getOrCreate()
    given = folder, "worker" if master.startswith("local[") else "executor"
    seen: dict[str, Any] = {
        "number": read_sentence(lambda: spark_elastic.run(train, given)),
        "ship": read_sentence(lambda: spark_elastic.run(train, given, num_workers=2, ship=True)),
    }
    lines = io.StringIO()
    seen["results"] = spark_elastic.run(
        train,
        args=given,
        num_workers=2,
        min_workers=1,
        env={"TOKEN": SECRET},
        device="cpu",
        stdout=lines,
        gather_timeout=60.0,
    )
    seen["told"] = lines.getvalue()
    seen["fit"] = fit(spark, folder)
    spark.stop()
    sys.stdout.write("\n" + json.dumps(seen | {"keys": keys}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
