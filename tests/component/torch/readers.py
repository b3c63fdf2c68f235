"""The readers that a training on files of somebody else is played with."""

from __future__ import annotations

import pyarrow as pa
import pytest

READERS = [
    "arrow",
    pytest.param(
        "petastorm",
        marks=[
            pytest.mark.petastorm,
            pytest.mark.filterwarnings("ignore"),
            pytest.mark.skipif(int(pa.__version__.split(".")[0]) > 14, reason="petastorm needs pyarrow 14"),
        ],
    ),
]
