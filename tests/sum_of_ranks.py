"""A program for `spark-elastic-run` that needs nothing but the wheel: its ranks add up a thousand ones each."""

from __future__ import annotations

import numpy as np

from spark_elastic.state.elastic_loop import elastic
from spark_elastic.state.object_state import ObjectState
from spark_elastic.worker.context import current
from spark_elastic.worker.seat import seat_of_process


def loop(state: ObjectState) -> None:
    seat, numbers = current(), np.ones(1000)
    assert seat is not None
    seat.group.allreduce(numbers)
    print("sum", numbers.sum(), flush=True)  # noqa: T201 - what its test reads


elastic(loop, seat_of_process)(ObjectState())
