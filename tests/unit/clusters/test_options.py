"""Every keyword of `run`, Horovod's among them, is mapped, or refused with a sentence; `TorchDistributor`."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest

import spark_elastic
from spark_elastic.clusters.run.call import ALIASES, REFUSED, prepare
from spark_elastic.clusters.run.call import parse_options as parse
from spark_elastic.config import ElasticConfig
from spark_elastic.errors import InvalidInput
from spark_elastic.worker import function_program
from spark_elastic.worker.function_program import (
    ResultStore,
    Script,
    StoredResult,
    Torchrun,
    make_torchrun_variables,
)
from tests.fake_group import FakeFabric
from tests.worlds import enter_group, use_context_per_thread

# What Horovod's `spark.run_elastic`, `spark.run` and `run` take beside function and arguments.
HOROVOD = {
    "num_proc", "min_num_proc", "max_num_proc", "min_np", "max_np", "start_timeout", "elastic_timeout", "reset_limit",
    "env", "stdout", "stderr", "verbose", "nics", "prefix_output_with_timestamp", "executable", "use_gloo", "use_mpi",
    "extra_mpi_args", "cooldown_range", "slots", "hosts", "hostfile", "ssh_port", "ssh_identity_file", "disable_cache",
    "output_filename", "mpi_args", "network_interfaces", "host_discovery_script",
}  # fmt: skip
STREAM = io.StringIO()
MAPPED: dict[str, tuple[Any, str, Any]] = {
    **dict.fromkeys(("num_proc", "np"), (3, "num_workers", 3)),
    **dict.fromkeys(("min_num_proc", "min_np"), (2, "min_workers", 2)),
    **dict.fromkeys(("max_num_proc", "max_np"), (5, "max_workers", 5)),
    "preload": ("torch", "preload", ("torch",)),
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
    ("one", "other"), [("num_workers", "num_proc"), ("min_np", "min_num_proc"), ("max_np", "max_workers")]
)
def test_two_names_of_one_setting_are_refused(one: str, other: str) -> None:
    with pytest.raises(InvalidInput, match="two names of one setting"):
        parse({one: 2, other: 2})
    parse({one: 2, other: None})


def test_both_timeouts_of_horovods_run_elastic_are_taken() -> None:
    both = {"start_timeout": 7.0, "elastic_timeout": 8.0}
    for given in (both, dict(reversed(both.items()))):
        config = parse(given).config
        assert (config.gather_timeout, config.start_timeout) == (7.0, 8.0)
    alone = parse({"start_timeout": 7.0, "elastic_timeout": None}).config
    assert (alone.start_timeout, alone.gather_timeout) == (7.0, ElasticConfig().gather_timeout)
    with pytest.raises(InvalidInput, match="start_timeout and gather_timeout are two names"):
        parse({**both, "gather_timeout": 9.0})


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(InvalidInput, match=r"'num_worker' is neither an argument .*did you mean 'num_w"):
        parse({"num_worker": 2})


@pytest.mark.parametrize(
    "given",
    [
        *({"num_workers": 0}, {"stdout": "file"}, {"verbose": "yes"}, {"prefix_output_with_timestamp": "no"}),
        *({"env": env} for env in ({"A": 1}, {"A=B": "c"}, {"A": "b\0"}, {1: "a"}, ["A"])),
        *({"preload": 5}, {"preload": ["torch", 5]}),
    ],
)
def test_wrong_values_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(given))):
        parse(given)
    with pytest.raises(InvalidInput, match="config must be an ElasticConfig"):
        parse({}, given)


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
    ("given", "default", "expected"),
    [
        ({}, 4, (4, 4, 4)),
        ({"num_workers": 3}, 4, (3, 3, 3)),
        ({"max_workers": 2}, 4, (2, 2, 2)),
        ({"min_workers": 6}, 4, (6, 6, 6)),
        ({"num_workers": 2, "min_workers": 1, "max_workers": 8}, 4, (2, 1, 8)),
    ],
)
def test_r16_defaults_of_the_numbers_of_workers(
    given: dict[str, int], default: int, expected: tuple[int, int, int]
) -> None:
    assert parse(given).resolve_workers(default) == expected


SECRET = {"secret": "marked-5d20"}


def test_options_of_the_store_reach_it_and_are_not_shown(tmp_path: Path) -> None:
    options = parse({"run_id": "mine", "store": tmp_path, "storage_options": SECRET})
    store = options.open_store()
    assert store is not None
    assert store.filesystem.storage_options == SECRET
    assert SECRET["secret"] not in f"{options!r} {store!r}"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"storage_options": SECRET}, "belong to a store"),
        ({"run_id": "mine"}, "run_id and store go together"),
        ({"store": "/mnt"}, "run_id and store go together"),
        ({"storage_options": "key=marked-5d20", "run_id": "mine", "store": "/mnt"}, "must map the names"),
        ({"storage_options": {"url": "s3://b"}, "run_id": "mine", "store": "/mnt"}, "give the url as store"),
        ({"run_id": "mine", "store": object()}, "store must be a path or url; got object"),
    ],
)
def test_values_that_are_no_store_or_store_options_are_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=says) as raised:
        parse(wrong)
    assert "marked" not in str(raised.value)


@pytest.mark.parametrize("kind", ["bytes", "binary file", "closed"])
def test_a_stream_into_which_no_text_can_be_written_is_refused(kind: str, tmp_path: Path) -> None:
    with open(tmp_path / "out", "wb" if kind == "binary file" else "w") as stream:
        if kind == "closed":
            stream.close()
        with pytest.raises(InvalidInput, match="an open text file"):
            parse({"stdout": io.BytesIO() if kind == "bytes" else stream})


# ---- TorchDistributor: what it refuses, torchrun's variables, where a large result goes


def train(rows: int, rate: float = 0.1) -> bytes:
    return bytes(rows)


@pytest.mark.parametrize(
    ("one_node", "device", "local", "group"),
    [
        (True, "cpu", ("2", "3"), ("0", "1")),
        (False, "cpu", ("0", "1"), ("2", "3")),
        (True, "cuda", ("0", "1"), ("2", "3")),
    ],
)
def test_the_variables_are_those_of_torchrun(
    one_node: bool, device: str, local: Any, group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(function_program.get_process_context(), "device", device)
    made = make_torchrun_variables({"RANK": "2", "WORLD_SIZE": "3"}, one_node, 4)
    assert (made["LOCAL_RANK"], made["LOCAL_WORLD_SIZE"]) == local
    assert (made["GROUP_RANK"], made["GROUP_WORLD_SIZE"]) == group
    assert (made["ROLE_RANK"], made["ROLE_WORLD_SIZE"], made["TORCHELASTIC_RESTART_COUNT"]) == ("2", "3", "4")


@pytest.mark.parametrize("stores", [True, False])
def test_a_result_of_more_than_a_message_goes_through_the_store(
    stores: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_context_per_thread(monkeypatch)
    enter_group(FakeFabric(1).group(0))
    monkeypatch.setattr(os, "environ", {"RANK": "0", "WORLD_SIZE": "1"})
    store = ResultStore(str(tmp_path)) if stores else None
    call = Torchrun(train, one_node=True, results=store)
    assert call(10) == bytes(10)
    if store is None:
        with pytest.raises(
            InvalidInput, match=r"rank 0 returned a bytes of 6\.0 MiB.*give TorchDistributor\(store="
        ):
            call(6 << 20)
    else:
        returned = call(6 << 20)
        assert isinstance(returned, StoredResult)
        assert store.take(returned) == bytes(6 << 20)
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_function_and_a_script_are_looked_through_for_their_name_arguments_and_imports(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\n")
    call = prepare(Torchrun(Script.read(str(script)), True, None), (), {})
    assert (call.name, call.program.imports[:-1]) == ("train.py", ("torch",))
    assert prepare(Torchrun(train, True, None), ((3,),), {}).name == "train"


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (
            lambda: spark_elastic.TorchDistributor(0),
            "num_processes must be a whole number of 1 or more; got 0",
        ),
        (lambda: distributor().run("/nowhere/train.py"), "the script '/nowhere/train.py' cannot be read"),
        (
            lambda: distributor().run(__file__, lr=1),
            "its arguments by position, as on a command line; got lr",
        ),
        (lambda: distributor().run(3), "takes a function or the path of a script; got a int"),
        (lambda: distributor(min_worker=1).run(train, 1), "min_worker"),
        (lambda: distributor(use_gpu=True).run(train, 1), "this host shows no GPU"),
    ],
)
def test_what_cannot_run_is_refused(make: Any, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(InvalidInput, match=sentence):
        make()


def distributor(use_gpu: bool = False, **arguments: Any) -> Any:
    return spark_elastic.TorchDistributor(2, True, use_gpu, **arguments)
