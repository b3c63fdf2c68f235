"""What Spark keeps of jobs over TLS, its event log and the executors' logs and folders, has none of their secrets.

Spark is stopped under the second of them, which ends it and completes the event log.
"""

from __future__ import annotations

import io
import secrets
import sys
import time
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

import spark_elastic
from spark_elastic.errors import JobCancelled
from tests.component.torch.hand_written import count
from tests.spark.cluster import StandaloneCluster, await_true
from tests.spark.conftest import SparkWith
from tests.spark.stories import ActAtStep

pytestmark = [pytest.mark.spark, pytest.mark.native, pytest.mark.timeout(420)]
for module in (__name__, count.__module__):
    cloudpickle.register_pickle_by_value(sys.modules[module])

SECRET = "marked-7f3a9c51e0"
WITHIN = 5.0  # seconds


def token() -> int:
    import os
    import sys

    sys.stdout.write("a line of the worker\n")
    return len(os.environ["TOKEN"])


def test_stopping_spark_ends_a_job_and_no_secret_is_in_sparks_properties_logs_or_ui(
    spark_with: SparkWith, standalone: StandaloneCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: list[bytes] = []
    make = secrets.token_bytes

    def make_key(size: int | None = None) -> bytes:
        made = make(size)
        if size == 32:  # a job's key; the words of other things are meant to be seen
            keys.append(made)
        return made

    monkeypatch.setattr(secrets, "token_bytes", make_key)
    log = {"enabled": "true", "dir": tmp_path.as_uri(), "compress": "false"}
    settings = {f"spark.eventLog.{name}": value for name, value in log.items()}
    spark = spark_with(settings | {"spark.task.maxFailures": "1"})
    given: dict[str, Any] = {"env": {"TOKEN": SECRET}, "tls": True, "num_workers": 2, "min_workers": 2}
    assert spark_elastic.run(token, stdout=io.StringIO(), spark=spark, **given) == [17, 17]
    began: list[float] = []

    def stop() -> None:
        began.append(time.monotonic())
        spark.stop()

    stream = ActAtStep(stop)
    with pytest.raises(JobCancelled):
        spark_elastic.run(count, (1_000_000, 1), stdout=stream, spark=spark, **given)
    assert time.monotonic() - began[0] < 2 * WITHIN  # the stop itself is Spark's own time
    stream.thread.join()
    await_true(lambda: not standalone.busy_executors(), "no training process", WITHIN)
    assert len(keys) >= 2
    needles = [SECRET.encode(), *keys, *(key.hex().encode() for key in keys)]
    places = [tmp_path, *standalone.scratch.parent.glob("worker*")]
    files = [path for place in places for path in place.rglob("*") if path.is_file()]
    assert any(b"SparkListenerJobStart" in path.read_bytes() for path in files)
    assert any(path.name == "stderr" for path in files)
    assert not {str(path): needle for path in files for needle in needles if needle in path.read_bytes()}
