"""P7 for hand-written loops on real processes: `run` with a run_id outlives its workers, its time and its driver."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import cloudpickle
import pytest

from spark_elastic.data.store import Store, list_entries
from spark_elastic.errors import TimeLimitReached
from spark_elastic.protocol.driver import forming
from spark_elastic.protocol.driver.forming import check_max_runtime
from spark_elastic.runs.checkpoint import CheckpointStore
from tests.component.injected_faults import kill
from tests.component.torch.hand_written import Run, assert_exact, count, train
from tests.patience import until
from tests.scenarios import Fault

pytestmark = [pytest.mark.native, pytest.mark.timeout(240)]

cloudpickle.register_pickle_by_value(sys.modules[train.__module__])

DRIVER = """
import sys
import cloudpickle
from tests.component.torch import hand_written as here

cloudpickle.register_pickle_by_value(here)
here.Run(
    here.train, (600, {}), room=3, num_workers=3, run_id="mine", store=sys.argv[1], checkpoint_steps=3
).results()
"""


def find_newest_step(folder: Path) -> int:
    """Of the run's newest durable commit; 0 where there is none."""
    published = CheckpointStore(Store.open(str(folder)), "mine").read_published()
    return published[0].position.step if published else 0


def is_unfinished(folder: Path) -> bool:
    """Whether `clean` keeps the run."""
    return any(each.needed for each in list_entries(Store.open(str(folder))))


def test_p7_a_loop_resumes_after_its_driver_and_all_workers_died(tmp_path: Path, fault: Fault) -> None:
    first = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path)], cwd=os.getcwd())
    try:
        deadline = time.monotonic() + 120
        while find_newest_step(tmp_path) < 9:
            assert first.poll() is None
            assert time.monotonic() < deadline, "no checkpoint"
            time.sleep(0.01)
        fault(first.send_signal, signal.SIGKILL)
    finally:
        first.kill()
        first.wait(60)
    assert is_unfinished(tmp_path)
    step, go = find_newest_step(tmp_path), tmp_path / "go"
    steps = step + 25
    given = {"run_id": "mine", "store": str(tmp_path), "checkpoint_steps": 3}
    again = Run(train, (steps, {step + 15: str(go)}), room=2, num_workers=2, **given)
    killed: list[int] = []

    def inject_fault() -> None:
        until(lambda: find_newest_step(tmp_path) > step)
        for slot in again.cluster.slots():
            killed.append(slot)
            fault(kill, again.cluster, slot)
        go.touch()

    again.at(step + 8, inject_fault)
    results = again.results()
    assert len(killed) == 2
    assert_exact(results, steps)
    begun = re.findall(
        r"continues from epoch 1, train, step (\d+), as a host's memory", again.lines.getvalue()
    )
    assert len(begun) == 2, "a world began from a checkpoint"
    assert int(begun[0]) >= step
    assert int(begun[1]) >= step + 8
    assert results[0]["trained"][-1] == steps - 1
    assert find_newest_step(tmp_path) == steps, "the end is not durable"
    assert not is_unfinished(tmp_path)


def test_max_runtime_leaves_a_checkpoint_of_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is up once steps were taken, however long the start took."""
    taken_some = threading.Event()
    monkeypatch.setattr(
        forming, "check_max_runtime", lambda tx: check_max_runtime(tx) or "late" * taken_some.is_set()
    )
    given = {"run_id": "mine", "store": str(tmp_path), "checkpoint_steps": 100_000}
    first = Run(count, (100_000, 1), room=2, num_workers=2, max_runtime=600.0, **given)
    first.at(10, taken_some.set)
    with pytest.raises(TimeLimitReached):
        first.results()
    taken_some.clear()
    taken = [line for line in first.lines.getvalue().splitlines() if "] step " in line]
    stopped = max(int(line.rpartition(" ")[2]) for line in taken)
    results = Run(count, (stopped + 5, 1), room=1, num_workers=1, **given).results()
    assert results[0]["trained"][0] >= stopped, "steps were taken again"
    assert results[0]["number"] == stopped + 5
