"""`TorchDistributor`: what it refuses, what torchrun's variables are, and where a large result goes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import spark_elastic
from spark_elastic.clusters.run.call import prepare
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
from tests.unit.ops.workers import enter_group, use_context_per_thread


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
    assert (call.name, call.program.imports) == ("train.py", ("torch",))
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
