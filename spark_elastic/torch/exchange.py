"""Gradients of one step, summed over the world while backward still runs.

Gradients are views of flat buckets, so that nothing is copied in or out. Hooks tell which gradients are there; one
engine thread reduces the buckets strictly in the layout's order (R7). The training thread owns everything else and
waits in `finish`. A failed exchange leaves no parameter touched: only bucket memory is void.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable
from types import TracebackType

import numpy as np
import numpy.typing as npt
import torch

from elastic_collectives import Group
from spark_elastic.errors import InvalidInput
from spark_elastic.torch.buckets import Bucket, Spec, layout, layout_hash

BUCKET_BYTES = 25 << 20


class _Engine:
    """One thread that reduces what it is handed, in order. The first error stays until the next step begins."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Group, npt.NDArray[np.generic]] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._open = 0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="spark-elastic-engine", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        self._error = None

    def submit(self, group: Group, array: npt.NDArray[np.generic]) -> None:
        with self._changed:
            self._open += 1
        self._work.put((group, array))

    def wait(self) -> None:
        """Until all is reduced; raises what broke. The group's own timeout bounds the wait."""
        with self._changed:
            self._changed.wait_for(lambda: self._open == 0)
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            group, array = work
            try:
                if self._error is None:
                    group.allreduce(array)
            except BaseException as error:  # raised again in the training thread by `wait`
                self._error = error
            with self._changed:
                self._open -= 1
                self._changed.notify_all()


class GradientExchange:
    """Buckets, hooks and the engine thread for the parameters of one model; groups come and go.

    A step: `begin`, backward passes (the last one after `expect_last`), `finish`; then gradients hold the sums over
    all ranks and `apply` may follow. `close` detaches the gradients from the buckets.
    """

    def __init__(
        self, named_parameters: Iterable[tuple[str, torch.nn.Parameter]], bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        self._names, self._parameters = _trainable(named_parameters)
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
        self.present = np.zeros(len(self._parameters), np.bool_)
        self._waiting = [0] * len(self._buckets)  # gradients that a bucket still lacks in the last backward
        self._launched = 0
        self._last = False
        self._group: Group | None = None
        self._engine = _Engine()
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

    def begin(self, group: Group) -> None:
        """Zero the buckets and make every gradient a view of its bucket."""
        self._group = group
        self._engine.begin()
        self._launched, self._last = 0, False
        self.present[:] = False
        for flat in self._flat:
            flat.zero_()
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view

    def expect_last(self) -> None:
        """The next backward is the last of this step: buckets go out as they fill."""
        self._last = True
        self._waiting = [len(bucket.slices) for bucket in self._buckets]

    def finish(self) -> None:
        """Send what has not gone out (unused parameters, ranks without rows) and wait for all sums."""
        while self._launched < len(self._buckets):
            self._launch()
        self._engine.wait()

    def scale(self, factor: float) -> None:
        for flat in self._flat:
            flat.mul_(factor)

    def drop_absent(self, present: npt.NDArray[np.bool_]) -> None:
        """A gradient that nobody had is None, as in a plain loop (R8)."""
        for parameter, there in zip(self._parameters, present, strict=True):
            if not there:
                parameter.grad = None

    def close(self) -> None:
        self._engine.close()
        for hook in self._hooks:
            hook.remove()
        for parameter in self._parameters:
            parameter.grad = None

    def _place(self, number: int, bucket: Bucket) -> None:
        for part in bucket.slices:
            shape = self._parameters[part.index].shape
            flat = self._flat[number]
            self._views[part.index] = flat[part.offset : part.offset + part.numel].view(shape)
            self._bucket_of[part.index] = number

    def _arrived(self, index: int) -> None:
        """Hook: autograd has added this parameter's gradient. Runs in the backward thread."""
        parameter, view = self._parameters[index], self._views[index]
        if parameter.grad is not view:  # autograd put a tensor of its own in place of the view
            if parameter.grad is None or parameter.grad.is_sparse:
                raise InvalidInput(
                    f"parameter {self._names[index]!r} has a sparse gradient: use sparse=False."
                )
            view.copy_(parameter.grad)
            parameter.grad = view
        self.present[index] = True
        if not self._last:
            return
        self._waiting[self._bucket_of[index]] -= 1
        while self._launched < len(self._buckets) and self._waiting[self._launched] == 0:
            self._launch()

    def _launch(self) -> None:
        flat = self._flat[self._launched]
        self._launched += 1
        assert self._group is not None
        if self._group.size > 1:
            self._engine.submit(self._group, flat.numpy())


def _trainable(
    named: Iterable[tuple[str, torch.nn.Parameter]],
) -> tuple[list[str], list[torch.nn.Parameter]]:
    names, parameters = [], []
    for name, parameter in named:
        if not parameter.requires_grad:
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
    return names, parameters
