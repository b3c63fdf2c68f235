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

from tests.spark import estimators
from tests.spark.cluster import start_session

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


def main(master: str, folder: Path) -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("spark_elastic")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    cloudpickle.register_pickle_by_value(estimators)
    spark = start_session(master)
    asked = deny()
    seen = {
        "fit": estimators.fit_through_a_kill(spark, folder),
        "told": [text for text in said if "hosts are known by" in text],
        "asked": asked,
    }
    spark.stop()
    sys.stdout.write("\n" + json.dumps(seen) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
