from __future__ import annotations

import math
from typing import Any

import pytest

from spark_elastic.config import ElasticConfig, OperationConfig, from_env, operations_from_env
from spark_elastic.errors import InvalidInput


def test_an_explicit_argument_wins_over_the_environment() -> None:
    environment = {"SPARK_ELASTIC_DRIVER_PORT": "7000", "SPARK_ELASTIC_LEDGER": "true"}
    assert from_env(environment) == ElasticConfig(driver_port=7000, ledger=True)
    assert from_env(environment, driver_port=7001, ledger=None) == ElasticConfig(
        driver_port=7001, ledger=True
    )


def test_values_are_read_by_their_kind() -> None:
    environment = {"SPARK_ELASTIC_WORKER_PORT_RANGE": "7000-7010", "SPARK_ELASTIC_LEASE": "2.5"}
    assert from_env(environment) == ElasticConfig(worker_port_range=(7000, 7010), lease=2.5)
    environment = {"SPARK_ELASTIC_COOLDOWN_RANGE": "0.5-10", "SPARK_ELASTIC_HOST_DISCOVERY": "./hosts.sh"}
    assert from_env(environment) == ElasticConfig(cooldown_range=(0.5, 10.0), host_discovery="./hosts.sh")


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"SPARK_ELASTIC_LEASE": "soon"}, "SPARK_ELASTIC_LEASE='soon'"),
        ({"SPARK_ELASTIC_LEDGER": "maybe"}, "SPARK_ELASTIC_LEDGER='maybe'"),
        ({"SPARK_ELASTIC_WORKER_PORT_RANGE": "7010-7000"}, "worker_port_range"),
        ({"SPARK_ELASTIC_DRIVER_PORT": "99999"}, "driver_port"),
        ({"SPARK_ELASTIC_COOLDOWN_RANGE": "9-3"}, "cooldown_range"),
        ({"SPARK_ELASTIC_COOLDOWN_RANGE": "0-3"}, "cooldown_range"),
        ({"SPARK_ELASTIC_TLS_KEY": "key.pem"}, "tls_certificate and tls_key go together"),
        ({"SPARK_ELASTIC_LOG_BYTES": "-1"}, "log_bytes"),
        ({"SPARK_ELASTIC_IDLE_SLOT_TIMEOUT": "0"}, "idle_slot_timeout"),
    ],
)
def test_a_value_that_does_not_fit_is_named(environment: dict[str, str], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        from_env(environment)


def test_an_unknown_log_level_is_refused_with_what_there_is() -> None:
    with pytest.raises(InvalidInput, match="trace, debug, info, warning, error or fatal; got 'loud'"):
        operations_from_env({"HOROVOD_LOG_LEVEL": "loud"})


def test_an_unknown_setting_is_refused_with_what_there_is() -> None:
    with pytest.raises(InvalidInput, match=r"'leese'.*lease"):
        from_env({}, leese=3.0)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, {}),
        ({"HOROVOD_FUSION_THRESHOLD": "1024"}, {"fusion_threshold": 1024, "bucket_bytes": 1024}),
        ({"HOROVOD_FUSION_THRESHOLD": "0"}, {"fusion_threshold": 0, "bucket_bytes": 1}),
        ({"HOROVOD_AUTOTUNE": "0"}, {"bucket_bytes": 25 << 20}),
        ({"HOROVOD_AUTOTUNE": "0", "SPARK_ELASTIC_BUCKET_BYTES": "9"}, {"bucket_bytes": 9}),
        (
            {"HOROVOD_FUSION_THRESHOLD": "1024", "SPARK_ELASTIC_FUSION_THRESHOLD": "7"},
            {"fusion_threshold": 7, "bucket_bytes": 1024},
        ),
        ({"HOROVOD_STALL_CHECK_TIME_SECONDS": "5"}, {"warn_after": 5.0}),
        ({"HOROVOD_STALL_CHECK_DISABLE": "1"}, {"warn_after": math.inf}),
        ({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0"}, {"wait_at_most": None}),
        ({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "90"}, {"wait_at_most": 90.0}),
        (
            {"HOROVOD_TIMELINE": "t.json", "HOROVOD_TIMELINE_MARK_CYCLES": "1"},
            {"timeline": "t.json", "timeline_mark_cycles": True},
        ),
        ({"HOROVOD_TIMELINE": "DYNAMIC"}, {}),
        ({"HOROVOD_LOG_LEVEL": "trace"}, {"log_level": "DEBUG"}),
        ({"HOROVOD_LOG_LEVEL": "fatal", "SPARK_ELASTIC_LOG_LEVEL": "info"}, {"log_level": "INFO"}),
    ],
)
def test_operations_follow_horovods_variables_where_ours_are_unset(
    environment: dict[str, str], expected: dict[str, Any]
) -> None:
    assert operations_from_env(environment) == OperationConfig(**expected)
