"""Settings: their defaults, the environment, what is refused, and the checks of single values."""

from __future__ import annotations

import math
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spark_elastic import checks
from spark_elastic.clusters.run.call import parse_options as parse
from spark_elastic.clusters.run.call import prepare
from spark_elastic.config import ElasticConfig, OperationConfig, from_env, operations_from_env
from spark_elastic.errors import InvalidInput

GLOO, FUSION = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "15"}, {"HOROVOD_FUSION_THRESHOLD": "1024"}


def test_an_explicit_argument_wins_over_the_environment() -> None:
    environment = {"SPARK_ELASTIC_DRIVER_PORT": "7000", "SPARK_ELASTIC_LEDGER": "true"}
    assert from_env(environment) == ElasticConfig(driver_port=7000, ledger=True)
    wanted = ElasticConfig(driver_port=7001, ledger=True)
    assert from_env(environment, driver_port=7001, ledger=None) == wanted


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"HOROVOD_ELASTIC_TIMEOUT": "90"}, {"start_timeout": 90.0}),
        ({"HOROVOD_ELASTIC_TIMEOUT": "90", "HOROVOD_SPARK_START_TIMEOUT": "30"}, {"start_timeout": 90.0}),
        ({"HOROVOD_START_TIMEOUT": "20"}, {"gather_timeout": 20.0}),
        (GLOO, {"collective_timeout": 15.0}),
        (GLOO | {"SPARK_ELASTIC_COLLECTIVE_TIMEOUT": "5"}, {"collective_timeout": 5.0}),
    ],
)
def test_a_job_follows_horovods_variables(environment: dict[str, str], expected: dict[str, float]) -> None:
    assert from_env(environment) == ElasticConfig(**expected)  # type: ignore[arg-type]
    other: dict[str, Any] = dict.fromkeys(expected, 3.0)
    assert from_env(environment, **other) == ElasticConfig(**other)


def test_horovods_interface_names_the_address_that_executors_dial() -> None:
    assert from_env({"HOROVOD_GLOO_IFACE": "lo"}).advertise_address == "127.0.0.1"
    ours = {"HOROVOD_GLOO_IFACE": "nowhere0", "SPARK_ELASTIC_ADVERTISE_ADDRESS": "10.0.0.1"}
    assert from_env(ours).advertise_address == "10.0.0.1"
    assert from_env({"HOROVOD_GLOO_IFACE": "nowhere0"}, advertise_address="here").advertise_address == "here"
    sentence = (
        r"network_interface \(HOROVOD_GLOO_IFACE\)='nowhere0' is no network interface of this machine .*; "
        r"there are: .*\blo\b"
    )
    with pytest.raises(InvalidInput, match=sentence):
        from_env({"HOROVOD_GLOO_IFACE": "nowhere0"})


