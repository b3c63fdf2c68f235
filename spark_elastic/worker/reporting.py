"""What hand-written training tells people of itself: numbers for the job's progress, status page and metrics.

Whatever a worker reports, rank 0's is shown. Kept where it outlives one call of the user's function, so that a count of
commits does not take the loss off the page. Training thread only.
"""

from __future__ import annotations

from typing import Any

from spark_elastic.errors import InvalidInput
from spark_elastic.worker.context import current
from spark_elastic.worker.program import Session

REPORTED = "reported"  # in `Session.kept`
COUNTED = ("step", "steps", "rows", "world", "checkpoint_seconds")


def report(**numbers: Any) -> None:
    """Show these numbers of a training, as `report(loss=0.3, accuracy=0.9)`; each stays until it is reported anew.

    Cheap, to be called each step: four times a second the newest go to the driver, which shows those of rank 0. What
    `float` takes is a number. Does nothing in a process that is no worker.

    Raises:
        InvalidInput: what is not a number, or a name that the job counts itself.
    """
    here = current()
    told: dict[str, Any] = {}
    for name, value in numbers.items():
        if name in COUNTED:
            raise InvalidInput(f"report() counts {name} itself: give yours under another name.")
        try:
            told[name] = value if isinstance(value, int) else float(value)
        except (TypeError, ValueError) as error:
            raise InvalidInput(
                f"report() takes numbers; {name} is a {type(value).__name__} and no number: {error}."
            ) from error
    if here is not None and here.session is not None:
        size = {} if here.world is None else {"world": here.world.size}
        tell(here.session, {**told, **size})


def tell(session: Session, numbers: dict[str, Any]) -> None:
    """Report numbers, in addition to those that were reported before."""
    kept: dict[str, Any] = session.kept.setdefault(REPORTED, {})
    kept.update(numbers)
    session.report(dict(kept))
