"""What a rank tells the others of its rows of a step, for metrics: numbers by name, and arrays. Pure; no pickle."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Arrays = list[npt.NDArray[Any]]


def packed(logged: Mapping[str, float], rows: int, columns: Arrays) -> bytes:
    """One JSON line, then arrays as numpy writes them."""
    file = io.BytesIO()
    file.write(json.dumps([dict(logged), rows, len(columns)]).encode() + b"\n")
    for column in columns:
        np.save(file, column, allow_pickle=False)
    return file.getvalue()


def unpacked(blob: bytes) -> tuple[dict[str, float], int, Arrays]:
    file = io.BytesIO(blob)
    logged, rows, columns = json.loads(file.readline())
    return logged, rows, [np.load(file, allow_pickle=False) for _ in range(columns)]
