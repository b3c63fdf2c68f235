"""Horovod's operations on torch tensors, under its names. All ranks of the process set must call them.

`horovod.ops.operations` says what names, numbers and gradients are. Any thread may use handles."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor

from elastic_collectives.operands import Array
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.exchange import disable_compile
from spark_elastic.gradients.host_memory import (
    array_of,
    copy_back,
    copy_to_host,
    get_dtype_name,
    tensor_of,
    to_host,
)
from spark_elastic.gradients.process_sets import ALL, ProcessSet, find_root_index
from spark_elastic.gradients.reduction import Average, Compression, ReduceOp, ReduceOptions, Sum
from spark_elastic.horovod.ops import operations
from spark_elastic.horovod.ops.negotiation import Kind
from spark_elastic.horovod.ops.operation_queue import Operation
from spark_elastic.horovod.ops.operations import broadcast_object, compress_tensors, get_queue
from spark_elastic.horovod.torch.gradient_sync import get_optimizers_in_use

__all__ = ["gather_rows", "join", "poll", "synchronize"]
__all__ += ["allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "sparse_allreduce_async"]
__all__ += ["grouped_allreduce", "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_"]
__all__ += ["allgather", "allgather_async", "grouped_allgather", "grouped_allgather_async"]
__all__ += ["broadcast", "broadcast_", "broadcast_async", "broadcast_async_"]
__all__ += ["broadcast_optimizer_state", "broadcast_parameters"]
__all__ += ["alltoall", "alltoall_async", "reducescatter", "reducescatter_async"]
__all__ += ["grouped_reducescatter", "grouped_reducescatter_async"]

Tensors: TypeAlias = Sequence[Tensor]
Splits: TypeAlias = Tensor | Sequence[int] | None  # rows for each rank


def submit(
    kind: Kind, name: str | None, tensors: Tensors, process_set: ProcessSet, awaited: bool = False, **how: Any
) -> Operation:
    """`operations.submit` of contiguous tensors on the CPU, which belong to the operation until it is done."""
    dtypes = tuple(get_dtype_name(tensor.dtype) for tensor in tensors)
    arrays = [array_of(tensor) for tensor in tensors]
    return operations.submit(kind, name, arrays, process_set, dtypes=dtypes, awaited=awaited, **how)


class Handle:
    """An operation in progress. `synchronize` waits for it, and so does calling the handle."""

    def __init__(self, operation: Operation, finish: Callable[[tuple[Array, ...]], Any]) -> None:
        """finish: makes the result from the outputs of the operation."""
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

    def first(self) -> Handle:
        """Return the handle of the first tensor of this operation, which gives a list."""
        return Handle(self.operation, lambda _: self()[0])


def poll(handle: Handle) -> bool:
    """Whether `synchronize` returns, or raises, at once."""
    return handle.poll()


def synchronize(handle: Handle) -> Any:
    """Wait for the result: what the function without `_async` returns.

    Raises:
        CollectiveError: the ranks requested different operations, a rank was late, or the world broke.
    """
    return handle()


P = ParamSpec("P")
G = TypeVar("G")
R = TypeVar("R")


def of_one(
    grouped: Callable[Concatenate[Tensors, P], G], get_first: Callable[[G], R]
) -> Callable[Concatenate[Tensor, P], R]:
    """Return the operation on one tensor: with the arguments of the one on several, of which it gives the first."""

    def operate(tensor: Tensor, *args: P.args, **kwargs: P.kwargs) -> R:
        return get_first(grouped([tensor], *args, **kwargs))

    signature, told = inspect.signature(grouped), inspect.signature(get_first).return_annotation
    tensors, *others = signature.parameters.values()
    arguments = [tensors.replace(name="tensor", annotation="Tensor"), *others]
    shown: Any = operate
    shown.__name__ = shown.__qualname__ = grouped.__name__.removeprefix("grouped_")
    shown.__doc__ = f"`{grouped.__name__}` of one tensor."
    shown.__signature__ = signature.replace(parameters=arguments, return_annotation=told)
    single: Callable[Concatenate[Tensor, P], R] = shown
    return single


def _get_first(results: list[Tensor]) -> Tensor:
    return results[0]


Gradient: TypeAlias = Callable[..., Tensors]


@disable_compile
def differentiable(run: Gradient, gradient: Gradient, tensors: Tensors) -> list[Tensor]:
    """Return what `run` makes of the tensors. gradient: makes their gradients from those of the results,
    differentiably itself."""
    return list(_Differentiable.apply(run, gradient, *tensors))  # type: ignore[no-untyped-call]


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Any, gradient: Gradient, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.gradient = gradient
        return tuple(run(tensors))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.gradient(*upstream)


def grouped_allreduce(  # noqa: PLR0913 - name and arguments are Horovod's
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ALL,
) -> list[Tensor]:
    """Return the averages (default) or another reduction of all ranks' tensors, as one operation; each has one shape on
    all ranks. Differentiable."""
    scale = prescale_factor, postscale_factor
    options = ReduceOptions.from_args(average, op, scale, process_set, compression)
    return _allreduce(tensors, name, options)


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ALL,
) -> Handle:
    """`grouped_allreduce` without waiting; not differentiable."""
    options = ReduceOptions.from_args(average, op, (prescale_factor, postscale_factor), process_set)
    return start(tensors, name, options, in_place=False)


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ALL,
) -> list[Tensor]:
    """`grouped_allreduce` into `tensors`."""
    options = ReduceOptions.from_args(average, op, (prescale_factor, postscale_factor), process_set)
    return start(tensors, name, options, in_place=True, awaited=True)()  # type: ignore[no-any-return]


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = ALL,
) -> Handle:
    """`grouped_allreduce_` without waiting. The tensors belong to the operation until its handle is done."""
    options = ReduceOptions.from_args(average, op, (prescale_factor, postscale_factor), process_set)
    return start(tensors, name, options, in_place=True)


allreduce = of_one(grouped_allreduce, _get_first)
allreduce_async = of_one(grouped_allreduce_async, Handle.first)
allreduce_ = of_one(grouped_allreduce_, _get_first)
allreduce_async_ = of_one(grouped_allreduce_async_, Handle.first)


@disable_compile
def start(
    tensors: Tensors, name: str | None, options: ReduceOptions, in_place: bool, awaited: bool = False
) -> Handle:
    """Request an allreduce; its handle returns a list of tensors. awaited: the caller waits for it at once."""
    if not tensors:
        raise InvalidInput("a grouped operation takes at least one tensor.")
    working = [to_host(tensor) if in_place else copy_to_host(tensor) for tensor in tensors]
    all_float32 = all(tensor.dtype == torch.float32 for tensor in working)
    wire, exchanged, decompress = compress_tensors(working, options, all_float32)
    how: dict[str, Any] = {"op": options.op.value, "scale": options.scale, "compression": wire}
    operation = submit("allreduce", name, exchanged, options.process_set, awaited=awaited, **how)

    def finish(_: object) -> list[Tensor]:
        results = decompress(exchanged)
        if in_place:
            return [copy_back(tensor, result) for tensor, result in zip(tensors, results, strict=True)]
        return [result.to(tensor.device) for tensor, result in zip(tensors, results, strict=True)]

    return Handle(operation, finish)


def _allreduce(tensors: Tensors, name: str | None, options: ReduceOptions) -> list[Tensor]:
    def run(operands: Tensors) -> list[Tensor]:
        return start(operands, name, options, in_place=False, awaited=True)()  # type: ignore[no-any-return]

    return differentiable(run, lambda *upstream: _allreduce(upstream, None, options), tensors)


def gather_rows(tensor: Tensor, process_set: ProcessSet = ALL) -> Tensor:
    """The rows of all ranks, in rank order, for a loss that compares the rows of a batch (contrastive, CLIP, triplets).
    Ranks may have different numbers of rows, or none. All ranks must call it as often, in forward and in backward. The
    gradient of a rank's rows is the sum over the losses of all ranks, so that an optimizer or a DistributedDataParallel
    that averages gradients has that of the mean of these losses, each times its loader's `loss_weight`."""
    return _gather_grouped([tensor], None, process_set, Sum)[0]


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = ALL
) -> list[Tensor]:
    """Concatenate all ranks' tensors along dimension 0, in which they may differ; several tensors as one operation.
    Differentiable."""
    return _gather_grouped(tensors, name, process_set, Average)


