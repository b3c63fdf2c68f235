"""`run` and hand-written loops on real processes: joins, losses and drains in the middle of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from spark_elastic.errors import TimeLimitReached, WorkerFailed
from tests.component.torch.hand_written import STEPS, Run, assert_exact, count, exchange_around, train
from tests.scenarios import Fault

pytestmark = [pytest.mark.native, pytest.mark.timeout(300)]

for name in (__name__, train.__module__):
    cloudpickle.register_pickle_by_value(sys.modules[name])


@pytest.mark.scenario("G2")
def test_g02_a_newcomer_holds_the_same_weights_and_a_loss_costs_no_committed_step(fault: Fault) -> None:
    join_and_lose("cpu", fault)


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_a_newcomer_holds_the_same_weights_on_a_gpu(device: str, fault: Fault) -> None:
    join_and_lose(device, fault)


def join_and_lose(device: str, fault: Fault) -> None:
    holds = {6: 2, 15: 3} if fault.on else {}
    run = Run(train, (STEPS, holds), room=2, device=device, num_workers=2, max_workers=3)
    run.at(3, lambda: fault(run.cluster.add_room, 1))
    run.at(10, lambda: fault(run.cluster.kill, min(run.cluster.slots())))
    results = run.results()
    assert_exact(results)
    assert {result["device"] for result in results} == {device}
    assert [result["rank"] for result in results] == list(range(len(results)))
    assert run.sizes()[:3] == [2, 3, 2]
    steps = max((result["trained"] for result in results), key=len)
    assert len(steps) - len(set(steps)) <= 1, "more than the step in flight was taken again"


@pytest.mark.parametrize("planned", [True, False], ids=["a planned change", "a loss"])
def test_a_planned_change_costs_no_step_and_a_loss_those_since_the_commit(
    planned: bool, fault: Fault
) -> None:
    run = Run(count, (STEPS, 4, planned, {15: 2}), room=3, num_workers=3)
    strike = run.drain if planned else run.cluster.kill
    run.at(9, lambda: fault(strike, max(run.cluster.slots())))
    results = run.results()
    assert {result["number"] for result in results} == {STEPS}
    assert run.sizes()[:2] == [3, 2]
    steps = results[0]["trained"]
    assert set(steps) == set(range(STEPS))
    assert len(steps) - STEPS <= (0 if planned else 4)


def test_r21_nobody_waits_for_what_others_exchange_outside_of_the_loop(fault: Fault, tmp_path: Path) -> None:
    """One worker comes while the first world is before its loop, another one while the others are inside of theirs; the
    last loss comes after the loop."""
    go = tmp_path / "go"
    run = Run(exchange_around, (str(go),), room=3, num_workers=2, max_workers=3)

    def lose(last: bool) -> None:
        fault(run.workers()[-1].kill)
        if last:
            go.touch()

    run.at(6, lambda: lose(last=False))
    run.at(20, lambda: lose(last=True))
    results = run.results()
    assert run.sizes()[:4] == [2, 3, 2, 3]
    for before, size, after in results:
        assert before == list(range(size))
        assert after == list(range(len(results)))


def test_max_runtime_ends_the_job() -> None:
    with pytest.raises(TimeLimitReached, match=r"had its 2 s \(max_runtime\)"):
        Run(count, (100_000, 1), room=2, num_workers=2, max_runtime=2.0).results()


SCRIPT = """
import os, pickle, sys
class Kept:
    pass
print("argument", sys.argv[1:], __name__, os.environ["RANK"], os.environ["FLAG"], flush=True)
assert isinstance(pickle.loads(pickle.dumps(Kept())), Kept)
sys.exit(0)
"""


def test_a_script_runs_as_main_with_its_arguments(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    run = Run(path, "--lr", 0.1, room=2, num_proc=2, env={"FLAG": "set"})
    assert run.results() == [None, None]
    said = sorted(line for line in run.lines.getvalue().splitlines() if "argument" in line)
    assert said == [f"[{r}] argument ['--lr', '0.1'] __main__ {r} set" for r in (0, 1)]


def return_value(value: Any) -> Any:
    import os

    return value, int(os.environ["RANK"]), os.environ.get("OMP_NUM_THREADS")


def test_results_are_any_objects_in_rank_order() -> None:
    run = Run(return_value, ({1, 2},), room=3, num_workers=3, env={"OMP_NUM_THREADS": "3"})
    assert run.results() == [({1, 2}, rank, "3") for rank in range(3)]


def raise_on_rank_1(done: str) -> None:
    import os
    import time

    if os.environ["RANK"] == "0":
        Path(done).touch()
        return
    while not Path(done).exists():
        time.sleep(0.02)
    raise ValueError("rank 1's own mistake")


def test_r15_an_exception_after_rank_0_returned_ends_the_job(tmp_path: Path) -> None:
    run = Run(raise_on_rank_1, (str(tmp_path / "done"),), room=2, num_workers=2)
    with pytest.raises(WorkerFailed, match="rank 1's own mistake"):
        run.results()
    assert "ValueError: rank 1's own mistake" in run.lines.getvalue()


def break_every_world() -> None:
    from elastic_collectives import CollectiveError
    from spark_elastic.handwritten.elastic_loop import elastic
    from spark_elastic.handwritten.object_state import ObjectState

    def loop(state: Any) -> None:
        if state.step:
            raise CollectiveError("it broke for the test")
        state.step += 1
        state.commit()
        loop(state)

    elastic(loop)(ObjectState(step=0))


def test_r13_worlds_that_break_without_progress_end_the_job_with_the_workers_reason() -> None:
    expected = r"worlds in a row.* step 1 although no worker was lost.* it broke for the test"
    with pytest.raises(WorkerFailed, match=expected):
        Run(break_every_world, room=2, num_workers=2, driver_timeout=6.0).results()


def return_lock() -> Any:
    import threading

    return threading.Lock()


def test_a_result_that_cannot_be_pickled_is_one_sentence() -> None:
    with pytest.raises(WorkerFailed, match="cannot be pickled"):
        Run(return_lock, room=1, num_workers=1).results()
