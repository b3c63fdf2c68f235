"""The memory in which the gradients of a step's virtual shares are added in the order of `share_tree`.

What no rank has counts as zero, and no number is ever -0.0: so x + 0 is x, and a rank may leave out a gradient that it
does not have. Used as `BucketMemory` is, by the same threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from elastic_collectives import Group
from spark_elastic.data.plan import Division
from spark_elastic.gradients.buckets import Bucket
from spark_elastic.gradients.share_tree import plan_shares
from spark_elastic.gradients.step_reducer import BucketMemory

Views = list[torch.Tensor | None]  # by parameter; None: it lies in no bucket


class ShareBuckets(BucketMemory):
    """Buckets with several slots; the sum ends in the first one. A step: `begin`, then for each share `begin_share` and
    one `add` for each parameter of a bucket; then `combine` once the slots are summed over all ranks."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        buckets: Sequence[Bucket],
        group: Group | None,
        division: Division,
    ) -> None:
        """
        Args:
            group: None: this process has all shares.
            division: of the virtual shares of a step among the ranks.
        """
        self._tree = tree = plan_shares(division, 0 if group is None else group.rank)
        super().__init__(
            parameters, [replace(each, numel=each.numel * tree.slot_count) for each in buckets], group
        )
        # The sums, once they are combined.
        self.sums = self.views
        self._stack = [self._find_views(buckets, slot) for slot in tree.slots]
        while len(self._stack) < tree.depth:
            self._stack.append(self._allocate_views(buckets))
        # Where this rank's sum begins: gradients until they are exchanged, so that changes by others are noticed.
        self.views = self._stack[0]
        self._numels = [bucket.numel for bucket in buckets]
        self._others = [slot for slot in range(tree.slot_count) if slot not in tree.slots]
        # Shares of this rank that were begun, and the stack's height below the newest one.
        self._begun, self._height = 0, 0

    @property
    def share_count(self) -> int:
        """Shares of this rank."""
        return len(self._tree.additions)

    def begin(self) -> None:
        """Begin a step."""
        self._begun, self._height = 0, 0
        for number, numel in enumerate(self._numels):
            for slot in self._others:
                self._flat[number][slot * numel : (slot + 1) * numel].zero_()

    def begin_share(self) -> None:
        if self._begun:
            self._height += 1 - self._tree.additions[self._begun - 1]
        self._begun += 1

    def add(self, index: int, gradient: torch.Tensor | None) -> None:
        """Add a parameter's gradient of the share; None: the share has none."""
        below, additions = self._height - 1, self._tree.additions[self._begun - 1]
        if not additions:
            self._put(self._stack[below + 1][index], gradient)
            return
        into = self._stack[below][index]
        assert into is not None
        if gradient is not None:
            into.add_(gradient)
        for _ in range(additions - 1):
            below -= 1
            lower = self._stack[below][index]
            assert lower is not None
            into = lower.add_(into)

    def combine(self, number: int) -> None:
        # `.data`, so that `write_count` does not count it.
        slots = self._on_host(number).data.view(self._tree.slot_count, -1)
        for into, source in self._tree.slot_additions:
            slots[into].add_(slots[source])

    def hand_over(self, parameters: Sequence[torch.nn.Parameter], successor: BucketMemory | None) -> None:
        """Gradients do not outlive their step."""

    @staticmethod
    def _put(view: torch.Tensor | None, gradient: torch.Tensor | None) -> None:
        assert view is not None
        if gradient is None:
            view.zero_()
        else:
            torch.add(gradient, 0.0, out=view)  # a copy without -0.0

    def _find_views(self, buckets: Sequence[Bucket], slot: int) -> Views:
        flats = [
            flat[slot * bucket.numel : (slot + 1) * bucket.numel]
            for flat, bucket in zip(self._flat, buckets, strict=True)
        ]
        return self._cut(buckets, flats)

    def _allocate_views(self, buckets: Sequence[Bucket]) -> Views:
        """Memory of this rank alone."""
        flats = [flat.new_zeros(bucket.numel) for flat, bucket in zip(self._flat, buckets, strict=True)]
        return self._cut(buckets, flats)

    def _cut(self, buckets: Sequence[Bucket], flats: Sequence[torch.Tensor]) -> Views:
        views: Views = [None] * len(self._shapes)
        for bucket, flat in zip(buckets, flats, strict=True):
            for part in bucket.slices:
                views[part.index] = flat[part.offset : part.offset + part.numel].view(
                    self._shapes[part.index]
                )
        return views
