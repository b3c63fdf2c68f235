"""Horovod's data loaders: a base class, and a mixin that makes batches in advance in a background thread.

They know nothing of tables, steps and worlds. An iteration belongs to one consumer thread; `_iterate` runs in a thread
of the iteration, which ends with it or with `close_async_loader`.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

log = logging.getLogger(__name__)

END_WAIT = 10.0  # seconds for the thread to finish its batch


class BaseDataLoader(ABC):
    """Iterating over it gives the batches of one epoch."""

    @abstractmethod
    def _iterate(self) -> Iterable[Any]:
        """The batches of one epoch."""

    def _process_batch(self, batch: Any) -> Any:
        """What the consumer gets for a batch; called in the consumer's thread."""
        return batch

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)


class AsyncDataLoaderMixin:
    """Before a `BaseDataLoader` among the base classes: `class Loader(AsyncDataLoaderMixin, MyLoader)`."""

    def __init__(
        self, async_loader_queue_size: int = 64, debug_data_loader: bool = False, *args: Any, **kwargs: Any
    ) -> None:
        """
        Args:
            async_loader_queue_size: batches that may be ready in advance; 0: no thread.
            debug_data_loader: log each batch (INFO).
            args, kwargs: for the other base class.
        """
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        self._open: list[_BackgroundBatches] = []
        super().__init__(*args, **kwargs)

    def __iter__(self) -> Iterator[Any]:
        loader: Any = self  # methods of the other base class
        if self.async_loader_queue_size <= 0:
            yield from map(loader._process_batch, loader._iterate())
            return
        batches = _BackgroundBatches(loader._iterate, self.async_loader_queue_size, self.debug_data_loader)
        self._open.append(batches)
        batches.start()
        try:
            yield from map(loader._process_batch, batches)
        finally:
            self._open.remove(batches)
            batches.close()

    def close_async_loader(self) -> None:
        """End all running iterations and their threads."""
        for batches in list(self._open):
            batches.close()


class _BackgroundBatches:
    """The batches of one iteration; a thread makes up to `room` of them in advance."""

    def __init__(self, batches: Callable[[], Iterable[Any]], room: int, verbose: bool) -> None:
        self._batches = batches
        self._room = room
        self._level = logging.INFO if verbose else logging.DEBUG
        self._changed = threading.Condition()
        self._ready: deque[Any] = deque()
        self._ended = False
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._make, name="batches-ahead", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        with self._changed:
            self._ready.clear()
            self._ended = True
            self._changed.notify_all()
        self._thread.join(END_WAIT)
        if self._thread.is_alive():
            log.warning("a data loader is still at its batch %g s after it was closed.", END_WAIT)

    def __iter__(self) -> Iterator[Any]:
        while True:
            with self._changed:
                # Without a deadline: the user's code may take as long as it would without a thread.
                self._changed.wait_for(lambda: self._ready or self._ended)
                if not self._ready:
                    break
                batch = self._ready.popleft()
                self._changed.notify_all()
            yield batch
        if self._failed is not None:
            raise self._failed

    def _make(self) -> None:
        try:
            for number, batch in enumerate(self._batches()):
                if not self._put(batch):
                    return
                log.log(self._level, "batch %d is ready", number)
        except BaseException as error:  # the consumer's thread raises it
            self._failed = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _put(self, batch: Any) -> bool:
        """Add a batch once there is room. False if the iteration was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or len(self._ready) < self._room)
            if not self._ended:
                self._ready.append(batch)
                self._changed.notify_all()
            return not self._ended
