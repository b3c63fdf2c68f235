"""The readers with which files that somebody else wrote are read and trained on."""

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
