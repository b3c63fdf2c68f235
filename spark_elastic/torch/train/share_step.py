"""A step in bitwise mode: computed by virtual shares, whose results are brought together alike in every world.

Which rows a share has, the numbers that it draws and the buffers that it begins with do not depend on the rank that
computes it. Gradients are added in the tree of `gradients.share_tree`. Losses and buffers of all shares are gathered by
every rank and added one after the other. Main thread only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from elastic_collectives import Group
from spark_elastic.data.loader import StepRows
from spark_elastic.data.plan import compute_share_bounds
from spark_elastic.torch.determinism import is_aligned
from spark_elastic.torch.devices import CPU
from spark_elastic.torch.generators import seeded_rng
from spark_elastic.torch.train.forward import BufferSnapshot, has_buffers
from spark_elastic.torch.train.share_check import GradientDigest, ShareCheck, ShareChecker
from spark_elastic.torch.train.spec import BatchBuilder
from spark_elastic.torch.train.step import TrainStep
from spark_elastic.training.batch import LocalBatch

Floats = npt.NDArray[np.float64]


class ShareStep(TrainStep):
    """Takes steps whose batches have virtual shares."""

    # Has some shares computed by several ranks; None: no share is.
    checker: ShareChecker | None = None

    def _compute_gradients(
        self, group: Group, batch: LocalBatch[torch.Tensor], before: BufferSnapshot
    ) -> tuple[float, float]:
        position, config = self._state.position, self._config
        self._loss_fn.begin(group, batch, position)
        check, digest = None, GradientDigest()
        if self.checker is not None and batch.division is not None:
            check = self.checker.draw(position, batch.division)
        if check is not None and group.rank in check.witnesses:
            self._witness(check, digest, before)
        self._exchange.begin(group, 0, batch.division)
        self._ledger.write_ahead(group.fence, position, batch.row_ids)
        self._written = WrittenBuffers(self._state.model) if has_buffers(self._modules) else None
        losses = []
        for number, share in enumerate(batch.shares, batch.first_share):
            parts = list(share.micro_batches(config.batch_size))
            is_checked = check is not None and check.share == number
            self._exchange.begin_share(len(parts), digest.add if is_checked else None)
            with seeded_rng(config.seed, position.epoch, position.phase, position.step, number):
                losses.append(self._backward(parts))
            self._exchange.end_share()
            if is_checked:
                digest.loss = losses[-1][0].compute(), losses[-1][1]
            if self._written is not None:
                self._written.take(before, len(share) / batch.planned)
        self.on_launched()
        self._worked = self.work.take()
        self._exchange.finish()
        if check is not None:
            assert self.checker is not None
            takes_part = group.rank in (check.owner, *check.witnesses)
            self.checker.judge(check, group, digest if takes_part else None)
        own = [(loss.compute(), denominator) for loss, denominator in losses]
        total, denominator = sum_over_shares(group, own)
        # All ranks have the same sums, so the step summary has them once.
        return (total, denominator) if group.rank == 0 else (0.0, 0.0)

    def _witness(self, check: ShareCheck, digest: GradientDigest, before: BufferSnapshot) -> None:
        """Compute another rank's share, of which nothing but the digest stays."""
        assert self.checker is not None
        position, config = self._state.position, self._config
        self._exchange.clear()
        share = self.checker.read(check, position)
        with seeded_rng(config.seed, position.epoch, position.phase, position.step, check.share):
            loss, denominator = self._backward(list(share.micro_batches(config.batch_size)))
        digest.loss = loss.compute(), denominator
        for index, parameter in enumerate(self._exchange.parameters):
            digest.add(index, parameter.grad)
        self._metrics.discard()
        before.restore()

    def _exchange_buffers(
        self, group: Group, batch: LocalBatch[torch.Tensor], before: BufferSnapshot
    ) -> bool:
        if self._written is not None:
            self._written.exchange(group)
        return self._written is not None

    def _apply_buffers(self) -> None:
        assert self._written is not None
        self._written.apply()


