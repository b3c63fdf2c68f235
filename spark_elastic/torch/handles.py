"""Handles of operations under way, under Horovod's names. Any thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elastic_collectives.group import Array
from spark_elastic.ops.rounds.operation import Operation
from spark_elastic.torch.untraced import untraced


class Handle:
    """One operation, asked for; `synchronize` waits for it. Calling it does so, too."""

    def __init__(self, operation: Operation, finish: Callable[[tuple[Array, ...]], Any]) -> None:
        """finish: makes the result from the operation's outputs."""
        self.operation = operation
        self._finish = finish
        self._result: Any = None
        self._finished = False

    def poll(self) -> bool:
        return self.operation.poll()

    @untraced
    def __call__(self) -> Any:
        outputs = self.operation.wait()
        if not self._finished:
            self._result, self._finished = self._finish(outputs), True
        return self._result


def poll(handle: Handle) -> bool:
    """Whether `synchronize` returns, or raises, at once."""
    return handle.poll()


def synchronize(handle: Handle) -> Any:
    """The result, once it is there: what the function without `_async` returns.

    Raises:
        CollectiveError: ranks asked for different things, did not come in time, or the world broke.
    """
    return handle()
