"""Every keyword of `run`, Horovod's among them: mapped, or refused with a sentence, and never ignored."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spark_elastic.clusters.run.options import ALIASES, REFUSED, parse
from spark_elastic.config import ElasticConfig
from spark_elastic.driver.job import make_limits
from spark_elastic.errors import InvalidInput
from spark_elastic.protocol.types import Limits

# What Horovod's `spark.run_elastic`, `spark.run` and `run` take beside function and arguments.
HOROVOD = {
    "num_proc", "min_num_proc", "max_num_proc", "min_np", "max_np", "start_timeout", "elastic_timeout", "reset_limit",
    "env", "stdout", "stderr", "verbose", "nics", "prefix_output_with_timestamp", "executable", "use_gloo", "use_mpi",
    "extra_mpi_args", "cooldown_range", "slots", "hosts", "hostfile", "ssh_port", "ssh_identity_file", "disable_cache",
    "output_filename", "mpi_args", "network_interfaces", "host_discovery_script",
}  # fmt: skip
STREAM = io.StringIO()
MAPPED: dict[str, tuple[Any, str, Any]] = {
    "num_proc": (3, "num_workers", 3),
    "np": (3, "num_workers", 3),
    "min_num_proc": (2, "min_workers", 2),
    "min_np": (2, "min_workers", 2),
    "max_num_proc": (5, "max_workers", 5),
    "max_np": (5, "max_workers", 5),
    "env": ({"A": "b"}, "env", {"A": "b"}),
    "stdout": (STREAM, "stdout", STREAM),
    "verbose": (2, "verbose", 2),
    "prefix_output_with_timestamp": (True, "prefix_output_with_timestamp", True),
    "start_timeout": (7.0, "config.start_timeout", 7.0),
    "elastic_timeout": (8.0, "config.start_timeout", 8.0),
    "reset_limit": (4, "config.reset_limit", 4),
    "cooldown_range": ((10.0, 100.0), "config.cooldown_range", (10.0, 100.0)),
    "host_discovery_script": ("./hosts.sh", "config.host_discovery", "./hosts.sh"),
}
REFUSED_VALUES: dict[str, Any] = {
    "use_gloo": False,
    "use_mpi": True,
    "extra_mpi_args": "-x",
    "mpi_args": "-x",
    "disable_cache": True,
    "nics": {"eth0"},
    "network_interfaces": ["eth0"],
    "ssh_port": 22,
    "slots": 2,
}


@pytest.mark.parametrize("name", ["num_workers", "verbose"])
def test_numpys_whole_numbers_are_whole_numbers(name: str) -> None:
    found = getattr(parse({name: np.int64(2)}), name)
    assert found == 2
    assert type(found) is int


def test_every_argument_of_horovod_is_mapped_or_refused() -> None:
    assert set(MAPPED) | set(REFUSED) >= HOROVOD
    assert set(ALIASES) <= set(MAPPED)


@pytest.mark.parametrize("name", sorted(MAPPED))
def test_arguments_of_horovod_become_settings(name: str) -> None:
    value, where, expected = MAPPED[name]
    found: Any = parse({name: value})
    for part in where.split("."):
        found = getattr(found, part)
    assert found == expected


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_refused_argument_is_accepted_with_a_value_that_changes_nothing(name: str) -> None:
    for value in REFUSED[name][0]:
        parse({name: value})
    with pytest.raises(InvalidInput, match=name):
        parse({name: REFUSED_VALUES.get(name, "something")})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("num_workers", "num_proc"),
        ("min_np", "min_num_proc"),
        ("max_np", "max_workers"),
    ],
)
def test_two_names_of_one_setting_are_refused(one: str, other: str) -> None:
    with pytest.raises(InvalidInput, match="two names of one setting"):
        parse({one: 2, other: 2})
    parse({one: 2, other: None})


def test_both_timeouts_of_horovods_run_elastic_are_taken() -> None:
    for given in (
        {"start_timeout": 7.0, "elastic_timeout": 8.0},
        {"elastic_timeout": 8.0, "start_timeout": 7.0},
    ):
        config = parse(given).config
        assert (config.gather_timeout, config.start_timeout) == (7.0, 8.0)
    alone = parse({"start_timeout": 7.0, "elastic_timeout": None}).config
    assert (alone.start_timeout, alone.gather_timeout) == (7.0, ElasticConfig().gather_timeout)
    with pytest.raises(InvalidInput, match="start_timeout and gather_timeout are two names"):
        parse({"start_timeout": 7.0, "elastic_timeout": 8.0, "gather_timeout": 9.0})


def test_preload_accepts_one_module_name() -> None:
    assert parse({"preload": "torch"}).preload == ("torch",)


@pytest.mark.parametrize("name", ["checkpoint_steps", "checkpoint_seconds", "checkpoints_kept"])
def test_settings_of_checkpoints_need_a_run_id(name: str, tmp_path: Path) -> None:
    """Nothing would be durable, and the user would learn of it when all is lost."""
    with pytest.raises(InvalidInput, match=f"^{name} .* give run_id and store"):
        parse({name: 5})
    parse({name: None})
    parse({name: 5, "run_id": "mine", "store": tmp_path})


def test_settings_of_the_config_are_arguments_too_and_win_over_a_config() -> None:
    assert parse({"lease": 1.5}).config.lease == 1.5
    found = parse({"lease": 1.5}, ElasticConfig(lease=9.0, driver_port=1234)).config
    assert (found.lease, found.driver_port) == (1.5, 1234)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (4, 4, 4)),
        ({"num_workers": 3}, (3, 3, 3)),
        ({"max_workers": 2}, (2, 2, 2)),
        ({"min_workers": 6}, (6, 6, 6)),
        ({"num_workers": 2, "min_workers": 1, "max_workers": 8}, (2, 1, 8)),
    ],
)
def test_r16_defaults_of_the_numbers_of_workers(
    given: dict[str, int], expected: tuple[int, int, int]
) -> None:
    assert parse(given).resolve_workers(4) == expected
    with pytest.raises(InvalidInput, match="min_workers <= num_workers"):
        parse({"num_workers": 2, "min_workers": 3}).resolve_workers(4)


def test_every_setting_that_has_the_name_of_a_limit_becomes_that_limit() -> None:
    changed = ElasticConfig(lease=1.5, start_timeout=3.0, failure_budget=2, reset_limit=7)
    limits = make_limits(changed, 3, 2, 4)
    assert (limits.num_workers, limits.min_workers, limits.max_workers) == (3, 2, 4)
    assert (limits.lease, limits.start_timeout, limits.failure_budget, limits.reset_limit) == (1.5, 3.0, 2, 7)
    shared = {f.name for f in dataclasses.fields(Limits)} & {
        f.name for f in dataclasses.fields(ElasticConfig)
    }
    assert all(getattr(limits, name) == getattr(changed, name) for name in shared)


SECRET = {"secret": "marked-5d20"}
STORE = {"run_id": "mine", "store": "/mnt"}


def test_options_of_the_store_reach_it_and_are_not_shown(tmp_path: Path) -> None:
    options = parse({"run_id": "mine", "store": tmp_path, "storage_options": SECRET})
    store = options.open_store()
    assert store is not None
    assert store.filesystem.storage_options == SECRET
    assert SECRET["secret"] not in f"{options!r} {store!r}"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"num_worker": 2}, r"no argument 'num_worker'.*num_workers"),
        ({"num_workers": 0}, "num_workers must be a whole number"),
        ({"min_np": True}, "min_workers must be a whole number"),
        ({"max_np": 1.5}, "max_workers must be a whole number"),
        ({"env": {"A": 1}}, "env"),
        ({"env": {"A=B": "c"}}, "env"),
        ({"env": {"A": "b\0"}}, "env"),
        ({"stdout": "file"}, "an open text file"),
        ({"stdout": io.BytesIO()}, "an open text file"),
        ({"verbose": "yes"}, "verbose"),
        ({"verbose": -1}, "verbose"),
        ({"prefix_output_with_timestamp": "no"}, "prefix_output_with_timestamp"),
        ({"preload": 5}, "preload"),
        ({"preload": ["torch", 5]}, "preload"),
        ({"storage_options": SECRET}, "belong to a store"),
        ({"run_id": "mine"}, "run_id and store go together"),
        ({"store": "/mnt"}, "run_id and store go together"),
        (STORE | {"storage_options": "key=marked-5d20"}, "must map the names"),
        (STORE | {"storage_options": {"url": "s3://b"}}, "give the url as store"),
        (STORE | {"store": object()}, "store must be a path or url; got object"),
    ],
)
def test_wrong_values_are_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=says) as raised:
        parse(wrong)
    assert "marked" not in str(raised.value)
    with pytest.raises(InvalidInput, match="config must be an ElasticConfig"):
        parse({}, {"lease": 3.0})


@pytest.mark.parametrize("mode", ["wb", "w"])
def test_a_stream_into_which_no_text_can_be_written_is_refused(mode: str, tmp_path: Path) -> None:
    with open(tmp_path / "out", mode) as stream:
        if mode == "w":
            stream.close()
        with pytest.raises(InvalidInput, match="an open text file"):
            parse({"stdout": stream})
