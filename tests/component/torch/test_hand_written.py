"""`run` and hand-written loops on real processes: joins, losses and drains; P7, with a run_id."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from spark_elastic.data.store import Store, list_entries
from spark_elastic.errors import TimeLimitReached, WorkerFailed
from spark_elastic.protocol.driver import forming
from spark_elastic.protocol.driver.forming import check_max_runtime
from spark_elastic.runs.checkpoint import CheckpointStore
from tests.component.injected_faults import kill
from tests.component.torch.hand_written import (
    PACE,
    STEPS,
    Run,
    assert_continued,
    assert_exact,
    count,
    exchange_around,
    hold,
    train,
)
from tests.pages import apply_diff, blocks
from tests.patience import until
from tests.scenarios import Fault
from tests.sources import ROOT

pytestmark = [pytest.mark.native, pytest.mark.timeout(300)]


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


@pytest.mark.parametrize("planned", [True, pytest.param(False, marks=pytest.mark.faults)])
def test_a_planned_change_costs_no_step_and_a_loss_those_since_a_commit(planned: bool, fault: Fault) -> None:
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


SCRIPT = """
import os, pickle, sys
class Kept:
    pass
print("argument", sys.argv[1:], __name__, os.environ["RANK"], os.environ["FLAG"], flush=True)
assert isinstance(pickle.loads(pickle.dumps(Kept())), Kept)
sys.exit(0)
"""


def was_forked() -> bool:
    return "spark_elastic.worker.fork_server" in sys.modules


def test_slots_of_these_tests_fork_their_workers() -> None:
    """Or each would import torch anew: minutes of the whole run."""
    assert Run(was_forked, room=1, num_workers=1).results() == [True]


def test_a_script_runs_as_main_with_its_arguments(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    run = Run(path, "--lr", 0.1, room=2, num_proc=2, env={"FLAG": "set"})
    assert run.results() == [None, None]
    said = sorted(line for line in run.lines.getvalue().splitlines() if "argument" in line)
    assert said == [f"[{r}] argument ['--lr', '0.1'] __main__ {r} set" for r in (0, 1)]


def raise_on_rank_1(done: str) -> None:
    import os

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


DRIVER = """
import sys
from tests.component.torch.hand_written import Run, train

given = {"run_id": "mine", "store": sys.argv[1], "checkpoint_steps": 3}
Run(train, (600, {}), room=3, num_workers=3, **given).results()
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
        until(lambda: find_newest_step(tmp_path) >= 9 or first.poll() is not None, 120)
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
    told = again.lines.getvalue()
    begun = re.findall(r"continues from epoch 1, train, step (\d+), as a host's memory", told)
    assert len(begun) == 2, "a world began from a checkpoint"
    assert int(begun[0]) >= step
    assert int(begun[1]) >= step + 8
    assert results[0]["trained"][-1] == steps - 1
    assert find_newest_step(tmp_path) == steps, "the end is not durable"
    assert not is_unfinished(tmp_path)


