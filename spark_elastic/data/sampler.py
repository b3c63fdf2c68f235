"""Horovod's `ElasticSampler` for map-style datasets: one integer of progress, divided anew in every world.

The order is the plan's shuffle of one row group. Rank r takes every size-th remaining row from r on, so that a step of
B rows per rank is the next B·size rows of the epoch: with a fixed global batch, steps do not depend on the world's
size. `reset` asks for rank and size. Used by one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized

from spark_elastic.data.plan import permutation
from spark_elastic.errors import InvalidInput


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
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.pad = pad
        self.epoch = 0
        self.processed_num = 0
        self._ask_rank, self._ask_size = rank, size
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch. Call it at the end of the last one, so that a new world does not repeat a finished epoch."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Count a step as processed on all ranks; `batch_size` is the loader's setting, the same on every rank."""
        if batch_size < 1:
            raise InvalidInput(
                f"record_batch was given a batch of {batch_size} rows: give the loader's batch_size."
            )
        self.processed_num = min(len(self.dataset), self.processed_num + batch_size * self.num_replicas)

    def state_dict(self) -> dict[str, int]:
        """The progress; the same on every rank between two steps."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: Mapping[str, int]) -> None:
        """Take over progress, and this world's rank and size."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide the remaining rows of the epoch over the current world."""
        self.rank, self.num_replicas = self._ask_rank(), self._ask_size()
        if not 0 <= self.rank < self.num_replicas:
            raise InvalidInput(f"Rank {self.rank} is not in a world of {self.num_replicas}.")
        rows = len(self.dataset)
        order = permutation(rows, self.seed, self.epoch, 0).tolist() if self.shuffle else list(range(rows))
        self.remaining_indices: list[int] = order[self.processed_num :]
        shared = list(self.remaining_indices)
        while self.pad and len(shared) % self.num_replicas:  # cycling: there may be fewer rows than ranks
            shared += self.remaining_indices[: -len(shared) % self.num_replicas]
        self.total_size = len(shared)
        self._mine = shared[self.rank :: self.num_replicas]
        self.num_samples = len(self._mine)

    def __iter__(self) -> Iterator[int]:
        return iter(self._mine)

    def __len__(self) -> int:
        return len(self._mine)
