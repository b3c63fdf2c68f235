"""What a collective of torch.distributed returns: its `Work`, and where an error of a broken collective is raised.

An error never travels in a future, since DDP's reducer crashes on one: the future is completed with the tensors, whose
values are void then. The error is raised by `Work.wait`, at the end of the backward pass that started the collective,
and before any optimizer's step, so that no void gradient is applied.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from elastic_collectives import CollectiveTimeout
from spark_elastic.worker.context import CollectiveThread, get_process_context

if TYPE_CHECKING:
    from spark_elastic.integrations.torch_distributed.process_group import ElasticProcessGroup

TorchFuture = torch.futures.Future


class PendingWorks:
    """Keeps each `Work` until somebody asks it for its end. Any thread.

    The C++ of torch before 2.7 (DDP's reducer), and its dispatcher, hold only their own half of a `Work` that Python
    made: without the other half it waits for ever.
    """

    MOST = 64  # those that nobody asks go in turn
    IS_NEEDED = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 7)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._works: dict[EngineWork, None] = {}  # in the order of their collectives

    def add(self, work: EngineWork) -> EngineWork:
        if self.IS_NEEDED:
            self.keep(work)
        return work

    def keep(self, work: EngineWork) -> None:
        with self._lock:
            self._works[work] = None
            if len(self._works) > self.MOST:
                del self._works[next(iter(self._works))]

    def remove(self, work: EngineWork) -> None:
        if self._works:
            with self._lock:
                self._works.pop(work, None)


class EngineWork(dist.Work):
    """A collective in progress. Any thread may wait for it."""

    def __init__(
        self,
        group: ElasticProcessGroup,
        running: Future[Any],
        tensors: list[Any],
        thread: CollectiveThread | None = None,
    ) -> None:
        """running: its result is the rank of the sender for a receive; its exception is also the group's error.
        tensors: what the collective fills. thread: where it runs, if who waits without a timeout may help."""
        super().__init__()
        self._group, self._running, self._tensors, self._thread = group, running, tensors, thread
        self._at_end: Callable[[], object] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the end of the collective; CollectiveError if the group broke, or that did not come in time."""
        self._group.pending.remove(self)
        seconds = timeout.total_seconds() if timeout else None
        if not self._running.done():
            with self._group.record_wait():
                if self._thread is not None and seconds is None:
                    self._thread.run_pending_until_done(self._running)
                try:
                    self._running.exception(seconds)
                except futures.TimeoutError:  # in Python 3.10 another class than TimeoutError
                    raise CollectiveTimeout((), f"the collective did not end within {seconds:g} s") from None
        if self._at_end is not None:
            self._at_end()
        error = self._running.exception()
        if error is not None:
            # It may have frames of this thread. By them the group, which torch's reducer holds where the collector does
            # not look, would keep the model's wrapper alive, and the wrapper's hooks would fire in the next world.
            error.__traceback__ = None
            self._group.raise_error()
            raise error
        return True

    def call_at_end(self, callback: Callable[[], object]) -> None:
        """Call it when the collective ends, and again before anybody who waits for that continues."""
        self._at_end = callback
        self._running.add_done_callback(lambda running: callback())

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._running.done()

    def is_success(self) -> bool:
        return self._running.done() and self._running.exception() is None

    def exception(self) -> BaseException | None:
        return self._running.exception() if self._running.done() else None

    def result(self) -> list[Any]:
        self.wait()
        return self._tensors

    def source_rank(self) -> int:
        return int(self._running.result())

    _source_rank = source_rank

    def get_future(self) -> TorchFuture[Any]:
        self._group.pending.remove(self)
        tensors = [t for each in self._tensors for t in (each if isinstance(each, list) else [each])]
        devices = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
        future: TorchFuture[Any] = TorchFuture(devices=sorted(devices, key=str))
        self._running.add_done_callback(lambda running: future.set_result(self._tensors))
        return future


class LiveGroups(list[Any]):
    """The process groups that this process has, so that an optimizer's step can ask them for errors. Any thread."""

    def __init__(self) -> None:
        super().__init__()
        register_optimizer_step_pre_hook(self._check_before_step)

    def _check_before_step(self, *step: object) -> None:
        for group in list(self):
            group.raise_error()


def get_live_groups() -> LiveGroups:
    return get_process_context().get_or_create(LiveGroups)
