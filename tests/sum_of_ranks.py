"""A program for `spark-elastic-run` that needs nothing but the wheel: its ranks add up a thousand ones each."""

from __future__ import annotations

import numpy as np

from spark_elastic.handwritten.elastic_loop import elastic
from spark_elastic.handwritten.object_state import ObjectState
from spark_elastic.worker.context import get_context


def loop(state: ObjectState) -> None:
    worker, numbers = get_context(), np.ones(1000)
    assert worker is not None
    worker.group.allreduce(numbers)
    print("sum", numbers.sum(), flush=True)  # noqa: T201 - what its test reads


elastic(loop)(ObjectState())