def _gather_grouped(
    tensors: Tensors, name: str | None, process_set: ProcessSet, op: ReduceOp
) -> list[Tensor]:
    shapes: list[torch.Size] = []

    def run(given: Tensors) -> list[Tensor]:
        results: list[Tensor] = _gather(given, name, process_set, awaited=True)()
        shapes.extend(tensor.shape for tensor in given)
        return results

    def gradient(*upstream: Tensor) -> list[Tensor]:
        rows = [shape[0] if shape else 1 for shape in shapes]
        lengths = allgather(torch.tensor([rows]), process_set=process_set)
        firsts = lengths[: process_set.rank()].sum(0).tolist()
        reduced = grouped_allreduce(upstream, op=op, process_set=process_set)
        parts = zip(reduced, firsts, rows, shapes, strict=True)
        return [whole[first : first + count].reshape(shape) for whole, first, count, shape in parts]

    return differentiable(run, gradient, tensors)


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = ALL
) -> Handle:
    """`grouped_allgather` without waiting; not differentiable."""
    return _gather(tensors, name, process_set)


allgather = of_one(grouped_allgather, _get_first)
allgather_async = of_one(grouped_allgather_async, Handle.first)


@disable_compile
def _gather(tensors: Tensors, name: str | None, process_set: ProcessSet, awaited: bool = False) -> Handle:
    if not tensors:
        raise InvalidInput("a grouped operation takes at least one tensor.")
    # Not copied: the tensors belong to the operation until its handle is done.
    hosts = [to_host(tensor) for tensor in tensors]
    rows = [host.reshape(1) if host.dim() == 0 else host for host in hosts]
    operation = submit("allgather", name, rows, process_set, awaited=awaited)
    return Handle(operation, lambda outputs: list(map(tensor_of, outputs, tensors)))


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = ALL
) -> Tensor:
    """Return the tensor of rank `root_rank` of the world. Differentiable."""

    def gradient(upstream: Tensor) -> list[Tensor]:
        average = allreduce(upstream, op=Average, process_set=process_set)
        # All ranks stay in the graph of a second derivative, whose allreduce needs all of them.
        unused = torch.tensor(process_set.ranks[process_set.rank()] != root_rank, device=average.device)
        return [average.masked_fill(unused, 0.0)]

    return differentiable(
        lambda given: [broadcast_async(given[0], root_rank, name, process_set)()], gradient, [tensor]
    )[0]


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = ALL
) -> Handle:
    """`broadcast` without waiting; not differentiable."""
    copy = copy_to_host(tensor)
    handle = broadcast_all([copy], root_rank, name, process_set)
    return Handle(handle.operation, lambda outputs: handle()[0].to(tensor.device))


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = ALL
) -> Tensor:
    """`broadcast` into `tensor`."""
    return broadcast_all([tensor], root_rank, name, process_set, awaited=True)()[0]  # type: ignore[no-any-return]


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = ALL
) -> Handle:
    """`broadcast_` without waiting. The tensor belongs to the operation until its handle is done."""
    return broadcast_all([tensor], root_rank, name, process_set).first()


