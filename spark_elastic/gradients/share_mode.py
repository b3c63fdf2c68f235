"""The gradients of virtual shares are added to those of the shares before, in the order of a tree.

They are taken from the parameters until `finish`. What no rank has counts as zero, and no number is ever -0.0: so x + 0
is x, and a rank may leave out a gradient that it does not have. Of sparse gradients the rows of all shares are listed
in their order, and added once all ranks have them.

In the tree a node is a range of shares; its left half is the largest power of two that leaves something for the right
half. A rank owns neighbouring shares and adds up the subtrees that lie in them; the rest is added in slots. A slot gets
at most two numbers that are not zero, so that its sum has the same bits in whatever order the collective adds, and
every rank adds the slots by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from elastic_collectives import Group
from spark_elastic.data.plan import Division
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.buckets import Bucket
from spark_elastic.gradients.layout import BucketMemory, GradientLayout, Views, cut_views
from spark_elastic.gradients.modes import HostMode
from spark_elastic.gradients.step_reducer import coalesce_rows
from spark_elastic.gradients.step_summary import Flags
from spark_elastic.gradients.timeline import Timeline
from spark_elastic.worker.context import CollectiveThread

Node = tuple[int, int]  # shares `first ... behind the last`


@dataclass(frozen=True)
class ShareTree:
    """What one rank adds, and where: its own shares on a stack, and then the slots of all ranks."""

    additions: tuple[int, ...]  # by own share: additions of the stack's two upmost entries once it lies there
    slots: tuple[int, ...]  # by entry that is left on the stack: the slot that it goes to
    depth: int  # most entries on the stack, the share that is added to the one below it left out
    slot_count: int  # slots over all ranks
    # Of slots (into, from), in their order; the sum ends in slot 0.
    slot_additions: tuple[tuple[int, int], ...]


def plan_shares(division: Division, rank: int) -> ShareTree:
    """The tree of the virtual shares of a step as `rank` sees it. division: gives each rank at least one of them."""
    shares, (first, past) = division.cuts[-1], division.get_rank_parts(rank)
    parents = _find_parents(0, shares)
    stack: list[Node] = []
    additions, depth = [], 1
    for share in range(first, past):
        stack.append((share, share + 1))
        count = 0
        while len(stack) > 1 and parents[stack[-2]] == parents[stack[-1]]:
            upper = stack.pop()
            stack[-1] = (stack[-1][0], upper[1])
            count += 1
        additions.append(count)
        depth = max(depth, len(stack))
    parts = [division.get_rank_parts(member) for member in range(division.size)]
    owned = {node for low, high in parts for node in _list_inside(0, shares, low, high)}
    slots: list[Node] = []
    slot_additions: list[tuple[int, int]] = []
    _add_slots((0, shares), owned, slots, slot_additions)
    left = tuple(next(i for i, (a, b) in enumerate(slots) if a <= node[0] and node[1] <= b) for node in stack)
    return ShareTree(tuple(additions), left, depth, len(slots), tuple(slot_additions))


def _halve(first: int, past: int) -> tuple[Node, Node]:
    middle = first + (1 << (past - first - 1).bit_length() - 1)
    return (first, middle), (middle, past)


def _find_parents(first: int, past: int) -> dict[Node, Node | None]:
    parents: dict[Node, Node | None] = {(first, past): None}
    for node in _halve(first, past) if past - first > 1 else ():
        parents |= _find_parents(*node)
        parents[node] = (first, past)
    return parents


def _list_inside(first: int, past: int, low: int, high: int) -> list[Node]:
    """The largest nodes of a subtree that lie in `low ... high`, in order."""
    if low <= first and past <= high:
        return [(first, past)]
    if past <= low or high <= first:
        return []
    return [inside for node in _halve(first, past) for inside in _list_inside(*node, low, high)]


def _add_slots(node: Node, owned: set[Node], slots: list[Node], additions: list[tuple[int, int]]) -> int:
    """Add the slots of a subtree and their additions. Returns the slot in which its sum ends."""
    halves = () if node in owned else _halve(*node)
    if all(half in owned for half in halves):
        slots.append(node)
        return len(slots) - 1
    into, source = (_add_slots(half, owned, slots, additions) for half in halves)
    additions.append((into, source))
    return into


Observe = Callable[[int, torch.Tensor | None], None]


class ShareBuckets(BucketMemory):
    """Buckets with several slots; the sum ends in the first one, where `views` are. A step: `begin`, then for each
    share `begin_share` and one `add` for each parameter of a bucket; then `combine` once the slots are summed over all
    ranks."""

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        buckets: Sequence[Bucket],
        group: Group | None,
        division: Division,
    ) -> None:
        self._tree = tree = plan_shares(division, 0 if group is None else group.rank)
        wide = [replace(bucket, numel=bucket.numel * tree.slot_count) for bucket in buckets]
        super().__init__(parameters, wide, group)
        self.share_count = len(tree.additions)  # shares of this rank
        self._numels = [bucket.numel for bucket in buckets]

        def find_slot(slot: int) -> list[torch.Tensor]:
            return [self.flats[i][slot * numel : (slot + 1) * numel] for i, numel in enumerate(self._numels)]

        memories = [find_slot(slot) for slot in tree.slots]
        while len(memories) < tree.depth:  # memory of this rank alone
            memories.append([flat.new_zeros(n) for flat, n in zip(self.flats, self._numels, strict=True)])
        self._stack = [cut_views(parameters, buckets, flats) for flats in memories]
        # Where this rank's sums begin: gradients until they are exchanged, so that changes by others are noticed.
        self.own: Views = self._stack[0]
        self._others = [slot for slot in range(tree.slot_count) if slot not in tree.slots]
        # Shares of this rank that were begun, and the stack's height below the newest one.
        self._begun, self._height = 0, 0

    def begin(self) -> None:
        self._begun, self._height = 0, 0
        for number, numel in enumerate(self._numels):
            for slot in self._others:
                self.flats[number][slot * numel : (slot + 1) * numel].zero_()

    def begin_share(self) -> None:
        if self._begun:
            self._height += 1 - self._tree.additions[self._begun - 1]
        self._begun += 1

    def add(self, index: int, gradient: torch.Tensor | None) -> None:
        """Add a parameter's gradient of the share; None: the share has none."""
        below, additions = self._height - 1, self._tree.additions[self._begun - 1]
        if not additions:
            top = self._stack[below + 1][index]
            assert top is not None
            if gradient is None:
                top.zero_()
            else:
                torch.add(gradient, 0.0, out=top)  # a copy without -0.0
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

    def combine(self, flat: torch.Tensor) -> None:
        slots = flat.view(self._tree.slot_count, -1)
        for into, source in self._tree.slot_additions:
            slots[into].add_(slots[source])


