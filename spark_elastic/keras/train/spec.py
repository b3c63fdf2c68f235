"""What the user brings to a training with Keras. Shipped to the workers; no thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spark_elastic.keras.train.archive import Archive
from spark_elastic.training.identity import digest
from spark_elastic.training.transformation import Transformation


@dataclass(frozen=True)
class KerasBrought:
    """model: compiled. callbacks: Keras's own, or of their kind. class_weight: of the one label's classes."""

    model: Archive
    callbacks: tuple[Any, ...] = ()
    class_weight: Mapping[int, float] | None = None
    transformation: Transformation | None = None

    def identity(self) -> dict[str, str]:
        """What a run is bound to (R19), by the words that an error has for it."""
        return {
            "model, optimizer or loss": digest(self.model.identity()),
            "class_weight": digest(self.class_weight),
            "transformation_fn": digest(self.transformation),
        }