@disable_compile
def broadcast_all(
    tensors: Tensors, root_rank: int, name: str | None, process_set: ProcessSet, awaited: bool = False
) -> Handle:
    """Broadcast several tensors in place, as one operation. awaited: the caller waits for it at once."""
    root = find_root_index(process_set, root_rank)
    working = [to_host(tensor) for tensor in tensors]
    operation = submit("broadcast", name, working, process_set, awaited=awaited, root=root)
    return Handle(operation, lambda _: list(map(copy_back, tensors, working)))


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[tuple[str, Tensor | None] | Tensor], root_rank: int
) -> None:
    """Overwrite parameters with those of `root_rank`.

    Args:
        params: a state dict, or parameters with or without names.
    """
    if isinstance(params, torch.nn.Module) or not isinstance(params, Iterable):
        raise InvalidInput(
            "broadcast_parameters takes a state dict or parameters, such as model.state_dict(); got "
            f"{type(params).__name__}."
        )
    entries = sorted(params.items()) if isinstance(params, Mapping) else params
    tensors = []
    for number, entry in enumerate(entries):
        name, tensor = entry if isinstance(entry, tuple) else (number, entry)
        if isinstance(tensor, Tensor):
            tensors.append(tensor.data)
        elif tensor is not None:
            raise InvalidInput(f"broadcast_parameters takes tensors; {name!r} is a {type(tensor).__name__}.")
    broadcast_all(tensors, root_rank, "parameters", ALL, awaited=True)()


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Overwrite the optimizer's state and settings with those of `root_rank`. model: not used."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidInput("broadcast_optimizer_state does not take LBFGS: its state is not per parameter.")
    optimizer.load_state_dict(broadcast_object(optimizer.state_dict(), root_rank, "optimizer"))


def join(device: int = -1) -> int:
    """Take part in the allreduces of the other ranks without contributing, until all ranks have joined: for a rank
    that is out of data.

    Averages still divide by the world's size. This rank does not apply the steps of its `DistributedOptimizer`: as with
    Horovod, the rank that joined last has the newest weights. device: not used.

    Returns:
        The rank that joined last.

    Raises:
        InvalidInput: several optimizers are in use, or gradients were not exchanged.
        CollectiveError: the world changed.
    """
    optimizers = list(get_optimizers_in_use())
    if len(optimizers) > 1:
        raise InvalidInput(
            f"join() cannot tell which of {len(optimizers)} optimizers the others step: close() all but one."
        )
    joined = get_queue().join(sum(one.steps() for one in optimizers))
    for one in optimizers:
        while one.run_without_data():
            pass  # until no rank has data
    return int(joined.wait()[0][0])


