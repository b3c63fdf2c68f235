"""A step in bitwise mode: computed by virtual shares, whose results are brought together alike in every world.

A share's rows, random numbers and first buffers do not depend on the rank that computes it. Gradients are added in the
tree of `gradients.share_mode`; losses and buffers of all shares are gathered, and added one after the other.

Against silent corruption other ranks, drawn by all from the position, compute a share, too, now and then, from rows
that they read themselves, and compare the bits of its gradients, before the step is applied. Main thread only.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from elastic_collectives import Group
from spark_elastic.data.loader import StepRows
from spark_elastic.data.plan import Division, compute_share_bounds, draw_permutation
from spark_elastic.data.transformation import BatchTransformation, RowBatch
from spark_elastic.gradients.determinism import align_batch
from spark_elastic.gradients.devices import HostSum
from spark_elastic.gradients.generators import seeded_rng
from spark_elastic.gradients.module_state import view_bytes
from spark_elastic.protocol.types import Position
from spark_elastic.training.batch import LocalBatch
from spark_elastic.training.spec import TrainSpec
from spark_elastic.training.torch.buffers import (
    Attributes,
    BufferSnapshot,
    copy_attributes,
    restore_attributes,
)
from spark_elastic.training.torch.loss import Batch
from spark_elastic.training.torch.spec import BatchBuilder
from spark_elastic.training.torch.step import StepLoss, TrainStep
from spark_elastic.training.trainer import StepDisputed
from spark_elastic.worker.context import get_context

MAX_WITNESSES = 2  # one shows a difference, the second decides who is wrong


class ShareCheck(NamedTuple):
    share: int  # its number among the step's shares
    owner: int  # the rank whose share it is
    witnesses: tuple[int, ...]  # one or two ranks that compute it, too


class GradientDigest:
    """A hash of the gradients and the loss of one virtual share."""

    def __init__(self) -> None:
        self._gradients: dict[int, bytes] = {}  # by parameter
        self.loss: tuple[float, float] = 0.0, 0.0

    def add(self, index: int, gradient: Tensor | None) -> None:
        if gradient is None:
            return
        dense = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
        self._gradients[index] = hashlib.sha256(view_bytes(dense)[0].data).digest()

    def digest(self) -> bytes:
        whole = hashlib.sha256(struct.pack("<dd", *self.loss))
        for index in sorted(self._gradients):
            whole.update(struct.pack("<q", index) + self._gradients[index])
        return whole.digest()


class ShareChecker:
    """Draws the shares that are checked, reads their rows, and judges what the ranks found."""

    def __init__(
        self,
        spec: TrainSpec,
        every: int,
        transformation: BatchTransformation | None,
        build: Callable[[StepRows, int], Batch],
    ) -> None:
        """every: so many steps. build: makes the batch of virtual shares of a rank from its rows."""
        self._spec, self._every, self._transformation, self._build = spec, every, transformation, build
        self._reader, self._loader = spec.open_reader(spec.rows)

    def draw(self, position: Position, division: Division) -> ShareCheck | None:
        """What to check in this step, if anything; the same on all ranks."""
        plan = self._spec.plan
        if division.size == 1 or (position.epoch * plan.steps + position.step) % self._every:
            return None
        key = plan.seed, position.epoch, position.step
        share = int(draw_permutation(plan.shares, *key)[0])
        owner = next(rank for rank in range(division.size) if share < division.cuts[rank + 1])
        others = [rank for rank in range(division.size) if rank != owner]
        drawn = draw_permutation(len(others), *key, share)[:MAX_WITNESSES].tolist()
        return ShareCheck(share, owner, tuple(others[number] for number in drawn))

    def read(self, check: ShareCheck, position: Position) -> Batch:
        shares = self._spec.plan.shares
        each_alone = Division.equal(shares, shares)
        with self._loader.steps(position.epoch, position.step, check.share, shares, each_alone) as steps:
            rows = next(steps)
        if self._transformation is not None:
            batch = RowBatch(rows.columns, rows.row_ids, rows.epoch, (0, len(rows)), augments=True)
            rows = replace(rows, columns=self._transformation.apply(batch))
        return self._build(rows, check.share).shares[0]

    def judge(self, check: ShareCheck, group: Group, own: GradientDigest | None) -> None:
        """Compare what the ranks found. Collective. Raises StepDisputed: they differ; on every rank alike."""
        found = group.allgather_bytes(b"" if own is None else own.digest())
        ranks = (check.owner, *check.witnesses)
        ((most, times), *others) = Counter(found[rank] for rank in ranks).most_common()
        if not others:
            return
        suspects = tuple(rank for rank in ranks if times == 1 or found[rank] != most)
        worker = get_context()
        host = "?" if worker is None or worker.world is None else worker.world.me.host
        hosts = group.allgather_bytes(host.encode())
        names = ", ".join(f"rank {rank} on host {hosts[rank].decode()}" for rank in suspects)
        who = f"{names} computed other bits than the {times} others that computed it"
        if times == 1:
            who = f"{names} computed different bits each, and which of them is wrong cannot be said"
            who += ": with three workers or more a third decides" if group.size == 2 else ""
        raise StepDisputed(
            f"silent corruption in virtual share {check.share}: {who}. Check memory and processor there.",
            suspects,
        )

    def close(self) -> None:
        self._reader.close()


class ShareStep(TrainStep):
    checker: ShareChecker | None = None  # has some shares computed by several ranks; None: no share is
    _attributes: Attributes  # of the model's parts, as the newest share left them

    def _compute_gradients(self, group: Group, batch: Batch, before: BufferSnapshot) -> tuple[float, float]:
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
            self._witness(check, digest, batch.planned)
            before.restore()
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
        if check is not None and self.checker is not None:
            takes_part = group.rank in (check.owner, *check.witnesses)
            self.checker.judge(check, group, digest if takes_part else None)
        if step_loss is not None:
            return of_all[0].compute(), of_all[1]
        own = [(loss.compute(), denominator) for loss, denominator in losses]
        total, denominator = sum_over_shares(group, own)
        return (total, denominator) if group.rank == 0 else (0.0, 0.0)  # all ranks have the same sums

    def _compute_from_shares(
        self, step_loss: StepLoss, group: Group, batch: Batch, before: BufferSnapshot
    ) -> tuple[HostSum, float]:
        """The loss of all rows, of outputs for which each share begins with the buffers before the step."""
        step_loss.begin()
        for number, share in enumerate(batch.shares, batch.first_share):
            self._run_parts(list(share.micro_batches(self._config.data.batch_size)), number, step_loss.add)
            before.restore()
        return step_loss.compute(group, batch, self.key, self._metrics, self._scaling.backward, self.work)

    def _backward_share(self, parts: Sequence[Batch], number: int, planned: int) -> tuple[HostSum, float]:
        if self._step_loss is None:
            with seeded_rng(*self.key, number):
                return self._backward(parts)
        self._step_loss.seek(compute_share_bounds(planned, self._config.exchange.shares, number)[0])
        self._run_parts(parts, number, self._step_loss.backward)
        return HostSum(), 0.0

    def _witness(self, check: ShareCheck, digest: GradientDigest, planned: int) -> None:
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

    def _exchange_buffers(self, group: Group, batch: Batch, before: BufferSnapshot) -> bool:
        def reduce(tensors: list[Tensor], op: str) -> Tensor:
            gathered = np.concatenate(group.allgatherv(torch.stack(tensors).numpy()))
            return torch.from_numpy(functools.reduce(np.add if op == "sum" else np.maximum, gathered))

        rows = next((share for share in batch.shares if len(share)), batch)
        self._buffers.exchange(group, before, rows, self._try, reduce)
        return True

    def _apply_buffers(self) -> None:
        super()._apply_buffers()
        restore_attributes(self._modules, self._attributes)


def sum_over_shares(group: Group, own: Sequence[Sequence[float]]) -> list[float]:
    """The sums over all shares, one after the other. Collective. own: of this rank's shares, in order."""
    rows = np.concatenate(group.allgatherv(np.array(own, np.float64)))
    total: list[float] = functools.reduce(np.add, rows).tolist()
    return total


def build_shares(builder: BatchBuilder, rows: StepRows, rank: int) -> Batch:
    """This rank's batch, with a batch for each virtual share, which begins at the same alignment on every rank."""
    shares, (first, past) = rows.division.cuts[-1], rows.division.get_rank_parts(rank)
    start = compute_share_bounds(rows.planned, shares, first)[0]
    parts = []
    for share in range(first, past):
        low, high = (bound - start for bound in compute_share_bounds(rows.planned, shares, share))
        columns = {name: column[low:high].copy() for name, column in rows.columns.items()}
        batch = builder.build(replace(rows, row_ids=rows.row_ids[low:high], columns=columns))
        sides = {name: getattr(batch, name) for name in ("features", "labels", "weights")}
        parts.append(replace(batch, **align_batch(sides)))
    return LocalBatch(rows.planned, rows.row_ids, (), (), None, tuple(parts), first, rows.division)
