"""Gradients of one step, summed over the world while backward still runs.

Gradients are views of flat buckets, so that nothing is copied in or out. Hooks tell which gradients are there; the
engine's thread reduces them strictly in the layout's order (R7). The training thread owns everything else and waits in
`finish`. A failed exchange leaves no parameter touched: only bucket
memory is void. A step given up half-way is drained before the next one begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from types import TracebackType

import numpy as np
import numpy.typing as npt
import torch

from elastic_collectives import Group, MismatchError
from spark_elastic.errors import InvalidInput
from spark_elastic.torch.buckets import Bucket, Spec, layout, layout_hash
from spark_elastic.worker.engine_thread import EngineThread

BUCKET_BYTES = 25 << 20


class GradientExchange:
    """Buckets, hooks and the engine thread for the parameters of one model; groups come and go.

    A step: `begin`, backward passes, `finish`; then gradients hold the sums over all ranks and `apply` may follow.
    Gradients that arrive outside of a step are not counted. `close` detaches the gradients from the buckets.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        bucket_bytes: int = BUCKET_BYTES,
        prescale: float = 1.0,
        opener: Callable[[], None] | None = None,
        engine: Callable[[], EngineThread | None] = lambda: None,
    ) -> None:
        """prescale: factor on a bucket before it goes out. opener: called at a gradient that comes while no step is
        open, to `open` one; for loops that call nothing before backward. engine: the thread that serves the group at
        a step's opening; None: one of its own."""
        self._names, self._parameters, self._frozen = _trainable(named_parameters)
        specs = [
            Spec(name, tuple(p.shape), str(p.dtype).removeprefix("torch."), p.element_size())
            for name, p in zip(self._names, self._parameters, strict=True)
        ]
        self.layout_hash = layout_hash(specs, bucket_bytes)
        self._buckets = layout(specs, bucket_bytes)
        self._flat = [torch.zeros(b.numel, dtype=getattr(torch, b.dtype)) for b in self._buckets]
        self._views: list[torch.Tensor] = [torch.empty(0)] * len(self._parameters)
        self._bucket_of = [0] * len(self._parameters)
        for number, bucket in enumerate(self._buckets):
            self._place(number, bucket)
        self._prescale = prescale
        self._opener = opener
        self._arrivals = [0] * len(self._parameters)
        self._waiting = [0] * len(self._buckets)  # gradients that a bucket still lacks
        self._launched = 0
        self._passes = 0
        self._open = False
        self._group: Group | None = None
        self._agreed: Group | None = None
        self._own = EngineThread()
        self._engine_now = engine
        self._engine = self._own  # of the open step
        self._sent: Future[None] | None = None  # what the open step handed over last
        self._hooks = [
            p.register_post_accumulate_grad_hook(lambda tensor, index=i: self._arrived(index))  # type: ignore[no-untyped-call]
            for i, p in enumerate(self._parameters)
        ]

    def __enter__(self) -> GradientExchange:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return self._parameters

    @property
    def present(self) -> npt.NDArray[np.bool_]:
        """Which parameters got a gradient in this step, in the order of `parameters`."""
        return np.array(self._arrivals) > 0

    @property
    def in_bucket(self) -> list[bool]:
        """Which gradients lie in their buckets."""
        return [p.grad is view for p, view in zip(self._parameters, self._views, strict=True)]

    @property
    def is_open(self) -> bool:
        """A step was opened and neither finished nor abandoned."""
        return self._open

    @property
    def under_way(self) -> bool:
        """Buckets of an open step have gone out."""
        return self._open and self._launched > 0

    @property
    def group(self) -> Group | None:
        """Of the newest step; None: it trains alone."""
        return self._group

    def begin(self, group: Group | None, passes: int) -> None:
        """Open a step with gradients of zero. group: None trains alone. passes: backward passes until `finish`; 0 on a
        rank without rows."""
        self.open(group, passes)
        self.zero()

    def open(self, group: Group | None, passes: int) -> None:
        """Begin to count; the gradients that there are stay."""
        self.abandon()
        for name, parameter in self._frozen:
            if parameter.requires_grad:
                raise InvalidInput(
                    f"parameter {name!r} was frozen when training began: let it require a gradient from the start."
                )
        self._group, self._passes, self._launched, self._open = group, passes, 0, True
        self._engine, self._sent = self._engine_now() or self._own, None
        self._arrivals = [0] * len(self._parameters)
        self._waiting = [len(bucket.slices) * passes for bucket in self._buckets]

    def zero(self) -> None:
        """Zero the buckets and make every gradient a view of its bucket."""
        for flat in self._flat:
            flat.zero_()
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view

    def finish(self) -> None:
        """Send what has not gone out (unused parameters, ranks without rows) and wait for all sums.

        Raises:
            MismatchError: in the first step of a world, ranks have other parameters than rank 0; on every rank alike.
            CollectiveError: the group broke; the gradients are void.
        """
        for index, arrivals in enumerate(self._arrivals):
            if not arrivals:
                self._adopt(index)
        while self._launched < len(self._buckets):
            self._launch()
        if self._sent is not None:
            self._sent.result()
        self._open = False

    def drain(self) -> None:
        """Until the buckets that have gone out are back, or broke."""
        if self._sent is not None:
            self._sent.exception()

    def abandon(self) -> None:
        """Give up the open step, if any: nothing of it is under way when this returns. Its group is of no more use
        once buckets have gone out, since the peers wait for the rest."""
        if self.under_way and self._group is not None:
            self._group.abort("a step was given up in the middle of its exchange")
        self.drain()
        self._open = False

    def scale(self, factor: float) -> None:
        for flat in self._flat:
            flat.mul_(factor)

    def drop_absent(self, present: npt.NDArray[np.bool_]) -> None:
        """A gradient that nobody had is None, as in a plain loop (R8)."""
        for parameter, there in zip(self._parameters, present, strict=True):
            if not there:
                parameter.grad = None

    def close(self) -> None:
        self.abandon()
        self._own.close()
        for hook in self._hooks:
            hook.remove()
        self.drop_absent(np.zeros(len(self._parameters), np.bool_))

    def _agree(self, group: Group) -> None:
        """R7: the layout's hash precedes data."""
        hashes = group.allgather(np.array(self.layout_hash, np.uint64)).tolist()
        off = [rank for rank, cut in enumerate(hashes) if cut != hashes[0]]
        if off:
            raise MismatchError(
                off, f"ranks {off} train parameters of other names, shapes or dtypes than rank 0"
            )

    def _place(self, number: int, bucket: Bucket) -> None:
        for part in bucket.slices:
            shape = self._parameters[part.index].shape
            flat = self._flat[number]
            self._views[part.index] = flat[part.offset : part.offset + part.numel].view(shape)
            self._bucket_of[part.index] = number

    def _arrived(self, index: int) -> None:
        """Hook: autograd has added this parameter's gradient. Runs in the backward thread."""
        if self._opener is not None:
            self._opener()
        if not self._open:
            return
        if self._arrivals[index] == self._passes:
            raise InvalidInput(
                f"the gradient of parameter {self._names[index]!r} came more than {self._passes} times in one step: "
                "call step() after that many backward passes, and use checkpointing with use_reentrant=False."
            )
        self._adopt(index)
        self._arrivals[index] += 1
        self._waiting[self._bucket_of[index]] -= 1
        while self._launched < len(self._buckets) and self._waiting[self._launched] == 0:
            self._launch()

    def _adopt(self, index: int) -> None:
        """The parameter's gradient, wherever autograd or the user put it, becomes the view of its bucket."""
        parameter, view = self._parameters[index], self._views[index]
        gradient = parameter.grad
        if gradient is view:
            return
        if gradient is None:
            view.zero_()
        elif gradient.is_sparse:
            raise InvalidInput(f"parameter {self._names[index]!r} has a sparse gradient: use sparse=False.")
        else:
            view.copy_(gradient.detach())
        parameter.grad = view

    def _launch(self) -> None:
        flat = self._flat[self._launched]
        self._launched += 1
        group, array = self._group, flat.numpy()
        if group is None or group.size == 1:
            return
        if group is not self._agreed:
            self._submit(lambda: self._agree(group))
            self._agreed = group
        if self._prescale != 1.0:
            flat.mul_(self._prescale)
        self._submit(lambda: group.allreduce(array))

    def _submit(self, work: Callable[[], None]) -> None:
        """To the engine's thread. What the step sent before has broken: raises that instead."""
        before = self._sent

        def next_one() -> None:
            if before is not None:
                before.result()
            work()

        self._sent = self._engine.submit(next_one)


def _trainable(
    named: Iterable[tuple[str, torch.nn.Parameter]],
) -> tuple[list[str], list[torch.nn.Parameter], list[tuple[str, torch.nn.Parameter]]]:
    """(names, parameters, frozen ones)"""
    names, parameters, frozen = [], [], []
    for name, parameter in named:
        if not parameter.requires_grad:
            frozen.append((name, parameter))
            continue
        if parameter.device.type != "cpu":
            raise InvalidInput(
                f"parameter {name!r} is on {parameter.device}: only CPU parameters can be trained."
            )
        if parameter.dtype not in (torch.float32, torch.float64):
            raise InvalidInput(
                f"parameter {name!r} is {parameter.dtype}: only float32 and float64 can be trained."
            )
        names.append(name)
        parameters.append(parameter)
    if not parameters:
        raise InvalidInput("the model has no parameter that requires a gradient: there is nothing to train.")
    return names, parameters, frozen
