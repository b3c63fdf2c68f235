"""Whether the numbers that callbacks watch will come about: said before the first job. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from spark_elastic.errors import InvalidInput
from spark_elastic.torch.train.metrics import accumulates
from spark_elastic.torch.train.spec import Brought

# Numbers of an epoch that say nothing of how good the model is.
BESIDE = ("learning_rate", "skipped_steps", "epoch", "rows", "planned", "steps", "seconds")


def check_watched(brought: Brought, labels: Sequence[str], validates: bool) -> None:
    """Raises InvalidInput for a number that no epoch will have. validates: there is a validation after each epoch."""
    known = epoch_numbers(brought, labels)
    free = tuple(f"{name}_" for name, metric in brought.metrics.items() if accumulates(metric))
    adding = any(not _is_ours(callback.on_epoch_end) for callback in brought.callbacks)
    for name in brought.watched:
        plain = name.removeprefix("val_")
        if not ({name, plain} & {*known, *BESIDE} or adding or plain.startswith(free)):
            there = [*known, *(f"val_{each}" for each in known if validates)]
            raise InvalidInput(
                f"a callback watches {name!r}, which no epoch will have: set its monitor to one of {', '.join(there)}."
            )
        if name.startswith("val_") and name not in known and not validates:
            raise InvalidInput(
                f"a callback watches {name!r}, but nothing is validated: set validation (validation_paths of "
                "fit_on_parquet), or the callback's monitor='loss'."
            )


def epoch_numbers(brought: Brought, labels: Sequence[str]) -> list[str]:
    """Losses and metrics that an epoch may have, and with `val_` before them its validation. What a metric object
    computes may have names after its own, and callbacks may add more."""
    several = len(labels) > 1
    losses = [f"loss_{label}" for label in labels] if len(brought.losses) > 1 else []
    outputs = [f"{name}_{label}" for name in brought.metrics for label in labels] if several else []
    return ["loss", *losses, *brought.metrics, *outputs]


def _is_ours(hook: object) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("spark_elastic.")
