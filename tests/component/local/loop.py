"""A hand-written elastic loop without a framework, run as a script by the tests beside it.

Arguments: a folder. It notes each step in `log`, dies as a file `order.<rank>` or `order.all` there tells it, and
ends once there is a file `stop`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from spark_elastic.handwritten.elastic_loop import elastic
from spark_elastic.handwritten.object_state import ObjectState
from spark_elastic.worker.context import get_context

FOLDER = Path(sys.argv[1])


def _die(how: str) -> None:
    if how == "raise":
        raise ValueError(f"ordered of process {os.getpid()}")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(1)


def _train(state: Any) -> int:
    place = get_context()
    assert place is not None
    assert place.group is not None
    assert place.world is not None
    group, world = place.group, place.world
    while True:
        if (FOLDER / "order.all").exists():
            _die((FOLDER / "order.all").read_text())
        order = FOLDER / f"order.{group.rank}"
        if order.exists():
            how = order.read_text()
            order.unlink()
            _die(how)
        numbers = np.array([1.0, float((FOLDER / "stop").exists())])
        group.allreduce(numbers)
        state.step += 1
        line = {
            "generation": world.fence.generation,
            "rank": group.rank,
            "size": int(numbers[0]),
            "host": os.environ["HOROVOD_HOSTNAME"],
            "step": state.step,
            "pid": os.getpid(),
            "wall": time.time(),
        }
        with (FOLDER / "log").open("a") as log:
            log.write(json.dumps(line) + "\n")
        if numbers[1]:
            return int(state.step)
        time.sleep(0.02)
        state.commit()


if __name__ == "__main__":
    elastic(_train)(ObjectState(step=0))
