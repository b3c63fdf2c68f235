"""What Horovod has for data of one's own: loaders that make batches in advance, and a sampler that survives a resize.

The order of `ElasticSampler` is the plan's shuffle of one row group. Rank r takes every size-th remaining row from r
on, so that a step of B rows per rank is the next B·size rows of the epoch: with a fixed global batch, steps do not
depend on the world's size. The progress is one integer if all ranks record whole batches, and a set of rows once a rank
records rows of its own. An iteration belongs to one consumer thread; `_iterate` runs in a thread of the iteration.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any

from spark_elastic.data.plan import draw_permutation
from spark_elastic.errors import InvalidInput

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
        """async_loader_queue_size: batches that may be ready in advance; 0: no thread. debug_data_loader: log each
        batch (INFO). args, kwargs: for the other base class."""
        self.async_loader_queue_size, self.debug_data_loader = async_loader_queue_size, debug_data_loader
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


class ElasticSampler:
    """Indices of this rank's rows that are still to be processed in the epoch.

    With `pad` all ranks have equally many rows, so that their loops take equally many steps: if the rows do not divide
    by `size`, the last step of the epoch repeats up to size - 1 of its rows. Without `pad` no row comes twice; if fewer
    than `size` rows are left for the last step, the highest ranks end one step earlier. `num_samples` and `total_size`
    count the rows of this rank and of all ranks since the last `reset`.
    """

    def __init__(
        self,
        dataset: Sized,
        shuffle: bool = True,
        seed: int = 0,
        *,
        rank: Callable[[], int],
        size: Callable[[], int],
        pad: bool = True,
    ) -> None:
        if not hasattr(dataset, "__len__"):
            raise InvalidInput(
                f"ElasticSampler takes a dataset with a length; got {type(dataset).__name__}: give a map-style dataset."
            )
        self.dataset, self.shuffle, self.seed, self.pad = dataset, shuffle, seed, pad
        self.epoch = 0
        # Rows that were recorded one by one, and all that were processed before them. Those of `_recorded` came since
        # the last `reset`, and are not taken out of `remaining_indices` yet.
        self._known: frozenset[int] = frozenset()
        self._recorded: set[int] = set()
        self._taken = 0  # rows of the epoch's order without `_known` that all ranks have processed together
        self._ask_rank, self._ask_size = rank, size
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch. Call it at the end of the last one, so that a new world does not repeat a finished epoch."""
        self.epoch = epoch
        self._known, self._recorded, self._taken = frozenset(), set(), 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Count a step as processed on all ranks; `batch_size` is the loader's setting, the same on every rank."""
        if batch_size < 1:
            raise InvalidInput(f"record_batch got {batch_size} rows: give the loader's batch_size.")
        left = len(self.dataset) - len(self._known)
        self._taken = min(left, self._taken + batch_size * self.num_replicas)

    def record_indices(self, indices: Iterable[int]) -> None:
        """Count rows as processed, in addition to the batches; each rank records its own. A state brings the ranks'
        rows together at the next change of the world, or when it is synced. Rows that only a lost worker recorded come
        again."""
        rows, known = [int(index) for index in indices], len(self.dataset)
        for row in rows:
            if not 0 <= row < known:
                raise InvalidInput(f"record_indices got row {row} of {known}: give what the sampler yields.")
        self._recorded.update(rows)

    def get_indices(self, batch_idx: int, batch_size: int) -> list[int]:
        """This rank's rows of a batch, counted from the last `reset`."""
        return self._mine[batch_idx * batch_size : (batch_idx + 1) * batch_size]

    @property
    def processed_indices(self) -> set[int]:
        """The rows of this epoch that this rank knows to be processed, by whichever rank."""
        return {*self._known, *self._find_order()[: self._taken], *self._recorded}

    @processed_indices.setter
    def processed_indices(self, indices: Iterable[int]) -> None:
        """Replace what is known; as in Horovod, `reset` then divides the others."""
        self._known, self._recorded, self._taken = frozenset(), set(), 0
        self.record_indices(indices)

    @property
    def indices(self) -> list[int]:
        """This rank's rows since the last `reset`, in the order in which they come."""
        return list(self._mine)

    @property
    def processed_num(self) -> int:
        """The number of `processed_indices`."""
        return len(self.processed_indices) if self._recorded else len(self._known) + self._taken

    @property
    def has_own_progress(self) -> bool:
        """Whether this rank knows of rows that were recorded one by one, and other ranks may know of others."""
        return bool(self._known or self._recorded)

    def state_dict(self) -> dict[str, Any]:
        """The progress; the same on every rank between two steps, unless ranks recorded rows of their own."""
        if not self.has_own_progress:
            return {"epoch": self.epoch, "processed_num": self._taken}
        rows = sorted(self.processed_indices)
        return {"epoch": self.epoch, "processed_num": len(rows), "processed_indices": rows}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over progress, and this world's rank and size. Horovod's states fit, those of any of its versions."""
        self.epoch = state_dict["epoch"]
        self._known = frozenset(state_dict.get("processed_indices", ()))
        self._recorded = set()
        self._taken = max(0, state_dict.get("processed_num", 0) - len(self._known))
        self.reset()

    def reset(self) -> None:
        """Divide the remaining rows of the epoch over the current world."""
        self.rank, self.num_replicas = self._ask_rank(), self._ask_size()
        if not 0 <= self.rank < self.num_replicas:
            raise InvalidInput(f"Rank {self.rank} is not in a world of {self.num_replicas}.")
        if self._recorded:
            self._known, self._taken = frozenset(self.processed_indices), 0
            self._recorded = set()
        self.remaining_indices: list[int] = self._find_order()[self._taken :]
        shared = list(self.remaining_indices)
        while self.pad and len(shared) % self.num_replicas:  # cycling: there may be fewer rows than ranks
            shared += self.remaining_indices[: -len(shared) % self.num_replicas]
        self.total_size = len(shared)
        self._mine = shared[self.rank :: self.num_replicas]
        self.num_samples = len(self._mine)

    def _find_order(self) -> list[int]:
        """The rows of the epoch in their order, without those that were recorded one by one before the last reset."""
        rows = len(self.dataset)
        shuffled = draw_permutation(rows, self.seed, self.epoch, 0).tolist() if self.shuffle else None
        order: list[int] = list(range(rows)) if shuffled is None else shuffled
        return [row for row in order if row not in self._known] if self._known else order

    def __iter__(self) -> Iterator[int]:
        return iter(self._mine)

    def __len__(self) -> int:
        return len(self._mine)
