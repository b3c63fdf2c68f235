"""Which settings are remarked on at a job's start, and which are nobody's business."""

from __future__ import annotations

import pytest

pytest.importorskip("pyspark")

from spark_elastic.clusters.spark.settings import find_harmful_settings, warn_about_settings

ENCRYPTED = {"spark.network.crypto.enabled": "true"}


STANDALONE = {"spark.master": "spark://host:7077", "spark.driver.host": "10.0.0.7"}


@pytest.mark.parametrize(
    ("settings", "server", "says"),
    [
        ({"spark.master": "yarn"} | ENCRYPTED, None, ["set spark.executor.maxNumFailures to 1000"]),
        (
            {"spark.master": "k8s://https://c:443"} | ENCRYPTED,
            None,
            ["spark.executor.maxNumFailures to 1000"],
        ),
        (
            {"spark.master": "yarn", "spark.executor.maxNumFailures": "4"} | ENCRYPTED,
            None,
            ["failure of 4 executors"],
        ),
        ({"spark.executor.pyspark.memory": "1g"}, None, ["spark.executor.memoryOverhead"]),
        (STANDALONE, None, ["spark.network.crypto.enabled=true"]),
        (STANDALONE | {"spark.network.crypto.enabled": "false"}, None, ["spark.network.crypto.enabled=true"]),
        (STANDALONE | {"spark.ssl.rpc.enabled": "false"}, None, ["spark.network.crypto.enabled=true"]),
        (ENCRYPTED, "10.0.0.7", ["the Spark Connect server 10.0.0.7 in the clear", "use_ssl=true"]),
        (STANDALONE | ENCRYPTED, None, []),
        (STANDALONE | {"spark.ssl.rpc.enabled": "true"}, None, []),
        (STANDALONE | {"spark.driver.host": "127.0.0.1"}, None, []),
        *((ENCRYPTED, host, []) for host in ("localhost", "127.0.0.1", "[::1]", None)),
        ({"spark.master": "local[2]"}, None, []),
        ({"spark.master": "yarn", "spark.executor.maxNumFailures": "1000"} | ENCRYPTED, None, []),
        ({"spark.master": "yarn", "spark.executor.failuresValidityInterval": "10m"} | ENCRYPTED, None, []),
    ],
)
def test_settings_that_harm_are_found(settings: dict[str, str], server: str | None, says: list[str]) -> None:
    found = find_harmful_settings(settings, server)
    assert len(found) == bool(says)
    assert all(words in found[0] for words in says)


def test_each_harmful_setting_is_logged_once_per_application(caplog: pytest.LogCaptureFixture) -> None:
    class Application:
        """Keeps what it was told."""

    first = Application()
    for application in (first, first, Application()):
        warn_about_settings(STANDALONE, application)
    assert len(caplog.records) == 2
