"""`ElasticDataLoader` in a hand-written loop on real processes: a worker is killed, and another one takes its place."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
import torch

from tests.component.torch.hand_written import Run, assert_continued, hold
from tests.patience import until
from tests.scenarios import Fault

pytestmark = [pytest.mark.native, pytest.mark.timeout(240)]

for name in (__name__, hold.__module__):
    cloudpickle.register_pickle_by_value(sys.modules[name])

ROWS, EPOCHS, BATCH = 101, 4, 12
STEPS = EPOCHS * 9


def train(folder: str, holds: dict[int, int | str]) -> dict[str, Any]:
    """A linear net in float64 on rows with noise, and a ledger that is trained with it: a count for each row, to which
    each step adds exactly 1 through its gradient. So the ledger says which rows are in the weights, and how often."""
    import time

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
    optimizer = torch.optim.SGD(
        [{"params": weights, "momentum": 0.9}, {"params": [model.ledger], "lr": 1.0}], lr=0.05
    )
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
def test_p1_p2_each_row_is_in_the_weights_once_per_epoch_whatever_the_world_did(
    fault: Fault, tmp_path: Path
) -> None:
    undisturbed, disturbed = tmp_path / "one", tmp_path / "two"
    undisturbed.mkdir()
    disturbed.mkdir()
    alone = train(str(undisturbed), {})
    holds: dict[int, int | str] = {16: 2, 26: 3} if fault.on else {}
    run = Run(train, (str(disturbed), holds), room=2, num_workers=2, max_workers=2)
    run.at(6, lambda: fault(run.workers()[0].kill))
    results = run.results()
    assert run.sizes()[0] == 2
    assert alone["trained"] == list(range(STEPS))
    assert_continued(run, results, alone, EPOCHS)
    for result in results:
        assert result["ledger"] == results[0]["ledger"]
        assert result["processes"] == 1, "processes of a former world live on"
        assert result["epoch"] == EPOCHS
    pids = [int(path.name) for path in disturbed.iterdir()]
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
