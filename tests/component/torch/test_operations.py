"""Named operations on real workers: any order, process sets and a trace, through a loss in the middle of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from tests.component.torch.hand_written import PACE, Run, hold
from tests.scenarios import Fault

pytestmark = [pytest.mark.native, pytest.mark.timeout(300)]
for name in (__name__, hold.__module__):
    cloudpickle.register_pickle_by_value(sys.modules[name])

STEPS = 20


def operations(trace: str) -> dict[str, Any]:
    """In each step ranks ask for sums among all and within two sets, each rank in an order of its own."""
    import random
    import time

    import torch

    import spark_elastic.torch as hvd

    pair, rest = hvd.ProcessSet([0, 1]), hvd.ProcessSet([1, 2])
    hvd.init(process_sets=[pair, rest])
    hvd.start_timeline(trace)
    worlds: list[Any] = []

    def ask(number: int) -> Any:
        return hvd.allreduce_async(torch.full((number + 1,), hvd.rank() + 1.0), name=f"t{number}", op=hvd.Sum)

    @hvd.elastic.run
    def loop(state: Any) -> None:
        while state.step < STEPS:
            hold(state, 2 if state.step == 15 else None)
            time.sleep(PACE)
            order = random.Random(state.step + 31 * hvd.rank()).sample(range(8), 8)
            handles = [ask(number) for number in order]
            sums = {
                name: hvd.allreduce(torch.tensor([hvd.rank() + 1]), op=hvd.Sum, process_set=among).item()
                for name, among in (("pair", pair), ("rest", rest))
                if among.included()
            }
            size = hvd.size()
            assert {float(hvd.synchronize(handle)[0]) for handle in handles} == {size * (size + 1) / 2}
            assert sums == {
                name: sum(rank + 1 for rank in among.ranks)
                for name, among in (("pair", pair), ("rest", rest))
                if among.included()
            }
            worlds.append((size, hvd.get_process_set_ids_and_ranks()))
            state.step += 1
            print(f"step {state.step}", flush=True)  # noqa: T201 - what the test waits for
            state.commit()

    loop(hvd.elastic.ObjectState(step=0))
    hvd.stop_timeline()
    return {"worlds": worlds}


def test_operations_continue_after_a_loss_and_process_sets_follow_the_world(
    fault: Fault, tmp_path: Path
) -> None:
    run = Run(operations, (str(tmp_path / "trace.json"),), room=3, num_workers=3, min_workers=2)
    run.at(8, lambda: fault(run.cluster.kill, max(run.cluster.slots())))
    results = run.results()
    worlds = results[0]["worlds"]
    assert len(worlds) >= STEPS
    assert (3, {0: [0, 1, 2], 1: [0, 1], 2: [1, 2]}) in worlds
    assert (2, {0: [0, 1], 1: [0, 1], 2: [1]}) in worlds
    events = [event for event in json.loads((tmp_path / "trace.json").read_text()) if event]
    rows = {event["args"].get("name") for event in events if event["ph"] == "M"}
    assert rows >= {"allreduce.t0", "allreduce.t7"}