class WrittenBuffers:
    """The buffers that the shares of a step wrote, each from those before the step. As `BufferExchange`, floating point
    buffers become the mean weighted by rows, integer and boolean ones the maximum; complex ones stay."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._factors: list[float] = []
        # By share: the buffers that it wrote, by name.
        self._written: list[Mapping[str, torch.Tensor]] = []
        self._results: dict[str, torch.Tensor] = {}

    def take(self, before: BufferSnapshot, factor: float) -> None:
        """Keep what the newest share wrote, and put the buffers before the step back. factor: of the share in means."""
        self._factors.append(factor)
        named = list(self._list())
        changed = before.find_changed(named)
        self._written.append(
            {name: buffer.clone() for (name, buffer), flag in zip(named, changed, strict=True) if flag}
        )
        before.restore()

    def exchange(self, group: Group) -> None:
        """Bring the shares of all ranks together; collective."""
        buffers = dict(self._list())
        own = np.array([[name in written for name in buffers] for written in self._written])
        changed = np.concatenate(group.allgatherv(own.astype(np.uint8))).max(axis=0).tolist()
        names = [name for name, flag in zip(buffers, changed, strict=True) if flag]
        for floats in (True, False):
            chosen = [name for name in names if buffers[name].is_floating_point() == floats]
            if chosen:
                self._reduce(group, {name: buffers[name] for name in chosen}, floats)

    def apply(self) -> None:
        buffers = dict(self._list())
        with torch.no_grad():
            for name, result in self._results.items():
                buffers[name].copy_(result)

    def _reduce(self, group: Group, buffers: Mapping[str, torch.Tensor], floats: bool) -> None:
        dtype = torch.float64 if floats else torch.int64
        rows = []
        for written, factor in zip(self._written, self._factors, strict=True):
            values = [written.get(name, buffer).to(dtype).reshape(-1) for name, buffer in buffers.items()]
            row = torch.cat(values)
            if floats:  # zeros, not values times zero, which are NaN where a mask holds infinities
                row = row * factor if factor else torch.zeros_like(row)
            rows.append(row.cpu().numpy())
        gathered = np.concatenate(group.allgatherv(np.stack(rows)))
        whole = torch.from_numpy(_sum_rows(gathered) if floats else gathered.max(axis=0))
        parts = torch.split(whole, [buffer.numel() for buffer in buffers.values()])
        for (name, buffer), part in zip(buffers.items(), parts, strict=True):
            self._results[name] = part.view(buffer.shape)

    def _list(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, each) for name, each in self._model.named_buffers() if not each.is_complex())


def sum_over_shares(group: Group, own: Sequence[Sequence[float]]) -> list[float]:
    """The sums of some numbers of each share over all shares, one after the other. Collective.

    Args:
        own: of this rank's shares, in order.
    """
    total: list[float] = _sum_rows(np.concatenate(group.allgatherv(np.array(own, np.float64)))).tolist()
    return total


def _sum_rows(rows: Floats) -> Floats:
    total: Floats = rows[0].copy()
    for row in rows[1:]:
        total += row
    return total


def build_shares(builder: BatchBuilder, rows: StepRows, rank: int) -> LocalBatch[torch.Tensor]:
    """The batch of this rank, with a batch for each of its virtual shares, which begins at the same alignment on every
    rank."""
    shares, (first, past) = rows.division.cuts[-1], rows.division.get_rank_parts(rank)
    start = compute_share_bounds(rows.planned, shares, first)[0]
    parts = []
    for share in range(first, past):
        low, high = (bound - start for bound in compute_share_bounds(rows.planned, shares, share))
        columns = {name: column[low:high].copy() for name, column in rows.columns.items()}
        parts.append(_align(builder.build(replace(rows, row_ids=rows.row_ids[low:high], columns=columns))))
    return LocalBatch(rows.planned, rows.row_ids, (), (), None, tuple(parts), first, rows.division)


def _align(batch: LocalBatch[torch.Tensor]) -> LocalBatch[torch.Tensor]:
    def align(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.device != CPU or is_aligned(tensor) else tensor.clone()

    return replace(
        batch,
        features=tuple(map(align, batch.features)),
        labels=tuple(map(align, batch.labels)),
        weights=None if batch.weights is None else align(batch.weights),
    )
