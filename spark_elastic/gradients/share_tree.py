"""The tree in which the gradients of a step's virtual shares are added: a pure function of their number.

PURE: no framework, no thread. A node is a range of shares; its left half is the largest power of two that leaves
something for the right half. A rank owns neighbouring shares and adds up the subtrees that lie in them; the rest is
added in slots. A slot gets at most two numbers that are not zero, so that its sum has the same bits in whatever order
the collective adds, and every rank adds the slots by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from spark_elastic.data.plan import Division

Node = tuple[int, int]  # shares `first ... behind the last`


@dataclass(frozen=True)
class ShareTree:
    """What one rank adds, and where: its own shares on a stack, and then the slots of all ranks."""

    additions: tuple[int, ...]  # by own share: additions of the stack's two upmost entries once it lies there
    slots: tuple[int, ...]  # by entry that is left on the stack: the slot that it goes to
    depth: int  # most entries on the stack, the share that is added to the one below it left out
    slot_count: int  # slots over all ranks
    # Of slots (into, from), in their order; the sum ends in slot 0
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
    owned = {
        node
        for each in range(division.size)
        for node in _list_inside(0, shares, *division.get_rank_parts(each))
    }
    slots: list[Node] = []
    slot_additions: list[tuple[int, int]] = []
    _add_slots((0, shares), owned, slots, slot_additions)
    return ShareTree(
        tuple(additions),
        tuple(next(i for i, (a, b) in enumerate(slots) if a <= node[0] and node[1] <= b) for node in stack),
        depth,
        len(slots),
        tuple(slot_additions),
    )


def _halve(first: int, past: int) -> tuple[Node, Node]:
    middle = first + (1 << (past - first - 1).bit_length() - 1)
    return (first, middle), (middle, past)


def _find_parents(first: int, past: int) -> dict[Node, Node | None]:
    """The parent of each node."""
    found: dict[Node, Node | None] = {(first, past): None}
    for node in _halve(first, past) if past - first > 1 else ():
        found |= _find_parents(*node)
        found[node] = (first, past)
    return found


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
