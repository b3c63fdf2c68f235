"""The process group of the backend `elastic`: torch.distributed's collectives over a group of the engine.

The collectives of a process group run in the order of their calls, in a thread of the group; one that its caller waits
for at once runs in the calling thread. After an error all results are void, and `error` says why. torch changed some
names: both the old and the new ones are here.

The bulk plane carries tensors on GPUs: such a collective begins in the thread that calls it, on the stream that
computed its operands, and its `Work` waits on the host, until all ranks have confirmed it over the engine. What NCCL
does not know travels through the host, as everything does while the communicator is built.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from concurrent import futures
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

from elastic_collectives import CollectiveError, CollectiveTimeout, Group
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.bulk_plane import BulkPlane, BulkSums, get_or_start_bulk_plane
from spark_elastic.gradients.host_memory import Operand, TorchReduction, concatenate
from spark_elastic.gradients.reduction import options_from_env
from spark_elastic.integrations.torch_distributed.observing import make_observable
from spark_elastic.integrations.torch_distributed.point_to_point import PointToPoint
from spark_elastic.integrations.torch_distributed.work import EngineWork, PendingWorks, get_live_groups
from spark_elastic.worker.context import CollectiveThread, WaitRecorder

NAME = "elastic"
BARRIER_TAG = -1  # of messages of `monitored_barrier`; programs have none below 0

Tensors = list[Tensor]
Call = Callable[[], object]
# torch declares each method with overloads that C++ resolves before Python is called.
_ProcessGroup: Any = dist.ProcessGroup
_c10d: Any = dist.distributed_c10d
# What the bulk plane carries: collectives with the class of their options, dtypes, reductions.
BULK_OPTIONS: dict[str, Any] = {
    "allreduce": _c10d.AllreduceOptions,
    "broadcast": _c10d.BroadcastOptions,
    "_allgather_base": _c10d.AllgatherOptions,
    "_reduce_scatter_base": _c10d.ReduceScatterOptions,
}
BULK_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
BULK_DTYPES |= {torch.uint8, torch.int8, torch.int32, torch.int64}
BULK_REDUCTIONS = {"SUM", "AVG", "PRODUCT", "MIN", "MAX"}


@make_observable
class ElasticProcessGroup(_ProcessGroup):  # type: ignore[misc]
    def __init__(
        self,
        group: Group,
        timeout: timedelta,
        connect_pair: Callable[[int, int], Group],
        recorder: WaitRecorder,
        store: Any = None,
    ) -> None:
        """group: this process group's own; it is closed with the process group. timeout: how long a collective may wait
        for a rank. connect_pair: the engine group for messages from one of its ranks to another. store: torch's."""
        super().__init__(group.rank, group.size)
        self.error: BaseException | None = None
        self.pending = PendingWorks()
        self._group = recorder.watch_group(group)
        self.record_wait = recorder.record_wait
        self._seconds = timeout.total_seconds()
        self._group.set_timeout(self._seconds)
        self._store = store
        self._calls = 0  # collectives and messages that were begun
        self._thread = CollectiveThread()
        self.records = CollectiveThread()  # ends what profilers record of collectives
        self._messages = PointToPoint(group.rank, connect_pair, self._seconds, self._fail)
        self._options = options_from_env()
        self._planes: dict[
            torch.device, BulkPlane | None
        ] = {}  # None: the engine carries that device's tensors
        self._guarded = -1  # of autograd: the last backward pass that checks this group at its end
        self._closed = False
        self._names = ["", ""]  # of the group, and its description
        get_live_groups().append(self)

    # ---- the state of the group

    def raise_error(self) -> None:
        error = self.error
        if isinstance(error, CollectiveError):
            raise type(error)(error.ranks, error.reason)
        if error is not None:
            raise error

    def shutdown(self) -> None:
        """End the group: torch calls it when the group is destroyed, the worker at the end of the world."""
        if self._closed:
            return
        self._closed = True
        get_live_groups().remove(self)
        if self.error is None:
            self._thread.drain()
        self._group.close()
        self._thread.close()
        self._messages.close()
        self.records.close()

    def abort(self) -> None:
        self._group.abort(f"rank {self.rank()} aborted its process group")

    def set_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()
        self._group.set_timeout(self._seconds)
        self._messages.set_timeout(self._seconds)
        self.options._timeout = timeout

    _set_default_timeout = set_timeout

    @cached_property
    def options(self) -> Any:
        backend: Any = torch._C._distributed_c10d.Backend
        kind = getattr(backend, "Options", None) or getattr(_ProcessGroup, "Options")  # noqa: B009 - before torch 2.6
        return kind(NAME, timedelta(seconds=self._seconds))

    def get_group_store(self) -> Any:
        return self._store

    def _set_sequence_number_for_group(self) -> None:
        self._calls = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._calls

    def getBackendName(self) -> str:
        return NAME  # C++ looks for Gloo's devices where it is "gloo"

    def name(self) -> str:
        """The name that torch's own group would have on CPUs, where the program did not ask for another one."""
        asked = ""
        with suppress(ValueError, AssertionError):  # torch does not know the group yet, or any more
            asked = str(dist.get_backend(self))
        is_gloo = "gloo" in asked or (asked == dist.Backend.UNDEFINED and not torch.cuda.is_available())
        return str(dist.Backend.GLOO) if is_gloo else NAME

    _get_backend_name = name

    # torch 2.15 asks a group for its devices and for the backend of each before it exchanges messages in a batch.
    supports_coalescing = False
    supports_time_estimate = False
    supports_splitting = False  # asked where a program gives init_process_group its device_id

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> ElasticProcessGroup:
        return self

    # DeviceMesh and functional collectives find a group by its name, which C++ asks for here.
    def setGroupName(self, name: str) -> None:
        self._names[0] = name

    def getGroupName(self) -> str:
        return self._names[0]

    def setGroupDesc(self, description: str) -> None:
        self._names[1] = description

    def getGroupDesc(self) -> str:
        return self._names[1]

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    # ---- reductions

    def allreduce(self, tensors: Tensors | Tensor, options: Any = None) -> Work:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        reduction = TorchReduction.of(getattr(options, "reduceOp", options))
        if given[0].layout is torch.sparse_coo:
            if reduction.name not in ("SUM", "AVG"):
                raise InvalidInput(f"all_reduce of sparse tensors knows SUM and AVG; got {reduction.name}.")
            return self._submit(partial(self._allreduce_sparse, given[0], reduction), given, options)
        if len(given) == 1 and (work := self._submit_bulk("allreduce", given, options)):
            return work
        operands = [Operand(tensor) for tensor in given]
        for operand in operands:
            reduction.check(operand)

        def call() -> None:
            reduction.allreduce(self._group, operands)
            for operand in operands:
                operand.write_back()

        return self._submit(call, given, options)

    allreduce_coalesced = allreduce

    def _allreduce_sparse(self, tensor: Tensor, reduction: TorchReduction) -> None:
        """Sum sparse tensors: every rank gathers the indices and values of all."""
        own = tensor.detach().cpu().coalesce()
        indices = self._group.allgatherv(own.indices().t().contiguous().numpy())
        values = self._group.allgatherv(Operand(own.values()).array.reshape(own.values().shape))
        places = torch.cat([torch.from_numpy(part) for part in indices]).t()
        numbers = torch.cat([torch.from_numpy(part).view(tensor.dtype) for part in values])
        whole = torch.sparse_coo_tensor(places, numbers, tensor.shape).coalesce()
        with torch.no_grad():
            tensor.copy_(whole / self.size() if reduction.name == "AVG" else whole)

    def reduce(self, tensors: Tensors, options: Any) -> Work:
        reduction = TorchReduction.of(options.reduceOp)
        target = Operand(tensors[0])
        reduction.check(target)
        operand = target if self.rank() == options.rootRank else target.copy()

        def call() -> None:
            reduction.allreduce(self._group, [operand])
            operand.write_back()

        return self._submit(call, tensors, options)

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], options: Any = None) -> Work:
        reduction, (out,), (parts,) = TorchReduction.of(getattr(options, "reduceOp", None)), outputs, inputs
        self._check_count("reduce_scatter", parts)
        operand, counts = concatenate(parts)
        target = Operand(out)
        reduction.check(operand)
        if counts[self.rank()] != target.flat.numel():
            mine = f"{counts[self.rank()]} elements into this rank's output, which has {target.flat.numel()}"
            raise InvalidInput(f"reduce_scatter puts {mine}.")

        def call() -> None:
            if len(set(counts)) == 1:
                reduction.reducescatter(self._group, operand, target)
            else:
                reduction.allreduce(self._group, [operand])
                begin = sum(counts[: self.rank()])
                target.array[...] = operand.array[begin : begin + counts[self.rank()]]
            target.write_back()

        return self._submit(call, outputs, options)

    def reduce_scatter_single(self, out: Tensor, tensor: Tensor, options: Any = None) -> Work:
        work = self._submit_bulk("_reduce_scatter_base", [out, tensor], options)
        return work or self._reduce_scatter_wholes([out], [tensor], options)

    def _reduce_scatter_wholes(self, outputs: Tensors, inputs: Tensors, options: Any = None) -> Work:
        reduction = TorchReduction.of(getattr(options, "reduceOp", None))
        pairs = [(Operand(out), Operand(tensor)) for out, tensor in zip(outputs, inputs, strict=True)]
        for out, operand in pairs:
            reduction.check(operand)
            self._check_sizes("reduce_scatter", out, operand)

        def call() -> None:
            for out, operand in pairs:
                reduction.reducescatter(self._group, operand, out)
                out.write_back()

        return self._submit(call, outputs, options)

    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced = _reduce_scatter_wholes

    # ---- what moves data

    def broadcast(self, tensors: Tensors | Tensor, options: Any = None) -> Work:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        root = options if isinstance(options, int) else getattr(options, "rootRank", 0)
        if len(given) == 1 and (work := self._submit_bulk("broadcast", given, options)):
            return work
        operands = [Operand(tensor) for tensor in given]

        def call() -> None:
            for operand in operands:
                self._group.broadcast(operand.array, root)
                operand.write_back()

        return self._submit(call, given, options)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, options: Any = None) -> Work:
        if len(outputs) != len(inputs):
            raise InvalidInput(
                f"all_gather takes a list of tensors for each tensor of {len(inputs)}; got {len(outputs)}."
            )
        return self._allgather(outputs, inputs, outputs, options)

    def allgather_coalesced(self, outputs: list[Tensors], inputs: Tensors, options: Any = None) -> Work:
        self._check_count("all_gather_coalesced", outputs)
        if any(len(of_rank) != len(inputs) for of_rank in outputs):
            raise InvalidInput(
                f"all_gather_coalesced of {len(inputs)} tensors takes a list of as many for each rank; got lists of "
                f"{[len(of_rank) for of_rank in outputs]}."
            )
        by_tensor = [[of_rank[number] for of_rank in outputs] for number in range(len(inputs))]
        return self._allgather(by_tensor, inputs, outputs, options)

    def _allgather(self, lists: list[Tensors], inputs: Tensors, outputs: list[Tensors], options: Any) -> Work:
        """Gather the i-th tensor of all ranks into the i-th list; `outputs` has the same tensors as torch asked."""
        pairs = list(zip(lists, map(Operand, inputs), strict=True))
        for parts, operand in pairs:
            self._check_count("all_gather", parts)
            expected = _count_numbers(parts[self.rank()])
            if operand.flat.numel() != expected:
                mine = f"{operand.flat.numel()} elements into this rank's tensor of the list, which has {expected}"
                raise InvalidInput(f"all_gather puts {mine}.")

        def call() -> None:
            for parts, operand in pairs:
                are_equal = len(set(map(_count_numbers, parts))) == 1
                gather: Any = self._group.allgather if are_equal else self._group.allgatherv
                for part, array in zip(map(Operand, parts), gather(operand.array), strict=True):
                    part.array[...] = array.reshape(-1)
                    part.write_back()

        return self._submit(call, [list(parts) for parts in outputs], options)

    def all_gather_single(self, out: Tensor, tensor: Tensor, options: Any = None) -> Work:
        work = self._submit_bulk("_allgather_base", [out, tensor], options)
        return work or self._gather_wholes([out], [tensor], options)

    def _gather_wholes(self, outputs: Tensors, inputs: Tensors, options: Any = None) -> Work:
        pairs = [(Operand(out), Operand(tensor)) for out, tensor in zip(outputs, inputs, strict=True)]
        for out, operand in pairs:
            self._check_sizes("all_gather", operand, out)

        def call() -> None:
            for out, operand in pairs:
                self._group.allgather(operand.array, out=out.rows(self.size()))
                out.write_back()

        return self._submit(call, outputs, options)

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced = _gather_wholes

    def gather(self, outputs: list[Tensors], inputs: Tensors, options: Any) -> Work:
        operand, root = Operand(inputs[0]), options.rootRank
        parts = outputs[0] if self.rank() == root else []
        if self.rank() == root:
            self._check_count("gather", parts)
        targets = [Operand(part) for part in parts] or self._only(None, operand)
        return self._alltoall(self._only(root, operand), targets, [list(parts)], options)

    def scatter(self, outputs: Tensors, inputs: list[Tensors], options: Any) -> Work:
        out, root = Operand(outputs[0]), options.rootRank
        if self.rank() == root:
            self._check_count("scatter", inputs[0])
        sent = [Operand(tensor) for tensor in inputs[0]] if self.rank() == root else self._only(None, out)
        return self._alltoall(sent, self._only(root, out), outputs, options)

    def alltoall(self, outputs: Tensors, inputs: Tensors, options: Any = None) -> Work:
        self._check_count("all_to_all", inputs)
        self._check_count("all_to_all", outputs)
        return self._alltoall([*map(Operand, inputs)], [*map(Operand, outputs)], outputs, options)

    def _alltoall(
        self, sent: list[Operand], received: list[Operand], tensors: list[Any], options: Any
    ) -> Work:
        """Send the r-th operand to rank r, and receive another one from it."""

        def call() -> None:
            arrays = [operand.array for operand in sent]
            self._group.alltoall_arrays(arrays, [operand.array for operand in received])
            for operand in received:
                operand.write_back()

        return self._submit(call, tensors, options)

    def _only(self, rank: int | None, operand: Operand) -> list[Operand]:
        """For each rank an operand without elements; but for that one this operand."""
        none = Operand(operand.flat.new_empty(0))
        return [operand if other == rank else none for other in range(self.size())]

    def all_to_all_single(
        self,
        out: Tensor,
        tensor: Tensor,
        out_splits: Sequence[int],
        splits: Sequence[int],
        options: Any = None,
    ) -> Work:
        operand, target = Operand(tensor), Operand(out)
        send_counts = self._count_elements("input", tensor, operand, splits)
        receive_counts = self._count_elements("output", out, target, out_splits)

        def call() -> None:
            self._group.alltoall(operand.array, send_counts, out=target.array, incoming=receive_counts)
            target.write_back()

        return self._submit(call, [out], options)

    alltoall_base = all_to_all_single

    def _count_elements(
        self, which: str, tensor: Tensor, operand: Operand, splits: Sequence[int]
    ) -> list[int]:
        """The elements of each rank's rows."""
        rows = tensor.shape[0] if tensor.dim() else 1
        counts = list(splits) or [rows // self.size()] * self.size()
        if len(counts) != self.size() or sum(counts) != rows:
            raise InvalidInput(
                f"all_to_all_single cannot split the {rows} rows of its {which} among {self.size()} ranks as {counts}: "
                f"pass {which}_split_sizes with one number for each rank that add up to {rows}."
            )
        per_row = operand.flat.numel() // rows if rows else 0
        return [count * per_row for count in counts]

    def send(self, tensors: Tensors, target: int, tag: int) -> Work:
        self._begin()
        running, thread = self._messages.send(tensors[0], target, tag)
        return self.pending.add(EngineWork(self, running, tensors, thread))

    def recv(self, tensors: Tensors, source: int, tag: int) -> Work:
        return self._receive(tensors, source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Work:
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: Tensors, source: int | None, tag: int) -> Work:
        self._begin()
        running, thread = self._messages.receive(tensors[0], source, tag, self.size())
        return self.pending.add(EngineWork(self, running, tensors, thread))

    def barrier(self, opts: Any = None) -> Work:
        return self._submit(self._group.barrier, [], opts)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Each rank sends a message to rank 0, which answers once all have come. Its error names the first that did
        not, or all of them, in the words of torch's own barrier."""
        self._begin()
        self.raise_error()
        given = self._seconds if timeout is None else timeout.total_seconds()
        seconds = self._seconds if given < 0 else given
        peers = [0] if self.rank() else list(range(1, self.size()))
        if self.rank():
            self._messages.send(torch.zeros(1), 0, BARRIER_TAG)
        came = [self._messages.receive(torch.empty(1), peer, BARRIER_TAG, self.size())[0] for peer in peers]
        with self.record_wait():
            done, _ = futures.wait(came, timeout=seconds)
        errors = [future.exception() for future in done]
        answers = zip(peers, came, strict=True)
        missing = [peer for peer, future in answers if future not in done or future.exception()]
        if missing:
            kinds = [type(error) for error in errors if isinstance(error, CollectiveError)]
            listed = f"s {', '.join(map(str, missing))}" if wait_all_ranks else f" {missing[0]}"
            reason = self._explain_barrier(listed, seconds)
            error = (kinds or [CollectiveTimeout])[0](missing, reason).to_world_ranks(self._group.members)
            self._fail(error)
            raise error
        if not self.rank():
            for peer in peers:
                self._messages.send(torch.zeros(1), peer, BARRIER_TAG)

    def _explain_barrier(self, missing: str, seconds: float) -> str:
        if self.rank():
            return (
                f"Rank {self.rank()} successfully reached monitoredBarrier, but received errors while waiting for "
                f"send/recv from rank 0 within {seconds:g} s: see the error of rank 0"
            )
        return (
            f"[Rank 0]: Rank{missing} failed to pass monitoredBarrier in {seconds * 1000:.0f} ms: Rank 0 timed out in "
            f"monitoredBarrier"
        )

    # ---- how a collective runs

    def _submit(self, call: Call, tensors: list[Any], options: Any) -> Work:
        timeout = getattr(options, "timeout", None)
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else -1.0
        return self._start(call, tensors, seconds, wait=getattr(options, "asyncOp", True) is False)

    def _submit_bulk(self, name: str, tensors: Tensors, options: Any) -> Work | None:
        """Begin a collective of results and operands on a GPU over NCCL; None: the engine carries it. name: as in
        `BULK_OPTIONS`."""
        plane = self._find_plane(name, tensors, options)
        if plane is None:
            return None
        if not plane.is_settled:
            # All ranks must take the same way: they agree when everything before has ended.
            settle = plane.exchange_readiness if self._options.hybrid_recovery else plane.wait_until_ready
            self._start(settle, [], -1.0, wait=True)
        if not plane.is_active or self.error is not None:
            return None
        given = _make_bulk_options(name, options)
        shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        which = (name, _get_reduction(options).name, getattr(given, "rootRank", 0), shapes)
        arguments: list[Any] = [tensors] if name in ("allreduce", "broadcast") else tensors
        sums = BulkSums(plane, zlib.crc32(repr(which).encode()) >> 1)
        sums.launch(lambda process_group: getattr(process_group, name)(*arguments, given))
        return self._submit(sums.finish, tensors[:1], options)

    def _find_plane(self, name: str, tensors: Tensors, options: Any) -> BulkPlane | None:
        """The plane that could carry a collective, once the ranks agree on it."""
        device = tensors[0].device
        if device not in self._planes:
            self._planes[device] = get_or_start_bulk_plane(self._group, device, self._options)
        plane = self._planes[device]
        if plane is None or not all(
            tensor.device == plane.device
            and tensor.layout is torch.strided
            and tensor.is_contiguous()
            and tensor.dtype in BULK_DTYPES
            for tensor in tensors
        ):
            return None
        reduces = name in ("allreduce", "_reduce_scatter_base")
        return plane if not reduces or _get_reduction(options).name in BULK_REDUCTIONS else None

    def _start(self, call: Call, tensors: list[Any], seconds: float, *, wait: bool) -> Work:
        """tensors: what the collective fills. seconds: how long it may wait for a rank; 0 or less: the group's timeout.
        wait: the caller waits for it at once."""
        self._begin()
        self._check_after_backward()
        work = partial(self._carry_out, call, seconds)
        if not wait:
            return self.pending.add(EngineWork(self, self._thread.submit(work), tensors))
        running: Future[None] = Future()
        try:
            self._thread.drain_and_call(work)
            running.set_result(None)
        except Exception as error:
            running.set_exception(error)  # `wait` raises it
        return self.pending.add(EngineWork(self, running, tensors))

    def _carry_out(self, call: Call, seconds: float) -> None:
        self.raise_error()
        try:
            if seconds > 0:
                self._group.set_timeout(seconds)
            call()
            if seconds > 0:
                self._group.set_timeout(self._seconds)
        except CollectiveError as error:
            self._fail(_add_remedy(error.to_world_ranks(self._group.members)))
            raise
        except BaseException as error:  # peers must not wait for this rank until their timeout
            self._group.abort(f"rank {self.rank()} cannot continue: {type(error).__name__}: {error}")
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        self.error = self.error or error
        for plane in filter(None, self._planes.values()):
            plane.abort()
            plane.wait_aborted()  # nothing writes to its tensors any more

    def _check_after_backward(self) -> None:
        """If a backward pass runs in this thread, have it raise this group's error at its end."""
        task = torch._C._current_graph_task_id()
        if task not in (-1, self._guarded):
            self._guarded = task
            # A callback of a callback: it comes after those of DDP, which waits for its collectives in one.
            _call_after_backward(lambda: _call_after_backward(self.raise_error))

    def _begin(self) -> None:
        self._calls += 1
        if self._closed:
            raise InvalidInput(
                "this process group has ended, with its world or by destroy_process_group: call init_process_group in "
                "each world, and wrap the model anew."
            )

    def _check_count(self, what: str, tensors: Sequence[Any]) -> None:
        if len(tensors) != self.size():
            raise InvalidInput(f"{what} takes a tensor for each of {self.size()} ranks; got {len(tensors)}.")

    def _check_sizes(self, what: str, part: Operand, whole: Operand) -> None:
        if part.dtype != whole.dtype or part.flat.numel() * self.size() != whole.flat.numel():
            raise InvalidInput(
                f"{what} among {self.size()} ranks takes tensors of one dtype, the larger with {self.size()} times the "
                f"elements of the smaller; got {part.flat.numel()} of {part.dtype} and {whole.flat.numel()} of "
                f"{whole.dtype}."
            )


def _add_remedy(error: CollectiveError) -> CollectiveError:
    if not isinstance(error, CollectiveTimeout):
        return error
    reason = f"{error.reason}; if they need longer, raise the timeout of init_process_group or new_group"
    return type(error)(error.ranks, reason)


def _call_after_backward(callback: Any) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def _get_reduction(options: Any) -> TorchReduction:
    op = getattr(options, "reduceOp", options)
    return TorchReduction.of(op if isinstance(op, dist.ReduceOp) else None)


def _make_bulk_options(name: str, options: Any) -> Any:
    """The collective's options, with `asyncOp`: NCCL then returns a `Work` that can be asked for its end."""
    kind = BULK_OPTIONS[name]
    given = options if isinstance(options, kind) else kind()
    if given is not options and isinstance(options, int):
        given.rootRank = options
    elif given is not options and options is not None:
        # A reduction, or the options of a coalesced form.
        given.reduceOp = getattr(options, "reduceOp", options)
    if hasattr(given, "asyncOp"):
        given.asyncOp = True
    return given


def _count_numbers(tensor: Tensor) -> int:
    """Elements of its operand."""
    return tensor.numel() * (2 if tensor.is_complex() else 1)
