"""What a fitted model needs of a trained one, whatever the framework. Only shapes of things; no thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from spark_elastic.data.manifest import Column


class Predicts(Protocol):
    """A trained model as a function of columns; pickles, for a broadcast."""

    @property
    def columns(self) -> tuple[Column, ...]: ...

    def model(self) -> Any:
        """A new copy of the framework's model."""
        ...

    def parts(self) -> dict[str, bytes]:
        """What is saved, by name."""
        ...

    @property
    def needs_sample(self) -> bool:
        """Whether `widths` must be given rows to try."""
        ...

    def widths(self, sample: Sequence[Sequence[Any]] | None = None) -> list[int]:
        """Numbers per row of each output. sample: rows of each input column."""
        ...

    def predict(
        self, columns: Sequence[Sequence[Any]], gpus: Sequence[str] = ()
    ) -> list[npt.NDArray[np.float64]]:
        """(rows, width) for each output. columns: for each input column its rows. gpus: addresses of those that Spark
        gave to the task."""
        ...