def test_max_runtime_leaves_a_checkpoint_of_its_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is up once steps were taken, however long the start took."""
    taken_some = threading.Event()
    check = lambda tx: check_max_runtime(tx) or "late" * taken_some.is_set()  # noqa: E731
    monkeypatch.setattr(forming, "check_max_runtime", check)
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


def operations(trace: str) -> dict[str, Any]:
    """In each step ranks ask for sums among all and within two sets, each rank in an order of its own."""
    import random

    import torch

    import spark_elastic.torch as hvd

    sets = {"pair": hvd.ProcessSet([0, 1]), "rest": hvd.ProcessSet([1, 2])}
    hvd.init(process_sets=list(sets.values()))
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
            own = torch.tensor([hvd.rank() + 1])
            sums = {
                name: hvd.allreduce(own, op=hvd.Sum, process_set=among).item()
                for name, among in sets.items()
                if among.included()
            }
            size = hvd.size()
            assert {float(hvd.synchronize(handle)[0]) for handle in handles} == {size * (size + 1) / 2}
            assert sums == {name: sum(rank + 1 for rank in sets[name].ranks) for name in sums}
            worlds.append((size, hvd.get_process_set_ids_and_ranks()))
            state.step += 1
            print(f"step {state.step}", flush=True)  # noqa: T201 - what the test waits for
            state.commit()

    loop(hvd.elastic.ObjectState(step=0))
    hvd.stop_timeline()
    return {"worlds": worlds}


def test_operations_continue_after_a_loss_and_sets_follow_the_world(fault: Fault, tmp_path: Path) -> None:
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


def of_page() -> Callable[[int], Any]:
    before, _ = blocks("moving-from-torchdistributor.md", "python")
    program = apply_diff(before, blocks("moving-from-torchdistributor.md", "diff")[2])
    return define_train(program.replace("import spark_elastic\n", ""))


def of_notebook() -> Callable[[int], Any]:
    cells = json.loads((ROOT / "examples" / "notebooks" / "04-hand-written-loop.ipynb").read_text())["cells"]
    (source,) = ["".join(cell["source"]) for cell in cells if "def train" in "".join(cell["source"])]
    return define_train(source)


def define_train(program: str) -> Callable[[int], Any]:
    """Its function `train`; nothing is run."""
    names: dict[str, Any] = {"spark_elastic": SimpleNamespace(run=lambda *arguments, **named: [])}
    exec(compile(program, "page.py", "exec"), names)
    return names["train"]


def delay_commit(train: Callable[[int], Any], epochs: int, last: str) -> Any:
    """`train`, which awaits its second world in the last commit of an epoch, or in that of its last batch."""
    import spark_elastic.torch as hvd

    class SlowCommitState(hvd.elastic.TorchState):
        def commit(self) -> None:
            batches_done = self.sampler.processed_num >= len(self.sampler.dataset)
            done = self.epoch == epochs if last == "epoch" else batches_done
            if done:
                print("step 1", flush=True)  # noqa: T201 - what the test waits for
                hold(self, 2)
            super().commit()

    hvd.elastic.TorchState = SlowCommitState  # type: ignore[misc]
    return train(epochs)


@pytest.mark.faults
@pytest.mark.parametrize(("program", "last"), [(of_page, "epoch"), (of_notebook, "batch")])
def test_the_documented_loop_keeps_its_loss_without_a_batch(program: Callable[[], Any], last: str) -> None:
    run = Run(delay_commit, (program(), 1, last), room=2, num_workers=2, max_workers=3)
    run.at(1, lambda: run.cluster.add_room(1))
    results = run.results()
    assert run.sizes()[:2] == [2, 3]
    losses = [result[1] if isinstance(result, tuple) else result for result in results]
    assert len(losses) == 3
    assert all(math.isfinite(loss) for loss in losses)


ROWS, EPOCHS, BATCH = 101, 4, 12
LOADER_STEPS = EPOCHS * 9


def train_by_loader(folder: str, holds: dict[int, int | str]) -> dict[str, Any]:
    """A linear net in float64 on rows with noise, and a ledger that is trained with it: a count for each row, to which
    each step adds exactly 1 through its gradient. So the ledger says which rows are in the weights, and how often."""

    import spark_elastic.torch as hvd

    hvd.init()
    drawn = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, 4, generator=drawn, dtype=torch.float64)

    class AugmentedRows(torch.utils.data.TensorDataset):
        def __getitem__(self, row: int) -> tuple[torch.Tensor, ...]:
            place, features, target = super().__getitem__(row)
            return place, features + torch.randn(4, dtype=torch.float64), target

    dataset = AugmentedRows(torch.arange(ROWS), x, x.sum(dim=1).sin())
    torch.manual_seed(7)
    model = torch.nn.Linear(4, 1).double()
    model.register_parameter("ledger", torch.nn.Parameter(torch.zeros(ROWS, dtype=torch.float64)))
    weights = [model.weight, model.bias]
    groups = [{"params": weights, "momentum": 0.9}, {"params": [model.ledger], "lr": 1.0}]
    optimizer = torch.optim.SGD(groups, lr=0.05)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    loader = hvd.elastic.ElasticDataLoader(dataset, BATCH, seed=5, determinism="rows", num_workers=1)
    trained: list[int] = []
    processes: list[int] = []

    @hvd.elastic.run
    def loop(state: Any) -> None:
        while loader.epoch < EPOCHS:
            for rows, features, targets in loader:
                children = [child.pid for child in psutil.Process().children()]
                processes.append(len(children))
                for pid in children:
                    Path(folder, str(pid)).touch()
                time.sleep(0.02)
                optimizer.zero_grad()
                loss = (model(features).squeeze(1) - targets).pow(2).mean()
                ledger = -model.ledger[rows].mean() * loader.global_rows
                ((loss + ledger) * loader.loss_weight).backward()
                optimizer.step()
                trained.append(state.step)
                state.step += 1
                print(f"step {state.step}", flush=True)  # noqa: T201 - what the test waits for
                state.commit()
                hold(state, holds[state.step]) if state.step in holds else None

    state: Any = hvd.elastic.TorchState(model, optimizer, loader=loader, step=0)
    loop(state)
    optimizer.close()
    return {
        "weights": torch.cat([p.detach().reshape(-1) for p in weights]).tolist(),
        "ledger": model.ledger.tolist(),
        "trained": trained,
        "processes": max(processes),
        "epoch": loader.epoch,
    }


@pytest.mark.scenario("G2")
def test_p1_p2_each_row_is_in_the_weights_once_per_epoch_in_any_worlds(fault: Fault, tmp_path: Path) -> None:
    undisturbed, disturbed = tmp_path / "one", tmp_path / "two"
    undisturbed.mkdir()
    disturbed.mkdir()
    alone = train_by_loader(str(undisturbed), {})
    holds: dict[int, int | str] = {16: 2, 26: 3} if fault.on else {}
    run = Run(train_by_loader, (str(disturbed), holds), room=2, num_workers=2, max_workers=2)
    run.at(6, lambda: fault(run.workers()[0].kill))
    results = run.results()
    assert run.sizes()[0] == 2
    assert alone["trained"] == list(range(LOADER_STEPS))
    assert_continued(run, results, alone, EPOCHS)
    for result in results:
        assert result["ledger"] == results[0]["ledger"]
        assert result["processes"] == 1, "processes of a former world live on"
        assert result["epoch"] == EPOCHS
    pids = [int(path.name) for path in disturbed.iterdir()]
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
