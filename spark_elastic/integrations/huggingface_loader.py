"""The rows of a Hugging Face Trainer in any world: what its own loader decides, as an `ElasticDataLoader`.

Data set, collator, settings of torch's DataLoader and the order are the Trainer's. A batch sampler, such as those of
Sentence Transformers, decides the rows of each step; what depends on the rank or cannot be repeated is refused by its
name. Training thread only.
"""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.row_dataset import RowDataset
from spark_elastic.estimators.rows import Rows
from spark_elastic.gradients.generators import seeded_rng
from spark_elastic.handwritten.data_loader import ElasticDataLoader
from spark_elastic.handwritten.session import get_session

log = logging.getLogger(__name__)

# What torch's DataLoader keeps under the names of its arguments.
_KEPT: tuple[str, ...] = ("collate_fn", "num_workers", "timeout", "worker_init_fn", "multiprocessing_context")
_KEPT += ("prefetch_factor", "persistent_workers", "in_order")  # the last since torch 2.6


def make_elastic_loader(
    theirs: Any, global_batch_size: int, seed: int, determinism: str | None
) -> ElasticDataLoader:
    """theirs: the Trainer's, whose batches have `global_batch_size` rows. Refuses one that chooses rows, or puts them
    together, in a way that another world could not repeat."""
    kind = type(theirs)
    iterates = next((parent for parent in kind.__mro__ if "__iter__" in vars(parent)), kind)
    package = iterates.__module__.partition(".")[0]
    if not isinstance(theirs, DataLoader) or package not in ("torch", "accelerate"):
        raise InvalidInput(
            f"get_train_dataloader() returns a {kind.__name__}, which gives batches in a way of its own: return a "
            "torch DataLoader with its data set, collate_fn and sampler."
        )
    dataset, batches = theirs.dataset, theirs.batch_sampler
    while type(dataset).__module__.startswith("accelerate."):
        dataset = dataset.dataset  # type: ignore[attr-defined] # that of a rank
    batches = getattr(batches, "batch_sampler", batches)  # within Accelerate's, of one rank
    options = {name: getattr(theirs, name) for name in _KEPT if hasattr(theirs, name)}
    options |= {"pin_memory": theirs.pin_memory and torch.cuda.is_available(), "determinism": determinism}
    options |= {"drop_last": getattr(batches, "drop_last", False)}
    sampler = getattr(batches, "sampler", None)
    if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):  # others are refused below
        if hasattr(batches, "set_epoch") and not _is_plain(batches):
            return SampledDataLoader(dataset, batches, global_batch_size, seed, **options)
        _check_sampler(batches, sampler, len(dataset))
    shuffle = not isinstance(sampler, SequentialSampler)
    return ElasticDataLoader(dataset, global_batch_size, seed, shuffle, **options)


def initialize_on_rows(initialize: Any, table: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Call a Trainer's `__init__` on rows of a table, its argument `train_dataset`. Returns the data set to train on.

    TRL's classes take a `datasets.Dataset` only: they get one that reads these rows, and keep what they make of it.
    """
    rows = table.dataset() if isinstance(table, Rows) else table
    shown = rows
    if any(kind.__module__.startswith("trl.") for kind in type(initialize.__self__).__mro__):
        shown = _make_hugging_face_dataset(rows)
    bound = inspect.signature(initialize).bind(*args, **options)
    bound.arguments["train_dataset"] = shown
    initialize(*bound.args, **bound.kwargs)
    prepared = initialize.__self__.train_dataset
    return rows if prepared is shown else prepared


def _make_hugging_face_dataset(rows: RowDataset) -> Any:
    datasets = importlib.import_module("datasets")

    def read(batch: dict[str, list[int]]) -> dict[str, list[Any]]:
        items = rows.__getitems__(batch["row"])
        return {name: [item[name] for item in items] for name in items[0]}

    return datasets.Dataset.from_dict({"row": np.arange(len(rows))}).with_transform(read)


def _is_plain(batches: Any) -> bool:
    return getattr(type(batches), "__iter__", None) is BatchSampler.__iter__


def _check_sampler(batches: Any, sampler: Any, rows: int) -> None:
    is_plain = _is_plain(batches)
    name = type(sampler if is_plain else batches).__name__
    if is_plain and isinstance(sampler, RandomSampler | SequentialSampler):
        if len(sampler) == rows and not getattr(sampler, "replacement", False):
            return
        name = f"{name} that does not take each of the {rows} rows once"
    raise InvalidInput(
        f"ElasticTrainer takes each row once per epoch, in any world, and this Trainer's loader has a {name}: leave "
        "samplers as they are by default, or give the DataLoader a batch sampler with set_epoch(epoch), as Sentence "
        "Transformers has."
    )


class SampledDataLoader(ElasticDataLoader):
    """An `ElasticDataLoader` whose steps are the batches of a batch sampler, which the ranks divide."""

    _follows_plan = False

    def __init__(self, dataset: Any, sampler: Any, global_batch_size: int, seed: int, **options: Any) -> None:
        """sampler: with batches of `global_batch_size` rows, over all ranks, that follow from `set_epoch`."""
        super().__init__(dataset, global_batch_size, seed, shuffle=False, **options)
        self._sampler = sampler
        self._drawn: tuple[int, list[list[int]]] = 0, self._draw(0)
        if self._draw(0) != self._drawn[1]:
            raise InvalidInput(
                f"{type(sampler).__name__} gives other batches each time it is asked for those of an epoch, so another "
                "worker cannot repeat them: let its set_epoch(epoch) seed whatever it draws from."
            )
        counts = len(self._drawn[1]), len(sampler)
        if counts[0] > counts[1]:  # the Trainer would leave rows out without a word
            log.warning(
                "%s makes %d batches of an epoch, of which the Trainer takes %d, as its len() says: the rows of "
                "the others are left out. For NO_DUPLICATES, lower global_batch_size or remove rows that are alike.",
                *(type(sampler).__name__, *counts),
            )

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        self._check_ranks()
        return super().__iter__()

    def _check_ranks(self) -> None:
        """Ranks that divide different batches would train some rows twice, and others never. Collective."""
        session = get_session()
        if session is None or session.group.size == 1:
            return
        session.wait_until_idle()
        digest = zlib.crc32(json.dumps(self._list_steps()).encode())
        if len({*session.group.allgather(np.array(digest)).tolist()}) > 1:
            raise InvalidInput(
                f"{type(self._sampler).__name__} gives each rank other batches, and ElasticTrainer divides each batch "
                "over the ranks: let it give batches of all ranks."
            )

    def _draw(self, epoch: int) -> list[list[int]]:
        self._sampler.set_epoch(epoch)
        with seeded_rng(self.seed, epoch):
            return [[int(row) for row in batch] for batch in self._sampler]

    def _list_steps(self) -> list[list[int]]:
        if self._drawn[0] != self.epoch:
            self._drawn = self.epoch, self._draw(self.epoch)
        return self._drawn[1]

    def _divide_steps(self, part: int, parts: int) -> Iterator[list[int]]:
        for rows in self._list_steps()[self.step :]:
            yield rows[len(rows) * part // parts : len(rows) * (part + 1) // parts]

    def _count_rows(self) -> int:
        return len(self._list_steps()[self.step])

    def _count_fewest_rows(self) -> int:
        return min(map(len, self._list_steps()), default=0)

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "batch_sampler": type(self._sampler).__name__}
