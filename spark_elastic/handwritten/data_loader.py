"""`ElasticDataLoader`: rows of a table, or a map-style data set, for hand-written loops, by the data plan.

This module decides which rows a step takes, which of them are this rank's, and keeps the position. torch's DataLoader
fetches, collates, pins and runs worker processes; rows of a table are read by threads instead if there are none.
Training thread only; torch's worker processes see data set and indices alone, so they may live on through changes of
the world.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, IterableDataset, default_collate

from spark_elastic.checks import COUNT, FUNCTION, WHOLE, make_choice, make_whole
from spark_elastic.data.plan import (
    DataPlan,
    Division,
    EpochPermutation,
    Int64s,
    compute_rank_shares,
    compute_share_bounds,
    draw_permutation,
    draw_uniform,
)
from spark_elastic.data.row_handle import RowHandle
from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.row_dataset import RowDataset
from spark_elastic.gradients.determinism import align_batch, check_layers, use_deterministic_arithmetic
from spark_elastic.gradients.generators import seeded_rng
from spark_elastic.gradients.process_sets import check_alone, rank, size
from spark_elastic.handwritten.object_state import ObjectState, get_session
from spark_elastic.handwritten.row_batches import RowBatches, RowStream, SeededRows, pass_batch, plan_rows
from spark_elastic.runs.handlers import StateDictHandler
from spark_elastic.worker.context import get_context
from spark_elastic.worker.session import ENTERED, STATE

_BATCH = make_whole(1, wanted="the rows of a step over all ranks, a whole number of 1 or more")
_STEPS_AT_ONCE = 64  # whose indices are computed together
# What the plan decides in place of torch's DataLoader, and what to use instead.
_DECIDED = {
    "batch_size": "global_batch_size",
    "sampler": "shuffle and seed",
    "batch_sampler": "global_batch_size, shuffle and seed",
}


class ElasticDataLoader:
    """Iterating over it gives this rank's batches of the steps that the epoch has still to take, in any world.

    Each row comes once per epoch. Which rows a step takes depends on `seed` and epoch alone, not on the world; each
    rank takes an equal part of them, give or take a row. With R rows, an epoch has ceil(R / global_batch_size) steps
    of equally many rows, give or take one, at most `global_batch_size`.

    A batch counts as taken once the loop has received it, as in torchdata's StatefulDataLoader: commit after the
    optimizer's step. After the last batch the loader continues with the next epoch by itself.
    """

    _follows_plan = True  # whether the rows of a step are those of the plan, which threads can read ahead

    def __init__(  # noqa: PLR0913 - as torch's DataLoader
        self,
        dataset: Any,
        global_batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        determinism: str | None = None,
        virtual_shares: int = 8,
        transformation_fn: Any = None,
        lanes: int | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            dataset: `Rows`: a batch is a dict of tensors (lists of bytes and strings), and the rows of a step are those
                that an estimator takes; or `rows.dataset()`: in the same order, and torch's or your `collate_fn` makes
                batches of rows; or any data set with `__len__` and `__getitem__`, which may have `__getitems__`, as
                those of Hugging Face do.
            global_batch_size: rows of a step over all ranks.
            seed: of the order of the rows; the same on all ranks.
            shuffle: False keeps the order of the data set.
            drop_last: all steps have exactly `global_batch_size` rows; the rows left over, others in each epoch if
                shuffled, are left out.
            determinism: "rows": what the data set draws for a row from the generators of torch, numpy and Python
                depends on `seed`, epoch and row alone, so that random transforms do not depend on the world.
                "bitwise": iterating gives `StepShares`, and the process computes deterministically from now on, with
                one thread for each operation. Pass the loader to `DistributedOptimizer`.
            virtual_shares: parts that each step is cut into in bitwise mode; at least as many as there will be workers.
            transformation_fn: of `Rows`, a function of columns (a dict of arrays), or of (columns, rng), as an
                estimator's; it returns the columns of the batch.
            lanes: of `Rows`, how many row groups a step takes rows of; None: 16, or fewer where memory is short.
            options: those of torch's DataLoader: num_workers, collate_fn, pin_memory, persistent_workers, ...

        Raises:
            InvalidInput: an argument is wrong.
        """
        rows = dataset.rows if isinstance(dataset, RowDataset) else dataset
        table = rows if isinstance(rows, RowHandle) else None  # whose rows are read
        if table is None and not (transformation_fn is lanes is None):
            name = "lanes" if transformation_fn is None else "transformation_fn"
            raise InvalidInput(f"{name} goes with Rows, not with a {type(dataset).__name__}: leave it out.")
        if table is None and (isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")):
            raise InvalidInput(
                f"ElasticDataLoader reads rows by their number, which {type(dataset).__name__} does not offer: pass a "
                "map-style data set, with __len__ and __getitem__."
            )
        for name in _DECIDED.keys() & options:
            raise InvalidInput(f"ElasticDataLoader takes no {name}: use {_DECIDED[name]}.")
        if options.get("in_order") is False:
            raise InvalidInput(
                "ElasticDataLoader needs in_order=True: batches that overtake others have no position."
            )
        self.determinism = make_choice("rows", "bitwise").or_none()("determinism", determinism)
        # Parts that each step is cut into in bitwise mode; 0: the ranks divide its rows.
        self.virtual_shares = COUNT("virtual_shares", virtual_shares) if determinism == "bitwise" else 0
        self.dataset = dataset
        self.global_batch_size = _BATCH("global_batch_size", global_batch_size)
        self.seed = WHOLE("seed", seed)
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.epoch = 0  # the one under way
        self.step = 0  # its batches that the loop has received on each rank
        self._rows = len(dataset)
        if table is not None:
            lanes = COUNT.or_none()("lanes", lanes)
            self._plan = plan_rows(table, global_batch_size, self.seed, shuffle, drop_last, lanes)
        else:
            # A map-style data set reads any row at once: one row group, one lane, and an order of its own.
            plan = DataPlan((self._rows,), global_batch_size, self.seed, lanes=1, shuffle=False)
            self._plan = replace(plan, drop_last=drop_last)
        if self.virtual_shares > self._plan.base_rows:
            raise InvalidInput(
                f"a step of {self._plan.base_rows} rows cannot be cut into virtual_shares={self.virtual_shares}: raise "
                f"global_batch_size, which is {global_batch_size}, or lower virtual_shares."
            )
        # Each a `GradientSync`, which is told the virtual shares.
        self._synced: weakref.WeakSet[Any] = weakref.WeakSet()
        if self.virtual_shares:
            use_deterministic_arithmetic()
        # The order of an epoch's rows, and their division into steps.
        self._order: tuple[int, Int64s | None, EpochPermutation] | None = None
        # (rows of this rank, rows of all ranks, ranks) of the batch that the loop received last.
        self._batch_rows: tuple[int, int, int] | None = None
        self._iteration: weakref.ref[_Iteration] | None = None
        self._generator = None if options.get("generator") is not None else torch.Generator()
        # The rows of a table that threads read ahead; None: torch's DataLoader fetches.
        self._stream: RowStream | None = None
        self._table: RowBatches | None = None
        read = dataset
        if table is not None:
            collate = options.pop("collate_fn", None)
            if collate is None and isinstance(dataset, RowDataset):
                collate = default_collate
            function = FUNCTION.or_none()("transformation_fn", transformation_fn)
            read = self._table = RowBatches(table, self.seed, function, collate, determinism)
            options["collate_fn"] = pass_batch
        elif determinism is not None:
            read = SeededRows(dataset, self.seed, determinism)
        options = {"generator": self._generator, **options}
        self._batches = DataLoader(read, batch_sampler=_BatchSampler(self), **options)

    def __len__(self) -> int:
        """The steps of a whole epoch, in any world."""
        return self._plan.steps

    def __iter__(self) -> Iterator[Any]:
        """The rest of the epoch. One iteration is under way at a time: another one takes over from where it stands."""
        self._check_world()
        self.reset()
        own, ranks = _find_place()
        if self._generator is not None:  # torch seeds its worker processes by it
            uniform = draw_uniform(np.array([own]), 1, self.seed, self.epoch, self.step)
            self._generator.manual_seed(int(uniform[0, 0] * 2**53))
        kind = _ShareIteration if self.virtual_shares else _Iteration
        batches = self._open_batches(own, ranks) if self.step < len(self) else iter(())
        iteration = kind(self, batches, own, ranks)
        self._iteration = weakref.ref(iteration)
        return iteration

    @property
    def global_rows(self) -> int:
        """The rows, over all ranks, of the step whose batch the loop received last."""
        return self._get_batch_rows()[1]

    @property
    def loss_weight(self) -> float:
        """What to multiply the mean loss of the newest batch by, before `backward()`.

        This rank's rows times the number of ranks, divided by the step's rows: 1.0 where all ranks have equally many.
        The average over the ranks is then the mean over the step's rows, whatever the world's size.
        """
        mine, planned, ranks = self._get_batch_rows()
        return mine * ranks / planned

    def attach_sync(self, sync: Any) -> None:
        """Tell an optimizer's synchronization of each virtual share from now on."""
        self._synced.add(sync)

    def set_epoch(self, epoch: int) -> None:
        """Go on to an epoch; does nothing in that epoch.

        Raises:
            InvalidInput: the epoch is over.
        """
        if epoch < self.epoch:
            raise InvalidInput(
                f"set_epoch({epoch}) was called in epoch {self.epoch}: the function begins again in each world, so "
                "keep the epoch in the state, or count by the loader's own epoch."
            )
        if epoch > self.epoch:
            self.reset()
            self.epoch, self.step = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        """The position, and the settings that it belongs to; the same on every rank between two steps."""
        return {"epoch": self.epoch, "step": self.step, **self._settings()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a position. An iteration under way is over.

        Raises:
            InvalidInput: it belongs to other rows or other settings.
        """
        for name, mine in {"epoch": 0, "step": 0, **self._settings()}.items():
            if name not in state_dict:
                raise InvalidInput(
                    f"the position of an ElasticDataLoader has {name!r}: pass what state_dict() returned."
                )
            if name in self._settings() and state_dict[name] != mine:
                raise InvalidInput(
                    f"the ElasticDataLoader's position belongs to {name}={state_dict[name]}, and this one has "
                    f"{name}={mine}, which divides epochs otherwise: make the same loader on each worker and in each "
                    "run."
                )
        self.reset()
        self.epoch, self.step = int(state_dict["epoch"]), int(state_dict["step"])

    def reset(self) -> None:
        """End the iteration under way, as the world may have changed, and its worker processes unless they are
        persistent. The position stays."""
        iteration = None if self._iteration is None else self._iteration()
        self._iteration = None
        if iteration is not None:
            iteration.close()

    def _open_batches(self, own: int, ranks: int) -> Iterator[Any]:
        """The batches of a rank from the position on; in bitwise mode one for each of its virtual shares."""
        if self._table is None or self._batches.num_workers or not self._follows_plan:
            return iter(self._batches)
        if self._stream is None:
            self._stream = self._table.open_stream(self._plan)
        shares = self.virtual_shares
        division = Division.equal(ranks, shares)
        mine = range(*division.get_rank_parts(own)) if shares else range(0)
        batches = self._stream(self.epoch, self.step, own, division, mine)
        if not (self._batches.pin_memory and torch.cuda.is_available()):
            return batches
        return (tree_map_only(torch.Tensor, torch.Tensor.pin_memory, batch) for batch in batches)

    def _settings(self) -> dict[str, Any]:
        table = self._table
        of_table = {} if table is None else {"data": table.rows.manifest.hash, "lanes": self._plan.lanes}
        names = ["global_batch_size", "seed", "shuffle", "drop_last"]
        names += ["virtual_shares"] if self.virtual_shares else []
        return {"rows": self._rows, **of_table, **{name: getattr(self, name) for name in names}}

    def _get_batch_rows(self) -> tuple[int, int, int]:
        if self._batch_rows is None:
            raise InvalidInput(
                "the ElasticDataLoader has given no batch yet: ask inside the loop over it, or over a step's shares."
            )
        return self._batch_rows

    def _check_world(self) -> None:
        _, ranks = _find_place()
        fewest = self._count_fewest_rows()
        if ranks > fewest:
            raise InvalidInput(
                f"a step of {fewest} rows cannot be divided over {ranks} workers: raise global_batch_size, which is "
                f"{self.global_batch_size}, leave an incomplete last step out by drop_last, or lower max_workers."
            )
        if self.virtual_shares and ranks > self.virtual_shares:
            raise InvalidInput(
                f"a step of {self.virtual_shares} virtual shares cannot be divided over {ranks} workers: raise "
                "virtual_shares to max_workers."
            )
        session = get_session()
        if session is None or not session.process_values.get(ENTERED):
            return
        state = session.process_values[STATE]
        if isinstance(state, ObjectState) and self not in state:
            raise InvalidInput(
                "the ElasticDataLoader is not in the state, so a new world would not know its position: pass it, as in "
                "TorchState(model, optimizer, loader=loader)."
            )
        for value in vars(state).values() if self.virtual_shares else ():
            if isinstance(value, torch.nn.Module):
                check_layers(value, keeps_buffers=False)

    def _divide_steps(self, part: int, parts: int) -> Iterator[list[int]]:
        """The rows of one of so many equal parts, of each step from the position on."""
        return _divide(self._plan, *self._order_epoch(), self.step, part, parts)

    def _count_rows(self) -> int:
        """Rows, over all ranks, of the step at the position."""
        return self._plan.count_step_rows(self.step)

    def _count_fewest_rows(self) -> int:
        return self._plan.base_rows

    def _order_epoch(self) -> tuple[Int64s | None, EpochPermutation]:
        """The order of this epoch's rows (None: the plan has it), and the steps' places in it; kept, as new worlds ask
        again."""
        if self._order is None or self._order[0] != self.epoch:
            is_shuffled = self.shuffle and self._table is None
            order = draw_permutation(self._rows, self.seed, self.epoch, 0) if is_shuffled else None
            self._order = self.epoch, order, self._plan.permute_epoch(self.epoch)
        return self._order[1:]


class DataLoaderStateHandler(StateDictHandler):
    """An `ElasticDataLoader`. All ranks have one position, unlike those of samplers."""

    def sync(self) -> None:
        self.value.reset()

    def reset(self) -> None:
        self.value.reset()


class _BatchSampler:
    """For torch's DataLoader, which runs ahead of the loop: the indices of this rank's batches from the position on,
    after the key that `RowBatches` and `SeededRows` take."""

    def __init__(self, loader: ElasticDataLoader) -> None:
        self._loader = weakref.ref(loader)  # the loader has torch's DataLoader, which has this

    def __iter__(self) -> Iterator[list[int]]:
        loader = self._loader()
        assert loader is not None
        place, ranks = _find_place()
        epoch, shares = loader.epoch, loader.virtual_shares
        if not shares:
            rows = loader._divide_steps(place, ranks)
            is_plain = loader.determinism is None and loader._table is None
            return rows if is_plain else ([epoch, *of_step] for of_step in rows)
        own = range(*compute_rank_shares(shares, place, ranks))
        parts = [loader._divide_steps(share, shares) for share in own]
        steps = enumerate(zip(*parts, strict=True), loader.step)
        return (
            [epoch, step, share, *rows] for step, of in steps for share, rows in zip(own, of, strict=True)
        )


class _Iteration(Iterator[Any]):
    def __init__(self, loader: ElasticDataLoader, batches: Iterator[Any], own: int, ranks: int) -> None:
        self._loader = loader
        self._batches: Iterator[Any] | None = batches  # None: over
        self._rank, self._ranks = own, ranks
        self._is_complete = False

    def __next__(self) -> Any:
        if self._is_complete:
            raise StopIteration
        loader = self._loader
        try:
            batch = self.fetch()
        except StopIteration:
            self._end_epoch()
            raise
        planned = loader._count_rows()
        mine = planned * (self._rank + 1) // self._ranks - planned * self._rank // self._ranks
        loader._batch_rows = mine, planned, self._ranks
        loader.step += 1
        return batch

    def fetch(self) -> Any:
        if self._batches is None:
            raise InvalidInput(
                "the ElasticDataLoader's position or world changed in the middle of a loop over it: begin another "
                "loop, which continues from the present position."
            )
        return next(self._batches)

    def _end_epoch(self) -> None:
        self._is_complete = True
        self.close()
        self._loader.epoch, self._loader.step = self._loader.epoch + 1, 0

    def close(self) -> None:
        batches, self._batches = self._batches, None
        if isinstance(batches, Generator):
            batches.close()


class _ShareIteration(_Iteration):
    _newest: StepShares | None = None

    def __next__(self) -> StepShares:
        loader = self._loader
        if self._is_complete:
            raise StopIteration
        if self._newest is not None and not self._newest.is_complete:
            raise InvalidInput(
                "the loop over a loader with determinism='bitwise' went on before the last virtual share of a step: "
                "take all batches of `for batch in shares`."
            )
        if loader.step == len(loader):
            if self._batches is not None:
                next(self._batches, None)  # a stream ends, and reads the next epoch
            self._end_epoch()
            raise StopIteration
        loader._batch_rows = None
        own = compute_rank_shares(loader.virtual_shares, self._rank, self._ranks)
        self._newest = StepShares(loader, self, own)
        loader.step += 1
        return self._newest


class StepShares:
    """This rank's virtual shares of one step, in bitwise mode: iterating over it, once, gives a batch for each.

    Inside, random numbers depend on seed, epoch, step and share; backward passes count for the share. Then the
    optimizer's `step()` adds the gradients of all shares of all ranks.
    """

    def __init__(self, loader: ElasticDataLoader, iteration: _Iteration, own: tuple[int, int]) -> None:
        self._loader, self._iteration, self._own = loader, iteration, own
        self._key = loader.seed, loader.epoch, loader.step
        self._planned = loader._plan.count_step_rows(loader.step)
        self._is_begun = False
        self.is_complete = False  # whether all shares were taken

    def __len__(self) -> int:
        return self._own[1] - self._own[0]

    def __iter__(self) -> Iterator[Any]:
        loader = self._loader
        if self._is_begun:
            raise InvalidInput("the virtual shares of a step were taken already: go on to the next step.")
        if not loader._synced:
            raise InvalidInput(
                "no optimizer knows of the virtual shares: DistributedOptimizer(optimizer, named_parameters, "
                "loader=loader)."
            )
        self._is_begun = True
        for share in range(*self._own):
            batch = align_batch(self._iteration.fetch())
            low, high = compute_share_bounds(self._planned, loader.virtual_shares, share)
            for sync in loader._synced:
                sync.begin_share()
            loader._batch_rows = high - low, self._planned, 1
            with seeded_rng(*self._key, share):
                yield batch
            loader._batch_rows = None
            for sync in loader._synced:
                sync.end_share()
        self.is_complete = True


def _divide(
    plan: DataPlan, order: Int64s | None, epoch: EpochPermutation, step: int, rank: int, size: int
) -> Iterator[list[int]]:
    """A rank's indices of each step from `step` on. order: of all rows; None: the plan's places are their numbers."""
    while step < plan.steps:
        count = min(_STEPS_AT_ONCE, plan.count_equal_steps(step))
        block = epoch.assign_block(step, count, rank, Division.equal(size))
        runs = [[plan.group_offsets[group] + rows for group, rows in lane.runs] for lane in block.lanes]
        by_lane = zip(runs, block.lanes, strict=True)
        lanes = [np.concatenate(own).reshape(count, lane.width) for own, lane in by_lane]
        places = np.concatenate(lanes, axis=1)
        yield from (places if order is None else order[places]).tolist()
        step += count


def _find_place() -> tuple[int, int]:
    """Rank and size: of the world, or of torch's process group in a program that was started otherwise."""
    if get_context() is None and dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    check_alone("ElasticDataLoader", "call torch.distributed.init_process_group before its first batch")
    return rank(), size()
