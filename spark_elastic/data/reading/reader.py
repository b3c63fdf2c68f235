"""What a loader needs of a reader: row groups as arrays. Arrow's is in `arrow_reader`; others may be written."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

Decoded = dict[str, npt.NDArray[np.generic]]


class Reader(Protocol):
    """Row groups of one data set, by their number in its manifest. Any thread may fetch."""

    def fetch(self, group: int) -> Decoded:
        """Column -> array of shape (rows, *shape), read-only: it may be a view of shared memory.

        StoreError where the row group cannot be read.
        """
        ...

    def prefetch(self, group: int) -> bool:
        """It will be fetched soon: read it now. False if there is no room for it. Raises as `fetch` does."""
        ...

    def release(self, group: int | None = None) -> None:
        """It is not fetched again for a while, and where it is None, none is: such are the first to be forgotten."""
        ...

    def close(self) -> None:
        """Let files and memory go."""
        ...
