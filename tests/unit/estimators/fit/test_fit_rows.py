"""Tables that cannot be trained on are told from what Spark says of them, before any job."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyspark")

from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.fit.fit_rows import TableRows


def test_a_stream_is_refused() -> None:
    stream: Any = SimpleNamespace(isStreaming=True)
    request: Any = SimpleNamespace()
    with pytest.raises(InvalidInput, match=r"is a stream, which has no end: read its source with spark.read"):
        TableRows(stream).check(request)
