"""Which state belongs to which callback: a run may be resumed with other callbacks than it began with. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def name_classes(callbacks: Sequence[Any]) -> list[str]:
    """The class of each, as it is kept beside its state."""
    return [type(callback).__name__ for callback in callbacks]


def pair_states(
    callbacks: Sequence[Any], classes: Sequence[str], states: Sequence[Any]
) -> list[tuple[Any, Any]]:
    """Each callback with the state of the one that it continues: the first of its class continues the first, and so
    on. A callback that is new keeps what it has, and the state of one that is gone is dropped.

    Args:
        classes: of `name_classes`, for each state.
    """
    left: dict[str, list[Any]] = {}
    for name, state in zip(classes, states, strict=True):
        left.setdefault(name, []).append(state)
    return [
        (callback, left[name].pop(0))
        for callback, name in zip(callbacks, name_classes(callbacks), strict=True)
        if left.get(name)
    ]
