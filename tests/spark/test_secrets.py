"""What Spark keeps of a job, its event log and the executors' logs and folders, has none of the job's secrets.

Here of one over TLS."""

from __future__ import annotations

import io
import secrets
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import cloudpickle
import pytest

import spark_elastic
from tests.spark.cluster import StandaloneCluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.native, pytest.mark.timeout(420)]
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SECRET = "marked-7f3a9c51e0"


def token() -> int:
    import os
    import sys

    sys.stdout.write("a line of the worker\n")
    return len(os.environ["TOKEN"])


def test_no_secret_is_in_sparks_properties_logs_or_ui(
    spark_with: Callable[[Mapping[str, str]], SparkSession],
    spark_cluster: StandaloneCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys: list[bytes] = []
    make = secrets.token_bytes

    def make_key(size: int | None = None) -> bytes:
        made = make(size)
        if size == 32:  # a job's key; the words of other things are meant to be seen
            keys.append(made)
        return made

    monkeypatch.setattr(secrets, "token_bytes", make_key)
    spark = spark_with(
        {
            "spark.eventLog.enabled": "true",
            "spark.eventLog.dir": tmp_path.as_uri(),
            "spark.eventLog.compress": "false",
        }
    )
    given = {"env": {"TOKEN": SECRET}, "tls": True, "min_workers": 2}
    assert spark_elastic.run(token, num_workers=2, stdout=io.StringIO(), **given) == [17, 17]
    spark.stop()  # which completes the event log
    assert keys
    needles = [SECRET.encode(), *keys, *(key.hex().encode() for key in keys)]
    places = [tmp_path, *spark_cluster.scratch.parent.glob("worker*")]
    files = [path for place in places for path in place.rglob("*") if path.is_file()]
    assert any(b"SparkListenerJobStart" in path.read_bytes() for path in files)
    assert any(path.name == "stderr" for path in files)
    assert not {str(path): needle for path in files for needle in needles if needle in path.read_bytes()}