class ShareMode(HostMode):
    """Of a world, or a process alone, whose steps have virtual shares: `begin_share` and `end_share` for each."""

    unit = "virtual share"

    def __init__(
        self, layout: GradientLayout, group: Group | None, may_overlap: Callable[[], bool], division: Division
    ) -> None:
        self._shares = ShareBuckets(layout.parameters, layout.buckets, group, division)
        super().__init__(layout, group, may_overlap, self._shares)
        self._shares_left = 0  # shares of this rank that were not begun
        self._observe: Observe | None = None  # called with the gradients of the share under way
        self._listed: dict[int, list[torch.Tensor]] = {}  # by parameter: the sparse gradients of the shares
        self._found_dense: Flags = self.present.copy()  # which parameters had a dense gradient in a share

    def begin(self, passes: int, thread: CollectiveThread, timeline: Timeline | None) -> None:
        super().begin(self._shares.share_count, thread, timeline)  # each adds a gradient to the bucket
        self._passes = passes
        self.in_share, self._shares_left, self._observe = False, self._shares.share_count, None
        self._listed, self._found_dense = {}, self.present.copy()
        self._shares.begin()

    def begin_share(self, passes: int | None, observe: Observe | None) -> None:
        """Begin this rank's next virtual share. passes: backward passes until `end_share`; None: as given when the
        step began. observe: called with the number of each parameter and its gradient of the share."""
        self._shares_left -= 1
        self.in_share, self._observe = True, observe
        self._arrivals = [0] * len(self._arrivals)
        self._passes = self._passes if passes is None else passes
        self._shares.begin_share()

    def on_gradient(self, index: int) -> None:
        self._count(index)
        if self._arrivals[index] == self._passes:
            self._add(index)

    def end_share(self) -> None:
        """End it: add the gradients that not all passes brought, and launch the buckets that are complete."""
        for index, arrivals in enumerate(self._arrivals):
            if arrivals < self._passes or not arrivals:
                self._add(index)
        self.in_share = False

    @property
    def has_gradients(self) -> bool:
        return self.has_open_step or super().has_gradients

    def finish(self) -> None:
        if self._shares_left or self.in_share:
            raise InvalidInput(
                "step() was called before the last virtual share: take all shares that the loader yields for a step."
            )
        self._check_unchanged(self._shares.own)
        if self._group is not None:
            self._launch_rest()
            self._complete_buckets()
        for parameter, total in zip(self.layout.parameters, self._shares.views, strict=True):
            parameter.grad = total
        if self.layout.options.sparse == "sparse":
            self._sum_listed()
        self.has_open_step = False

    def hand_over(self, views: Views) -> None:
        """Gradients do not outlive their step."""

    def _add(self, index: int) -> None:
        parameter = self.layout.parameters[index]
        gradient = parameter.grad
        if self._observe is not None:
            self._observe(index, gradient)
        if gradient is not None and gradient.is_sparse:
            gradient = self._prepare_sparse(index, gradient, keeps_rows=True)
        if gradient is not None and gradient.is_sparse:
            self._listed.setdefault(index, []).append(gradient)
            gradient = None
        elif gradient is not None:
            gradient = gradient.detach()
            self._found_dense[index] = True
        own = self._shares.own[index]
        parameter.grad = None if self._shares_left else own
        if own is not None:
            self._shares.add(index, gradient)
            self._record_write(index)

    def _sum_listed(self) -> None:
        parameters, group = self.layout.parameters, self._group
        listed = self.found_sparse  # and on any rank
        if group is not None:
            listed = np.bitwise_or.reduce(self._reducer.call(lambda: group.allgather(self.found_sparse)))
        for index in np.flatnonzero(self._found_dense).tolist():
            if index in self.layout.sparse or listed[index]:
                raise InvalidInput(
                    f"parameter {self.layout.names[index]!r} has a sparse gradient in one virtual share and a dense "
                    "one in another: use sparse=False."
                )
        numbers = np.flatnonzero(listed).tolist()
        for index in numbers:
            rows = self._concatenate(index)
            if group is None:
                parameters[index].grad = rows.coalesce()
            else:
                self._reducer.launch_sparse(index, rows)
        if group is not None:
            self._reducer.wait()
            for index in numbers:
                parameters[index].grad = self._reducer.sparse_results[index]

    def _concatenate(self, index: int) -> torch.Tensor:
        parameter, parts = self.layout.parameters[index], self._listed.get(index, [])
        parts = parts or [coalesce_rows(self.layout.names[index], torch.zeros_like(parameter))]
        rows = torch.cat([part.indices() for part in parts], dim=1)
        values = torch.cat([part.values() for part in parts])
        return torch.sparse_coo_tensor(rows, values, parameter.shape, check_invariants=False)
