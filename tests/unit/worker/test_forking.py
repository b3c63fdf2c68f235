"""Which programs may be forked; no process is started."""

from __future__ import annotations

import pytest

from spark_elastic.worker.forking import select_fork_imports
from spark_elastic.worker.function_program import FunctionProgram

TORCH = ("torch", "torch._dynamo")


@pytest.mark.parametrize("preload", [TORCH, ("torch", "spark_elastic.torch")])
def test_torch_is_imported_before_the_fork(preload: tuple[str, ...]) -> None:
    assert select_fork_imports(FunctionProgram(print), preload, True) == preload


@pytest.mark.parametrize("preload", [(), ("keras",), ("torch", "keras"), ("tensorflow",), ("torch", "mine")])
def test_what_may_not_bear_a_fork_is_spawned(preload: tuple[str, ...]) -> None:
    assert select_fork_imports(FunctionProgram(print), preload, True) == ()


def test_a_program_whose_environment_must_come_first_is_spawned() -> None:
    assert select_fork_imports(FunctionProgram(print, environment={"A": "1"}), TORCH, True) == ()


def test_nothing_is_forked_where_that_is_not_wanted() -> None:
    assert select_fork_imports(FunctionProgram(print), TORCH, False) == ()
