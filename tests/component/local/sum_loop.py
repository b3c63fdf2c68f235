"""A loop for hosts that share nothing: its ranks add up their numbers until one of them sees a file
`stop` in its folder for temporary files. Each rank prints a line in each new world.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from spark_elastic.handwritten.elastic_loop import elastic
from spark_elastic.handwritten.object_state import ObjectState
from spark_elastic.worker.context import get_context


def _loop(state: Any) -> None:
    worker, told = get_context(), 0
    assert worker is not None
    while True:
        group = worker.group
        numbers = np.array([group.rank + 1.0, float(Path(tempfile.gettempdir(), "stop").exists())])
        group.allreduce(numbers)
        state.step += 1
        if group.size != told:
            told = group.size
            what = f"sum {numbers[0]:g} of {told} on {socket.gethostname()} mark {os.environ.get('MARK')}"
            print(what, flush=True)  # noqa: T201 - what the tests read
        if numbers[1]:
            return
        time.sleep(0.02)
        state.commit()


elastic(_loop)(ObjectState(step=0))
