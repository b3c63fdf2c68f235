"""A client of Spark Connect: `python -m tests.spark.connect_job MASTER FOLDER`; its last line is what it saw, as JSON.

A session of this kind and a classic one cannot live in one process, hence this one.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from pathlib import Path
from typing import Any

import cloudpickle

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


def main(master: str, folder: Path) -> None:
    from pyspark.sql import SparkSession

    import spark_elastic
    from tests.spark import estimators

    keys: list[str] = []
    make = secrets.token_bytes

    def make_key(size: int | None = None) -> bytes:
        found = make(size)
        if size == 32:
            keys.append(found.hex())
        return found

    secrets.token_bytes = make_key
    cloudpickle.register_pickle_by_value(estimators)
    (folder / "events").mkdir()
    logged = {"enabled": "true", "dir": (folder / "events").as_uri(), "compress": "false"}
    settings = {f"spark.eventLog.{name}": value for name, value in logged.items()}
    settings |= {"spark.ui.enabled": "false", "spark.executor.memory": "512m"}
    spark = SparkSession.builder.remote(master).config(map=settings).getOrCreate()
    seen: dict[str, Any] = {
        "number": read_sentence(lambda: spark_elastic.run(look)),
        "ship": read_sentence(lambda: spark_elastic.run(look, num_workers=2, ship=True)),
        "results": list(spark_elastic.run(look, num_workers=2, env={"TOKEN": SECRET}, device="cpu")),
        "fit": estimators.fit_through_a_kill(spark, folder),
        "keys": keys,
    }
    spark.stop()
    sys.stdout.write("\n" + json.dumps(seen) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
