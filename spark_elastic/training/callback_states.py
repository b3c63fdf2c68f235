"""What callbacks of any framework need: a state that belongs to each, since a run may be resumed with other callbacks
than it began with, and numbers of epochs to watch. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from spark_elastic.errors import InvalidInput


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


def check_watched_names(
    watched: Iterable[str], known: Sequence[str], validates: bool, may_exist: Callable[[str], bool]
) -> None:
    """Check that each number that a callback watches will exist.

    Args:
        watched: names of the numbers; those of a validation begin with `val_`.
        known: the losses and metrics of each epoch.
        validates: each epoch is followed by a validation.
        may_exist: whether epochs may have a number that is not known, by its name without `val_`.

    Raises:
        InvalidInput: one of them will not exist.
    """
    for name in watched:
        plain = name.removeprefix("val_")
        if name not in known and plain not in known and not may_exist(plain):
            names = [*known, *(f"val_{each}" for each in known if validates)]
            needs = "" if validates or plain == name else " (those with val_ need a validation)"
            raise InvalidInput(
                f"a callback watches {name!r}, which no epoch will have: set its monitor to one of {', '.join(names)}"
                f"{needs}."
            )
        if name.startswith("val_") and name not in known and not validates:
            raise InvalidInput(
                f"a callback watches {name!r}, but nothing is validated: set validation (validation_paths of "
                "fit_on_parquet, validation_table of fit_on_table), or the callback's monitor='loss'."
            )
