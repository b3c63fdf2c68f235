"""Which programs may be forked; no process is started."""

from __future__ import annotations

import pytest

from spark_elastic.worker.forking import select_fork_imports
from spark_elastic.worker.function_program import FunctionProgram

TORCH = ("torch", "torch._dynamo")


@pytest.mark.parametrize("preload", [TORCH, ("torch", "spark_elastic.torch")])
def test_the_fork_server_imports_torch(preload: tuple[str, ...]) -> None:
    assert select_fork_imports(FunctionProgram(print), preload, True) == preload


@pytest.mark.parametrize("preload", [(), ("keras",), ("torch", "keras"), ("tensorflow",), ("torch", "mine")])
def test_a_program_with_modules_that_are_not_fork_safe_is_spawned(preload: tuple[str, ...]) -> None:
    assert select_fork_imports(FunctionProgram(print), preload, True) == ()


def test_a_program_with_an_environment_is_spawned() -> None:
    assert select_fork_imports(FunctionProgram(print, environment={"A": "1"}), TORCH, True) == ()


def test_a_program_is_spawned_if_fork_workers_is_off() -> None:
    assert select_fork_imports(FunctionProgram(print), TORCH, False) == ()
