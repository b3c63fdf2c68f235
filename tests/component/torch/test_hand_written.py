"""`run` and hand-written loops on real processes: joins, losses and drains in the middle of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from spark_elastic.errors import TimeLimitReached, WorkerFailed
from tests.component.injected_faults import kill
from tests.component.torch.hand_written import STEPS, Run, assert_exact, count, exchange_around, hold, train
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


@pytest.mark.parametrize(("commit_every", "check"), [(1, False), (4, True)])
def test_a_planned_change_loses_no_step_whatever_was_committed(
    fault: Fault, commit_every: int, check: bool
) -> None:
    run = Run(count, (STEPS, commit_every, check, {15: 2}), room=3, num_workers=3)
    run.at(6, lambda: fault(run.drain, max(run.cluster.slots())))
    results = run.results()
    assert {result["number"] for result in results} == {STEPS}
    assert run.sizes()[:2] == [3, 2]
    assert results[0]["trained"] == list(range(STEPS))


@pytest.mark.parametrize("commit_every", [1, 4])
def test_a_loss_costs_at_most_the_steps_since_the_last_commit(fault: Fault, commit_every: int) -> None:
    run = Run(count, (STEPS, commit_every, False, {15: 2}), room=3, num_workers=3)
    run.at(9, lambda: fault(run.cluster.kill, max(run.cluster.slots())))
    results = run.results()
    assert {result["number"] for result in results} == {STEPS}
    assert run.sizes()[:2] == [3, 2]
    steps = results[0]["trained"]
    assert set(steps) == set(range(STEPS))
    assert len(steps) - STEPS <= commit_every


def test_all_workers_but_one_die_and_their_spares_take_over(fault: Fault, tmp_path: Path) -> None:
    go = tmp_path / "go"
    run = Run(count, (STEPS, 1, False, {12: str(go)}), room=3, spares=True, num_workers=3)

    def inject_fault() -> None:
        for worker in run.workers()[1:]:
            fault(worker.kill)
        go.touch()

    run.at(8, inject_fault)
    results = run.results()
    assert {result["number"] for result in results} == {STEPS}
    assert len(run.sizes()) >= 2


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


def train_unelastic(folder: str, go: str) -> tuple[str, int, int]:
    """Does not know that it is elastic: sums the ranks again and again, once there is a file `go` to the end."""
    import os
    import time
    import uuid

    import numpy as np

    from spark_elastic.worker.context import get_context

    worker = get_context()
    assert worker is not None
    assert worker.group is not None
    (Path(folder) / f"{uuid.uuid4()}").write_text(f"{os.environ['RANK']} of {os.environ['WORLD_SIZE']}")
    for step in range(20):
        hold(None, go if step == 12 else None)
        time.sleep(0.05)
        total = np.ones(1)
        worker.group.allreduce(total)
        print(f"step {step}", flush=True)  # noqa: T201 - what the test waits for
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) > 0, int(total[0])


def test_a_function_that_is_not_elastic_begins_again_after_a_loss(fault: Fault, tmp_path: Path) -> None:
    folder, go = tmp_path / "calls", tmp_path / "go"
    folder.mkdir()
    run = Run(train_unelastic, (str(folder), str(go)), room=2, num_workers=2)

    def inject_fault() -> None:
        fault(kill, run.cluster, max(run.cluster.slots()))
        go.touch()

    run.at(5, inject_fault)
    results = run.results()
    assert results[0] == ("127.0.0.1", True, len(results))
    calls = sorted(path.read_text() for path in folder.iterdir())
    assert calls[0] == "0 of 1" or calls.count("0 of 2") == 2
    assert len(calls) >= 3


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


def test_a_script_with_a_nonzero_exit_code_fails_the_job(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import sys\nsys.exit(3)\n")
    with pytest.raises(WorkerFailed, match="SystemExit: 3"):
        Run(path, room=1, num_workers=1).results()


def raise_error() -> None:
    raise ValueError("the user's own mistake")


def return_value(value: Any) -> Any:
    import os

    return value, int(os.environ["RANK"]), os.environ.get("OMP_NUM_THREADS")


def test_results_are_any_objects_in_rank_order() -> None:
    run = Run(return_value, ({1, 2},), room=3, num_workers=3, env={"OMP_NUM_THREADS": "3"})
    assert run.results() == [({1, 2}, rank, "3") for rank in range(3)]


def test_the_users_exception_ends_the_job_with_its_traceback() -> None:
    with pytest.raises(WorkerFailed, match="the user's own mistake"):
        Run(raise_error, room=2, num_workers=2).results()


def raise_on_rank_1(done: str) -> None:
    import os

    if os.environ["RANK"] == "0":
        Path(done).touch()
        return
    hold(None, done)
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
    from spark_elastic.handwritten.session import get_session

    def loop(state: Any) -> None:
        if state.step:
            raise CollectiveError("it broke for the test")
        state.step += 1
        state.commit()
        loop(state)

    elastic(loop, get_session)(ObjectState(step=0))


def test_r13_worlds_that_break_without_progress_end_the_job_with_the_workers_reason() -> None:
    expected = r"worlds in a row.* step 1 although no worker was lost.* it broke for the test"
    with pytest.raises(WorkerFailed, match=expected):
        Run(break_every_world, room=2, num_workers=2, driver_timeout=10.0).results()


def return_lock() -> Any:
    import threading

    return threading.Lock()


def test_a_result_that_cannot_be_pickled_is_one_sentence() -> None:
    with pytest.raises(WorkerFailed, match="cannot be pickled"):
        Run(return_lock, room=1, num_workers=1).results()


def reduce_mismatched() -> None:
    import numpy as np

    from spark_elastic.worker.context import get_context

    worker = get_context()
    assert worker is not None
    assert worker.group is not None
    worker.group.allreduce(np.ones(2 + worker.group.rank))


def test_collectives_that_do_not_match_end_the_job_after_few_worlds() -> None:
    with pytest.raises(WorkerFailed, match="collectives do not match"):
        Run(reduce_mismatched, room=2, num_workers=2).results()