def test_values_are_read_by_their_kind() -> None:
    environment = {"SPARK_ELASTIC_WORKER_PORT_RANGE": "7000-7010", "SPARK_ELASTIC_LEASE": "2.5"}
    assert from_env(environment) == ElasticConfig(worker_port_range=(7000, 7010), lease=2.5)
    environment = {"SPARK_ELASTIC_COOLDOWN_RANGE": "0.5-10", "SPARK_ELASTIC_HOST_DISCOVERY": "./hosts.sh"}
    assert from_env(environment) == ElasticConfig(cooldown_range=(0.5, 10.0), host_discovery="./hosts.sh")


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"HOROVOD_ELASTIC_TIMEOUT": "soon"}, "^HOROVOD_ELASTIC_TIMEOUT='soon' must be a number.$"),
        ({"SPARK_ELASTIC_WORKER_PORT_RANGE": "20000"}, "='20000' must be first-last, as in 20000-20099, or"),
        ({"SPARK_ELASTIC_COOLDOWN_RANGE": "1,60"}, "='1,60' must be lower-upper in seconds, as in 1-60.$"),
        ({"SPARK_ELASTIC_TLS": "on"}, "='on' must be true or false, or none.$"),
        ({"SPARK_ELASTIC_RESET_LIMIT": "few"}, "='few' must be a whole number, or none.$"),
        ({"SPARK_ELASTIC_LOG_LEVEL": "loud"}, "^SPARK_ELASTIC_LOG_LEVEL must be trace, .*; got 'loud'"),
        ({"SPARK_ELASTIC_WORKER_PORT_RANGE": "7010-7000"}, "worker_port_range"),
        ({"SPARK_ELASTIC_DRIVER_PORT": "99999"}, "driver_port"),
        ({"SPARK_ELASTIC_DEVICE": "cuda:1"}, "device must be one of 'auto', 'cpu', 'cuda'; got 'cuda:1'"),
        ({"SPARK_ELASTIC_COOLDOWN_RANGE": "0-3"}, "cooldown_range"),
        ({"SPARK_ELASTIC_TLS_KEY": "key.pem"}, "tls_certificate and tls_key go together"),
        ({"SPARK_ELASTIC_LOG_BYTES": "-1"}, "log_bytes"),
        ({"SPARK_ELASTIC_RESET_LIMIT": "-1"}, "reset_limit must be a whole number of 0 or more, or None"),
        ({"SPARK_ELASTIC_IDLE_SLOT_TIMEOUT": "0"}, "idle_slot_timeout"),
        ({"SPARK_ELASTIC_SPARE_AFTER": "-1"}, "spare_after must be 0 seconds or more; got -1"),
        *(
            ({"SPARK_ELASTIC_COLLECTIVE_TIMEOUT": seconds}, "collective_timeout must be seconds from")
            for seconds in ("inf", "1e-9")  # which the engine cannot count
        ),
    ],
)
def test_a_value_that_does_not_fit_is_named(environment: dict[str, str], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        from_env(environment)


@pytest.mark.parametrize(
    "variable",
    ["HOROVOD_FUSION_THRESHOLD", "SPARK_ELASTIC_WARN_AFTER", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"],
)
@pytest.mark.parametrize("text", ["-1", "nan"])
def test_a_variable_of_operations_that_is_negative_or_no_number_is_refused(variable: str, text: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{variable}(='nan' must be a whole number| must be 0 or more)"):
        operations_from_env({variable: text})


def test_an_empty_variable_counts_as_unset() -> None:
    """As deployments leave them."""
    names = ("BIND_ADDRESS", "TLS", "JOURNAL", "LEASE", "COOLDOWN_RANGE")
    assert from_env(dict.fromkeys([f"SPARK_ELASTIC_{name}" for name in names], "")) == ElasticConfig()
    assert from_env({"SPARK_ELASTIC_START_TIMEOUT": "", "HOROVOD_ELASTIC_TIMEOUT": "9"}).start_timeout == 9.0
    assert operations_from_env({"HOROVOD_TIMELINE": "", "HOROVOD_LOG_LEVEL": ""}) == OperationConfig()


def test_none_in_a_variable_stands_for_none_where_that_is_a_value() -> None:
    environment = {"SPARK_ELASTIC_CHECKPOINT_SECONDS": "none", "SPARK_ELASTIC_JOURNAL": "None"}
    assert from_env(environment) == ElasticConfig(checkpoint_seconds=None)
    operations = {"SPARK_ELASTIC_WAIT_AT_MOST": "none", "SPARK_ELASTIC_LOG_LEVEL": "none"}
    assert operations_from_env(operations) == OperationConfig()
    with pytest.raises(InvalidInput, match=r"^SPARK_ELASTIC_LEASE='none' must be a number\.$"):
        from_env({"SPARK_ELASTIC_LEASE": "none"})
    with pytest.raises(InvalidInput, match=r"^host_discovery must be a function or the path.*; got "):
        ElasticConfig(host_discovery={"a": 1})  # type: ignore[arg-type]


def test_a_variable_that_nothing_reads_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        from_env({"SPARK_ELASTIC_LEESE": "3", "SPARK_ELASTIC_TIMELINE": "t", "SPARK_ELASTIC_XYZ": "1"})
    assert caplog.messages == [
        "nothing reads the variable SPARK_ELASTIC_LEESE (did you mean SPARK_ELASTIC_LEASE?): "
        "docs/params.md lists those there are",
        "nothing reads the variable SPARK_ELASTIC_XYZ: docs/params.md lists those there are",
    ]


def test_variables_of_training_processes_are_checked_before_a_job() -> None:
    with pytest.raises(InvalidInput, match=r"^SPARK_ELASTIC_LOG_LEVEL must be .*; got 'loud'"):
        prepare(print, (), {"env": {"SPARK_ELASTIC_LOG_LEVEL": "loud"}}, ElasticConfig())


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, {}),
        (FUSION, {"fusion_threshold": 1024, "bucket_bytes": 1024}),
        ({"HOROVOD_FUSION_THRESHOLD": "0"}, {"fusion_threshold": 0, "bucket_bytes": 1}),
        ({"SPARK_ELASTIC_BUCKET_BYTES": "9"}, {"bucket_bytes": 9}),
        (FUSION | {"SPARK_ELASTIC_FUSION_THRESHOLD": "7"}, {"fusion_threshold": 7, "bucket_bytes": 1024}),
        ({"HOROVOD_STALL_CHECK_TIME_SECONDS": "5"}, {"warn_after": 5.0}),
        ({"HOROVOD_STALL_CHECK_DISABLE": "1"}, {"warn_after": math.inf}),
        ({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0"}, {"wait_at_most": None}),
        ({"HOROVOD_TIMELINE": "t.json"}, {"timeline": "t.json"}),
        ({"HOROVOD_TIMELINE_MARK_CYCLES": "1"}, {"timeline_mark_cycles": True}),
        ({"HOROVOD_TIMELINE": "DYNAMIC"}, {}),
        ({"HOROVOD_LOG_LEVEL": "trace"}, {"log_level": "DEBUG"}),
        ({"HOROVOD_LOG_LEVEL": "fatal", "SPARK_ELASTIC_LOG_LEVEL": "info"}, {"log_level": "INFO"}),
    ],
)
def test_operations_follow_horovods_variables(environment: dict[str, str], expected: dict[str, Any]) -> None:
    assert operations_from_env(environment) == OperationConfig(**expected)


# What Horovod 0.28.1 reads that a user sets: its operations, its launcher, and its part for Spark.
KNOBS = """
    HOROVOD_ADASUM_MPI_CHUNK_SIZE HOROVOD_AUTOTUNE HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES
    HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE HOROVOD_AUTOTUNE_LOG HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE
    HOROVOD_AUTOTUNE_WARMUP_SAMPLES HOROVOD_BATCH_D2D_MEMCOPIES HOROVOD_CACHE_CAPACITY HOROVOD_CCL_CACHE
    HOROVOD_CONTROLLER HOROVOD_CPU_OPERATIONS HOROVOD_CYCLE_TIME HOROVOD_DISABLE_GROUP_FUSION
    HOROVOD_DISABLE_NVTX_RANGES HOROVOD_DYNAMIC_PROCESS_SETS HOROVOD_ELASTIC_TIMEOUT HOROVOD_ENABLE_ASYNC_COMPLETION
    HOROVOD_ENABLE_XLA_OPS HOROVOD_FUSION_THRESHOLD HOROVOD_GLOO_IFACE HOROVOD_GLOO_TIMEOUT_SECONDS
    HOROVOD_HIERARCHICAL_ALLGATHER HOROVOD_HIERARCHICAL_ALLREDUCE HOROVOD_LOG_HIDE_TIME HOROVOD_LOG_LEVEL
    HOROVOD_MPI_THREADS_DISABLE HOROVOD_NUM_NCCL_STREAMS HOROVOD_SPARK_START_TIMEOUT
    HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX HOROVOD_STALL_CHECK_DISABLE HOROVOD_STALL_CHECK_TIME_SECONDS
    HOROVOD_STALL_SHUTDOWN_TIME_SECONDS HOROVOD_START_TIMEOUT HOROVOD_THREAD_AFFINITY HOROVOD_TIMELINE
    HOROVOD_TIMELINE_MARK_CYCLES HOROVOD_TORUS_ALLREDUCE
"""


def test_the_migration_page_names_every_variable_of_horovod() -> None:
    page = (Path(__file__).parents[2] / "docs" / "horovod-environment.md").read_text()
    patterns = set(re.findall(r"`(HOROVOD_[A-Z0-9_]+\*?)", page))
    assert [knob for knob in KNOBS.split() if not any(fnmatchcase(knob, one) for one in patterns)] == []


@pytest.mark.parametrize("name", ["checkpoint_seconds", "max_runtime"])
def test_none_overrides_the_environment_where_none_is_a_value(name: str) -> None:
    """Checkpoints by time are on unless they are turned off; of all else None is what holds without a word."""
    assert getattr(from_env({}, **{name: None}), name) is None
    assert getattr(parse({name: None}).config, name) is None
    assert from_env({}, lease=None, checkpoint_steps=None) == from_env({})


# ---- checks: what each keeps of a value, and the sentence for one that does not fit


PORTS = checks.make_range("two ports", checks.make_whole(1, 65535))


@pytest.mark.parametrize(
    ("check", "value", "kept"),
    [
        (checks.WHOLE, np.int64(3), 3),
        (checks.VERBOSE, True, 1),
        (checks.ABOVE_0, np.float32(0.5), 0.5),
        (checks.ABOVE_0, 2, 2.0),
        (checks.ABOVE_0.or_none(), None, None),
        (checks.TEXT, Path("hosts.sh"), "hosts.sh"),
        (checks.make_choice("bf16", "fp16"), "fp16", "fp16"),
        (PORTS, [np.int64(7000), 7010], (7000, 7010)),
        (checks.FUNCTION, len, len),
    ],
)
def test_a_value_that_fits_is_kept_as_pythons_own(check: checks.Check, value: Any, kept: Any) -> None:
    found = check("name", value)
    assert (type(found), found) == (type(kept), kept)


@pytest.mark.parametrize(
    ("check", "value", "sentence"),
    [
        (checks.COUNT, 0, "name must be a whole number of 1 or more; got 0."),
        (checks.COUNT, True, "name must be a whole number of 1 or more; got True."),
        (checks.COUNT.or_none(), "3", "name must be a whole number of 1 or more, or None; got '3'."),
        (checks.ABOVE_0, math.nan, "name must be a number above 0; got nan."),
        (checks.FLAG, 1, "name must be True or False; got 1."),
        (checks.TEXT, b"path", "name must be text; got b'path'."),
        (checks.VERBOSE, -1, "name must be 0, 1 or 2; got -1."),
        (checks.make_choice("bitwise").or_none(), "exact", "name must be 'bitwise', or None; got 'exact'."),
        (checks.make_choice("bf16", "fp16"), ["bf16"], "name must be one of 'bf16', 'fp16'; got ['bf16']."),
        (PORTS, (7010, 7000), "name must be two ports; got (7010, 7000)."),
        (PORTS, 7000, "name must be two ports; got 7000."),
        (checks.FUNCTION, "secret" * 20, "name must be a function; got str."),
    ],
)
def test_a_value_that_does_not_fit_is_refused(check: checks.Check, value: Any, sentence: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        check("name", value)
    assert str(raised.value) == sentence
