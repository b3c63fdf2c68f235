"""Requests of operations on tensors, and handles of those in progress. Any thread may use handles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from elastic_collectives.group import Array
from spark_elastic.gradients.process_sets import ProcessSet
from spark_elastic.gradients.tensors import array_of, disable_compile, get_dtype_name
from spark_elastic.horovod.ops.negotiation import OperationRequest, qualify_name
from spark_elastic.horovod.ops.operation import Operation
from spark_elastic.horovod.ops.operations import get_queue


def submit(
    kind: str,
    name: str | None,
    tensors: Sequence[torch.Tensor],
    process_set: ProcessSet,
    splits: list[int] | None = None,
    *,
    ragged: bool = False,
    awaited: bool = False,
    **fields: Any,
) -> Operation:
    """Request an operation on contiguous tensors on the CPU, which belong to it until it is done.

    Args:
        splits: of an alltoall; None: equal parts.
        ragged: the first dimension may differ between ranks.
        awaited: the caller waits for it at once.
        fields: further ones of the `OperationRequest`.
    """
    request = OperationRequest(
        kind,
        qualify_name(kind, name),
        tuple(get_dtype_name(each.dtype) for each in tensors),
        tuple((-1, *each.shape[1:]) if ragged else tuple(each.shape) for each in tensors),
        **fields,
    )
    arrays = [array_of(each) for each in tensors]
    return get_queue(process_set).submit(request, arrays, splits, awaited=awaited)


class Handle:
    """An operation in progress. `synchronize` waits for it, and so does calling the handle."""

    def __init__(self, operation: Operation, finish: Callable[[tuple[Array, ...]], Any]) -> None:
        """
        Args:
            finish: makes the result from the outputs of the operation.
        """
        self.operation = operation
        self._finish = finish
        self._result: Any = None
        self._finished = False

    def poll(self) -> bool:
        return self.operation.poll()

    @disable_compile
    def __call__(self) -> Any:
        outputs = self.operation.wait()
        if not self._finished:
            self._result, self._finished = self._finish(outputs), True
        return self._result


def poll(handle: Handle) -> bool:
    """Whether `synchronize` returns, or raises, at once."""
    return handle.poll()


def synchronize(handle: Handle) -> Any:
    """Wait for the result: what the function without `_async` returns.

    Raises:
        CollectiveError: the ranks requested different operations, a rank was late, or the world broke.
    """
    return handle()
