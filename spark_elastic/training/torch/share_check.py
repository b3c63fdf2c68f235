"""Silent corruption: now and then other ranks compute one virtual share, too, and compare the bits of its gradients.

Every rank draws the same share and the same witnesses from the position. A witness reads the share's rows itself and
computes with its own weights, so a flipped bit in rows, weights or arithmetic of any of them shows. All ranks learn the
outcome alike, before the step is applied. Main thread only.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from elastic_collectives import Group
from spark_elastic.data.loader import StepRows
from spark_elastic.data.plan import Division, draw_permutation
from spark_elastic.protocol.types import Position
from spark_elastic.training.batch import LocalBatch
from spark_elastic.training.spec import TrainSpec
from spark_elastic.training.torch.frozen import view_bytes
from spark_elastic.training.trainer import StepDisputed
from spark_elastic.training.transformation import BatchTransformation, RowBatch
from spark_elastic.worker.context import get_context

MAX_WITNESSES = 2  # one shows a difference, the second decides who is wrong


@dataclass(frozen=True)
class ShareCheck:
    """A virtual share that several ranks compute."""

    share: int  # its number among the step's shares
    owner: int  # the rank whose share it is
    witnesses: tuple[int, ...]  # one or two ranks that compute it, too


class GradientDigest:
    """A hash of the gradients and the loss of one virtual share."""

    def __init__(self) -> None:
        # By parameter.
        self._gradients: dict[int, bytes] = {}
        self.loss: tuple[float, float] = 0.0, 0.0

    def add(self, index: int, gradient: torch.Tensor | None) -> None:
        """Add the gradient of a parameter; None: the share has none."""
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
        build: Callable[[StepRows, int], LocalBatch[torch.Tensor]],
    ) -> None:
        """
        Args:
            every: so many steps.
            transformation: what the rows go through first; None: nothing.
            build: makes the batch of virtual shares of a rank from its rows.
        """
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

    def read(self, check: ShareCheck, position: Position) -> LocalBatch[torch.Tensor]:
        """The share's rows, read by this rank."""
        shares = self._spec.plan.shares
        each_alone = Division.equal(shares, shares)
        with self._loader.steps(position.epoch, position.step, check.share, shares, each_alone) as steps:
            rows = next(steps)
        if self._transformation is not None:
            batch = RowBatch(rows.columns, rows.row_ids, rows.epoch, (0, len(rows)), augments=True)
            rows = replace(rows, columns=self._transformation.apply(batch))
        return self._build(rows, check.share).shares[0]

    def judge(self, check: ShareCheck, group: Group, own: GradientDigest | None) -> None:
        """Compare what the ranks found. Collective.

        Args:
            own: what this rank found; None if it does not take part.

        Raises:
            StepDisputed: they differ; on every rank alike.
        """
        found = group.allgather_bytes(b"" if own is None else own.digest())
        ranks = (check.owner, *check.witnesses)
        counts = Counter(found[rank] for rank in ranks)
        if len(counts) == 1:
            return
        most, times = counts.most_common(1)[0]
        suspects = tuple(rank for rank in ranks if times == 1 or found[rank] != most)
        worker = get_context()
        host = "?" if worker is None or worker.world is None else worker.world.me.host
        hosts = group.allgather_bytes(host.encode())
        names = ", ".join(f"rank {rank} on host {hosts[rank].decode()}" for rank in suspects)
        who = (
            f"{names} computed other bits than the {times} others that computed it"
            if times > 1
            else f"{names} computed different bits each, and which of them is wrong cannot be said"
            + (": with three workers or more a third decides" if group.size == 2 else "")
        )
        raise StepDisputed(
            f"silent corruption in virtual share {check.share}: {who}. Check memory and processor there.",
            suspects,
        )

    def close(self) -> None:
        self._reader.close()
