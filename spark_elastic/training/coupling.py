"""What is said of layers that make a step depend on how its rows are split over workers (R9). Pure."""

from __future__ import annotations

from collections.abc import Iterable

NAMED = 3  # layers that are named; the others are counted


def sentence(dependent: Iterable[tuple[str, str]]) -> str | None:
    """The warning, or None if `dependent` (the name of each such layer, and why) is empty."""
    found = [f"{name} ({why})" for name, why in dependent]
    if not found:
        return None
    named = ", ".join(found[:NAMED]) + (f" and {len(found) - NAMED} more" if len(found) > NAMED else "")
    return (
        f"the trained weights depend on the number of workers through {named}: every row still trains exactly once and "
        "all workers hold the same weights."
    )
