"""The rows of the small training jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.component.torch.job import Data, make_data


@pytest.fixture
def data(tmp_path: Path) -> Data:
    return make_data(tmp_path)
