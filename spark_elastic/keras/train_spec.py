"""What the user brings to a training with Keras. Shipped to the workers; no thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spark_elastic.keras.train_archive import Archive
from spark_elastic.training.transformation import Transformation


@dataclass(frozen=True)
class KerasBrought:
    """model: compiled. callbacks: Keras's own, or of their kind. class_weight: of the one label's classes."""

    model: Archive
    callbacks: tuple[Any, ...] = ()
    class_weight: Mapping[int, float] | None = None
    transformation: Transformation | None = None
