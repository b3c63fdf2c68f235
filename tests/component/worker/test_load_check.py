"""A host tries to load what workers will load, in a process that its fork server forks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import pytest

from spark_elastic.protocol.types import SlotSpec
from spark_elastic.worker.forking import fork_server_cache
from spark_elastic.worker.load_check import find_load_error, find_load_error_in_fork

SPEC = SlotSpec(address="", key=b"", attempt=0, imports=("json",), cpus_per_worker=2)


@pytest.fixture(autouse=True)
def no_fork_server() -> Iterator[None]:
    fork_server_cache.close()
    yield
    fork_server_cache.close()


class Loading:
    """Unpickling it calls a function."""

    def __init__(self, call: Callable[..., Any], *arguments: object) -> None:
        self._call = call, arguments

    def __reduce__(self) -> Any:
        return self._call


def test_what_loads_leaves_a_fork_server_for_the_slots_to_come() -> None:
    payload = cloudpickle.dumps({"rows": [1, 2]})
    assert find_load_error_in_fork(payload, SPEC) is None
    server = fork_server_cache.pid
    assert server is not None
    assert find_load_error_in_fork(payload, SPEC) is None
    assert fork_server_cache.pid == server


def test_what_does_not_load_is_named_by_its_error_wherever_it_is_tried() -> None:
    payload = cloudpickle.dumps(Loading(__import__, "no_such_module"))
    expected = "ModuleNotFoundError: No module named 'no_such_module'"
    assert find_load_error_in_fork(payload, SPEC) == find_load_error(payload) == expected


def test_a_process_that_ends_while_it_loads_is_named_by_its_exit_code() -> None:
    payload = cloudpickle.dumps(Loading(os._exit, 3))
    assert find_load_error_in_fork(payload, SPEC) == "the process that loads it ended: exit code 3"