def sparse_allreduce_async(
    tensor: Tensor, name: str | None = None, op: ReduceOp = Average, process_set: ProcessSet = ALL
) -> Handle:
    """Sum or average sparse tensors of one shape. Calling the handle returns the sparse result."""
    if op not in (Average, Sum) or not tensor.is_sparse:
        raise InvalidInput(f"sparse_allreduce_async takes sparse tensors, and Average or Sum; got {op!r}.")
    whole = tensor.coalesce()
    parts = [whole.indices().t().contiguous(), whole.values()]
    handle = grouped_allgather_async(parts, None if name is None else f"sparse.{name}", process_set)

    def finish(_: object) -> Tensor:
        indices, values = handle()
        if op is Average:
            values = values / process_set.size()
        return torch.sparse_coo_tensor(indices.t(), values, whole.shape, check_invariants=False).coalesce()

    return Handle(handle.operation, finish)


def alltoall(
    tensor: Tensor, splits: Splits = None, name: str | None = None, process_set: ProcessSet = ALL
) -> Any:
    """Send part r of the tensor, cut along dimension 0, to rank r; return the received parts in rank order.

    Differentiable.

    Args:
        splits: rows for each rank; the result is then (tensor, rows received from each rank). None: equal parts.
    """
    came: list[Tensor] = []  # rows received from each rank

    def run(operands: Tensors) -> list[Tensor]:
        received, counts = _alltoall(operands[0], splits, name, process_set)()
        came.append(counts)
        return [received]

    received = differentiable(run, lambda back: [alltoall(back, came[0], None, process_set)[0]], [tensor])[0]
    return received if splits is None else (received, came[0])


def alltoall_async(
    tensor: Tensor, splits: Splits = None, name: str | None = None, process_set: ProcessSet = ALL
) -> Handle:
    """`alltoall` without waiting; not differentiable."""
    handle = _alltoall(tensor, splits, name, process_set)
    return Handle(handle.operation, lambda outputs: handle()[0] if splits is None else handle())


@disable_compile
def _alltoall(tensor: Tensor, splits: Splits, name: str | None, process_set: ProcessSet) -> Handle:
    working = to_host(tensor)
    if working.dim() == 0:
        raise InvalidInput("alltoall cuts its tensor along the first dimension; a scalar has none.")
    sent = None if splits is None else [int(rows) for rows in splits]
    operation = submit("alltoall", name, [working], process_set, splits=sent)

    def finish(outputs: Any) -> tuple[Tensor, Tensor]:
        return tensor_of(outputs[0], tensor), torch.from_numpy(outputs[1]).to(torch.int32)

    return Handle(operation, finish)


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: Any = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = ALL,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Return this rank's parts of the reduced tensors, cut along dimension 0; the first ranks get one row more if the
    rows cannot be divided evenly. Differentiable for Average and Sum."""
    scale = prescale_factor, postscale_factor
    options = ReduceOptions.from_reducescatter_args(len(tensors), op, scale, process_set, compression)
    return _reducescatter(tensors, name, options)


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = ALL,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """`grouped_reducescatter` without waiting; not differentiable."""
    scale = prescale_factor, postscale_factor
    return _start(tensors, name, ReduceOptions.from_reducescatter_args(len(tensors), op, scale, process_set))


reducescatter = of_one(grouped_reducescatter, _get_first)
reducescatter_async = of_one(grouped_reducescatter_async, Handle.first)


@disable_compile
def _start(tensors: Tensors, name: str | None, options: ReduceOptions) -> Handle:
    hosts = [to_host(tensor) for tensor in tensors]
    _, exchanged, decompress = compress_tensors(hosts, options, all_float32=False)
    how: dict[str, Any] = {"op": options.op.value, "scale": options.scale}
    operation = submit("reducescatter", name, exchanged, options.process_set, **how)

    def finish(outputs: Any) -> list[Tensor]:
        parts = [tensor_of(array, like) for array, like in zip(outputs, exchanged, strict=True)]
        return [part.to(t.device) for part, t in zip(decompress(parts), tensors, strict=True)]

    return Handle(operation, finish)


def _reducescatter(tensors: Tensors, name: str | None, options: ReduceOptions) -> list[Tensor]:
    def gradient(*upstream: Tensor) -> list[Tensor]:
        factor = options.reducescatter_gradient_factor(options.process_set.size)
        wholes = grouped_allgather(upstream, process_set=options.process_set)
        return [whole * factor for whole in wholes]

    return differentiable(lambda given: _start(given, name, options)(), gradient, tensors)
