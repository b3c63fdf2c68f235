"""Makes the collectives of a process group that is written in Python visible to profilers and dispatch modes.

torch's own groups pass each collective through its dispatcher, where modes (`CommDebugMode`) and profilers see the
operator `c10d::allreduce_`, and their `Work` reports "gloo:all_reduce" from the call to the end. A method written in
Python stands before both. While somebody observes, it enters the dispatcher, whose kernels lead back to it; they are
registered at the first observed call. Any thread may call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._compile import _disable_dynamo
from torch.utils._pytree import tree_flatten

from spark_elastic.worker.context import get_process_context

# Entry of a process group -> the operator of torch that it carries out, and Gloo's title of it.
OPERATORS = {
    "allreduce": ("allreduce_", "all_reduce"),
    "allreduce_coalesced": ("allreduce_coalesced_", "all_reduce"),
    "reduce": ("reduce_", "reduce"),
    "broadcast": ("broadcast_", "broadcast"),
    "barrier": ("barrier", "barrier"),
    "monitored_barrier": ("monitored_barrier_", "monitored_barrier"),
    "scatter": ("scatter_", "scatter"),
    "gather": ("gather_", "gather"),
    "reduce_scatter": ("reduce_scatter_", "reduce_scatter"),
    "reduce_scatter_single": ("_reduce_scatter_base_", "reduce_scatter"),
    "_reduce_scatter_base": ("_reduce_scatter_base_", "reduce_scatter"),
    "reduce_scatter_single_coalesced": ("reduce_scatter_tensor_coalesced_", "reduce_scatter"),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter_tensor_coalesced_", "reduce_scatter"),
    "allgather": ("allgather_", "all_gather"),
    "allgather_coalesced": ("allgather_coalesced_", "all_gather"),
    "all_gather_single": ("_allgather_base_", "all_gather"),
    "_allgather_base": ("_allgather_base_", "all_gather"),
    "all_gather_single_coalesced": ("allgather_into_tensor_coalesced_", "all_gather"),
    "allgather_into_tensor_coalesced": ("allgather_into_tensor_coalesced_", "all_gather"),
    "alltoall": ("alltoall_", "all_to_all"),
    "all_to_all_single": ("alltoall_base_", "all_to_all"),
    "alltoall_base": ("alltoall_base_", "all_to_all"),
    "send": ("send", "send"),
    "recv": ("recv_", "recv"),
    "recv_anysource": ("recv_any_source_", "recvAnySource"),
}
# C++ that calls a method by its new name takes one of the old name as well, so there must be only one of them.
RENAMED = {
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "alltoall_base": "all_to_all_single",
}
_autograd: Any = torch.autograd
_library: Any = torch.library
_get_kernel: Any = getattr(_library, "get_kernel", None)  # a recent torch has it
_base: Any = dist.ProcessGroup
_core: Any = torch._C
OF_DEVICES = _core._dispatch_keyset_full_after(_core.DispatchKey.BackendSelect)  # keys of their kernels

Method = Callable[..., Any]


def make_observable(cls: type) -> type:
    """Wrap the entries of a process group. torch.compile runs them as they are: their callers come from C++."""
    for name in OPERATORS:
        setattr(cls, name, _disable_dynamo(_wrap(name, getattr(cls, name))))
    for old, new in RENAMED.items():
        if hasattr(_base, new):
            delattr(cls, old)
    return cls


def _wrap(name: str, method: Method) -> Method:
    through_dispatcher: Method | None = _get_kernel and getattr(_base, name, None)
    operator, title = OPERATORS[name]

    def entry(group: Any, *given: Any, **named: Any) -> Any:
        profiled = _autograd._profiler_enabled()
        if not profiled and not torch._C._len_torch_dispatch_stack():
            return method(group, *given, **named)
        carry_out = partial(_record, method, title) if profiled else method
        if through_dispatcher is None or _find_entered(operator, group) is not None:
            return carry_out(group, *given, **named)
        get_process_context().get_or_create(_Kernels)

        def carry_on(*tensors: Any) -> Any:
            return carry_out(group, *tensors, *given[len(tensors) :], **named)

        token = _entered.set((operator, group, carry_on))
        try:
            return through_dispatcher(group, *given, **named)
        finally:
            _entered.reset(token)

    # C++ calls the class of Python unless the function that calls it has the method's name (pybind11).
    entry.__code__ = entry.__code__.replace(co_name=name)
    return entry


# Operator, group, and what a call of this thread's dispatcher leads to; each thread has its own.
_entered: ContextVar[tuple[str, Any, Method] | None] = ContextVar("entered", default=None)


def _find_entered(operator: str, group: Any) -> Method | None:
    call = _entered.get()
    return call[2] if call is not None and call[:2] == (operator, group) else None


class _Kernels:
    """Kernels of torch's collectives that lead to a group written in Python.

    They stand before those of each device. For other groups they dispatch to these, which lets go of the interpreter:
    a thread of Gloo that waits for it may hold a lock that the call needs.
    """

    def __init__(self) -> None:
        self._kernels = _library.Library("c10d", "IMPL")
        for operator in dict.fromkeys(operator for operator, _ in OPERATORS.values()):
            self._insert(operator, getattr(torch.ops.c10d, operator).default)

    def _insert(self, operator: str, overload: Any) -> None:
        returns = len(overload._schema.returns)

        def kernel(keys: Any, *arguments: Any) -> Any:
            place = next(i for i, given in enumerate(arguments) if isinstance(given, torch.ScriptObject))
            group: Any = _base.unbox(arguments[place])
            carry_out = _find_entered(operator, group)
            if carry_out is None:
                return overload.redispatch(keys & OF_DEVICES, *arguments)
            work = carry_out(*(() if "barrier" in operator else arguments[:place]))
            if not returns:
                return None
            group.pending.keep(work)
            return work.boxed() if returns == 1 else (arguments[0], work.boxed())

        self._kernels.impl(operator, kernel, "BackendSelect", with_keyset=True)


def _record(method: Method, title: str, group: Any, *given: Any, **named: Any) -> Any:
    """Call a method whose `Work` a profiler sees, from the call to its end."""
    leaves, _ = tree_flatten([each for each in given[:2] if isinstance(each, torch.Tensor | list)][-1:])
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    sparse = "sparse_" * any(tensor.is_sparse for tensor in tensors)
    record = _begin_record(f"{group.name()}:{sparse}{title}", tensors)

    # A profiler tells what ends in another thread than it began from what the caller does itself.
    def end() -> None:
        group.records.submit(record).result()

    try:
        work = method(group, *given, **named)
    except BaseException:
        end()
        raise
    if work is None:
        end()
    else:
        work.call_at_end(end)
    return work


def _begin_record(title: str, tensors: Iterable[torch.Tensor]) -> Callable[[], object]:
    """Let the profiler see a call from now on. Returns what ends it, in any thread, any number of times."""
    if _get_kernel is None:
        records: list[Any] = [torch.profiler.record_function(title)]
        records[0].__enter__()
        return lambda: records and records.pop().__exit__(None, None, None)
    inputs = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
    # The public `record_function` takes no tensors, whose shapes profilers show. This one ends with its last reference.
    records = [torch._C._profiler._RecordFunctionFast(title, inputs, {"scope": "user_scope"})]
    records[0].__enter__()
    return records.clear
