"""Which settings are remarked on at a job's start, and which are nobody's business."""

from __future__ import annotations

import pytest

pytest.importorskip("pyspark")

from spark_elastic.clusters.spark.settings import find_harmful_settings, warn_about_settings

ENCRYPTED = {"spark.network.crypto.enabled": "true"}


@pytest.mark.parametrize("master", ["yarn", "k8s://https://cluster:443"])
def test_sparks_limit_of_executor_failures_is_logged(master: str) -> None:
    (said,) = find_harmful_settings({"spark.master": master, **ENCRYPTED})
    assert "set spark.executor.maxNumFailures to 1000" in said
    (said,) = find_harmful_settings(
        {"spark.master": master, "spark.executor.maxNumFailures": "4", **ENCRYPTED}
    )
    assert "failure of 4 executors" in said


@pytest.mark.parametrize(
    "settings",
    [
        {"spark.master": "spark://host:7077", "spark.driver.host": "127.0.0.1"},
        {"spark.master": "local[2]"},
        {"spark.master": "yarn", "spark.executor.maxNumFailures": "1000", **ENCRYPTED},
        {"spark.master": "yarn", "spark.executor.failuresValidityInterval": "10m", **ENCRYPTED},
    ],
)
def test_harmless_settings_are_not_logged(settings: dict[str, str]) -> None:
    assert find_harmful_settings(settings) == []


@pytest.mark.parametrize("encrypted", ["spark.network.crypto.enabled", "spark.ssl.rpc.enabled"])
def test_an_unencrypted_key_is_logged(encrypted: str) -> None:
    settings = {"spark.master": "spark://host:7077", "spark.driver.host": "10.0.0.7"}
    (said,) = find_harmful_settings(settings)
    assert "spark.network.crypto.enabled=true" in said
    assert find_harmful_settings(settings | {encrypted: "true"}) == []
    assert find_harmful_settings(settings | {encrypted: "false"}) == [said]


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]", None])
def test_an_unencrypted_key_of_a_connect_client_is_logged(host: str | None) -> None:
    (said,) = find_harmful_settings(ENCRYPTED, "10.0.0.7")
    assert "the Spark Connect server 10.0.0.7 in the clear" in said
    assert "use_ssl=true" in said
    assert find_harmful_settings(ENCRYPTED, host) == []


def test_each_harmful_setting_is_logged_once_per_application(caplog: pytest.LogCaptureFixture) -> None:
    class Application:
        """Keeps what it was told."""

    first, settings = Application(), {"spark.master": "spark://host:7077", "spark.driver.host": "10.0.0.7"}
    for application in (first, first, Application()):
        warn_about_settings(settings, application)
    assert len(caplog.records) == 2


def test_a_limit_of_the_address_space_is_logged() -> None:
    (said,) = find_harmful_settings({"spark.executor.pyspark.memory": "1g"})
    assert "spark.executor.memoryOverhead" in said
