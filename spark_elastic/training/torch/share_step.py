"""A step in bitwise mode: computed by virtual shares, whose results are brought together alike in every world.

Which rows a share has, the numbers that it draws and the buffers that it begins with do not depend on the rank that
computes it. Gradients are added in the tree of `gradients.share_tree`. Losses and buffers of all shares are gathered by
every rank and added one after the other. Main thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from elastic_collectives import Group
from spark_elastic.data.loader import StepRows
from spark_elastic.data.plan import compute_share_bounds
from spark_elastic.gradients.devices import CPU, HostSum
from spark_elastic.gradients.generators import seeded_rng
from spark_elastic.training.batch import LocalBatch
from spark_elastic.training.torch.determinism import is_aligned
from spark_elastic.training.torch.forward import (
    Attributes,
    BufferSnapshot,
    copy_attributes,
    restore_attributes,
)
from spark_elastic.training.torch.share_check import GradientDigest, ShareCheck, ShareChecker
from spark_elastic.training.torch.spec import BatchBuilder
from spark_elastic.training.torch.step import TrainStep
from spark_elastic.training.torch.step_loss import StepLoss

Floats = npt.NDArray[np.float64]


class ShareStep(TrainStep):
    """Takes steps whose batches have virtual shares."""

    checker: ShareChecker | None = None  # has some shares computed by several ranks; None: no share is
    _attributes: Attributes  # of the model's parts, as the newest share left them

    def _compute_gradients(
        self, group: Group, batch: LocalBatch[torch.Tensor], before: BufferSnapshot
    ) -> tuple[float, float]:
        position, config = self._state.position, self._config
        self._loss_fn.begin(group, batch, position)
        self._ledger.write_ahead(group.fence, position, batch.row_ids)
        step_loss, of_all = self._step_loss, (HostSum(), 0.0)
        if step_loss is not None:
            of_all = self._compute_from_shares(step_loss, group, batch, before)
        check, digest = None, GradientDigest()
        if self.checker is not None and batch.division is not None:
            check = self.checker.draw(position, batch.division)
        if check is not None and group.rank in check.witnesses:
            self._witness(check, digest, batch.planned, before)
        self._exchange.clear_and_begin(group, 0, batch.division)
        self._buffers.begin()
        losses = []
        for number, share in enumerate(batch.shares, batch.first_share):
            parts = list(share.micro_batches(config.data.batch_size))
            is_checked = check is not None and check.share == number
            self._exchange.begin_share(len(parts), digest.add if is_checked else None)
            losses.append(self._backward_share(parts, number, batch.planned))
            self._exchange.end_share()
            if is_checked:
                digest.loss = losses[-1][0].compute(), losses[-1][1]
            self._buffers.take(before, number, len(share) / batch.planned, keep=True)
            self._attributes = copy_attributes(self._modules)
            before.restore()
        self.on_launched()
        self._worked = self.work.take()
        self._exchange.finish()
        if check is not None:
            assert self.checker is not None
            takes_part = group.rank in (check.owner, *check.witnesses)
            self.checker.judge(check, group, digest if takes_part else None)
        if step_loss is not None:
            return of_all[0].compute(), of_all[1]
        own = [(loss.compute(), denominator) for loss, denominator in losses]
        total, denominator = sum_over_shares(group, own)
        # All ranks have the same sums, so the step summary has them once.
        return (total, denominator) if group.rank == 0 else (0.0, 0.0)

    def _compute_from_shares(
        self, step_loss: StepLoss, group: Group, batch: LocalBatch[torch.Tensor], before: BufferSnapshot
    ) -> tuple[HostSum, float]:
        """The loss of all rows, of outputs for which each share begins with the buffers before the step."""
        step_loss.begin()
        for number, share in enumerate(batch.shares, batch.first_share):
            self._run_parts(list(share.micro_batches(self._config.data.batch_size)), number, step_loss.add)
            before.restore()
        return step_loss.compute(group, batch, self._key, self._metrics, self._scaling.backward, self.work)

    def _backward_share(
        self, parts: Sequence[LocalBatch[torch.Tensor]], number: int, planned: int
    ) -> tuple[HostSum, float]:
        """`_backward` of a share. planned: rows of the step."""
        if self._step_loss is None:
            with seeded_rng(*self._key, number):
                return self._backward(parts)
        self._step_loss.seek(compute_share_bounds(planned, self._config.exchange.shares, number)[0])
        self._run_parts(parts, number, self._step_loss.backward)
        return HostSum(), 0.0

    def _witness(
        self, check: ShareCheck, digest: GradientDigest, planned: int, before: BufferSnapshot
    ) -> None:
        """Compute another rank's share, of which nothing but the digest stays."""
        assert self.checker is not None
        self._exchange.clear()
        share, step_loss = self.checker.read(check, self._state.position), self._step_loss
        if step_loss is not None:
            step_loss.compares = True
        parts = list(share.micro_batches(self._config.data.batch_size))
        loss, denominator = self._backward_share(parts, check.share, planned)
        digest.loss = loss.compute(), denominator
        if step_loss is None:
            self._metrics.discard()
        elif step_loss.differs:  # in what its owner has sent to all
            digest.loss = 1.0, 0.0
        for index, parameter in enumerate(self._exchange.parameters):
            digest.add(index, parameter.grad)
        before.restore()

    def _exchange_buffers(
        self, group: Group, batch: LocalBatch[torch.Tensor], before: BufferSnapshot
    ) -> bool:
        def reduce(tensors: list[torch.Tensor], op: str) -> torch.Tensor:
            gathered = np.concatenate(group.allgatherv(torch.stack(tensors).numpy()))
            return torch.from_numpy(_sum_rows(gathered) if op == "sum" else gathered.max(axis=0))

        rows = next((share for share in batch.shares if len(share)), batch)
        self._buffers.exchange(group, before, rows, self._try, reduce)
        return True

    def _apply_buffers(self) -> None:
        super()._apply_buffers()
        restore_attributes(self._modules, self._attributes)


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
