"""A hand-written training on one worker: what is left of one call of the function in the next."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest

from elastic_collectives import MismatchError
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.process_sets import ProcessSet, add_process_set, get_process_set_ids_and_ranks
from spark_elastic.worker.context import get_context
from spark_elastic.worker.function_program import FunctionProgram
from spark_elastic.worker.program import Completed, WorkerHandle, decode_result
from tests.fake_group import FakeFabric
from tests.worlds import enter_group, use_context_per_thread

OF_A_MODULE = ProcessSet([1])


@pytest.fixture(autouse=True)
def alone_in_a_world(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """And what the function puts into the environment goes with the test."""
    use_context_per_thread(monkeypatch)
    enter_group(FakeFabric(1).group(0))
    with patch.dict(os.environ):
        yield


def train() -> dict[int, list[int]]:
    add_process_set([0])
    add_process_set(OF_A_MODULE)
    return get_process_set_ids_and_ranks()


def run_program(program: FunctionProgram) -> Any:
    """In the world of this thread."""
    worker: Any = get_context()
    handle = WorkerHandle(lambda: 0, lambda at: None, lambda told: None, _fail_if_called)
    return program.run(worker.world, worker.group, handle)


def test_a_function_that_is_called_again_can_add_its_process_sets_again() -> None:
    program = FunctionProgram(train)
    for generation in (1, 2):
        enter_group(FakeFabric(1, fence=(1, generation)).group(0))
        run_program(program)
        assert get_process_set_ids_and_ranks() == {0: [0], 1: [0], 2: []}


@pytest.mark.parametrize("code", [None, 0, 3])
def test_a_function_that_exits_with_zero_has_succeeded_without_a_result(code: int | None) -> None:
    with pytest.raises(SystemExit, match="3") if code else nullcontext():
        outcome = run_program(FunctionProgram(sys.exit, (code,)))
        assert isinstance(outcome, Completed)
        assert decode_result(outcome.result, 0) is None


def test_collectives_that_do_not_match_get_a_sentence() -> None:
    """They end the job: another world would not help."""

    def reduce_mismatched() -> None:
        raise MismatchError((1,), "rank 1 has other sizes")

    with pytest.raises(InvalidInput, match="collectives do not match: rank 1 has"):
        run_program(FunctionProgram(reduce_mismatched))


TALKS = """
import os, sys, types
import torch.distributed as dist
from accelerate import Accelerator
from tests.fake_group import FakeFabric
from spark_elastic.worker.context import get_context
from spark_elastic.worker.function_program import FunctionProgram
from spark_elastic.worker.program import WorkerHandle
from tests.worlds import enter_group

library = sys.modules["library"] = types.ModuleType("library")
library.group = None

def talk():
    import library
    accelerator = Accelerator(cpu=True)  # like many a program it does not destroy what it made
    accelerator.wait_for_everyone()
    if library.group is None:
        library.group = dist.new_group([0])
    dist.barrier(library.group)

program = FunctionProgram(talk)
for generation in (1, 2):
    enter_group(FakeFabric(1, fence=(1, generation)).group(0))
    handle = WorkerHandle(lambda: 0, lambda at: None, lambda metrics: None, None)
    program.run(get_context().world, get_context().group, handle)
    print(os.environ["MASTER_PORT"], flush=True)
os._exit(0)
"""


def test_a_function_that_is_called_again_meets_no_process_group_or_ranks_of_its_earlier_world() -> None:
    command = [sys.executable, "-c", TALKS]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert len(done.stdout.split()) == 2, done.stderr


def _fail_if_called(error: object) -> Any:
    raise AssertionError("the function stays in its world")
