"""A training with FSDP2 whose workers kill themselves by plan, and how it is judged."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch

from tests.component.torch.hand_written import await_size

ROWS, BATCH, STEPS_PER_EPOCH = 60, 12, 5


class Net(torch.nn.Module):
    """A ledger is trained with it: a count for each row, to which each step adds exactly 1 through its gradient."""

    def __init__(self) -> None:
        super().__init__()
        layers = [torch.nn.Linear(4, 7), torch.nn.Tanh(), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 1)]
        self.layers = torch.nn.Sequential(*layers)
        self.layers[2].eval()  # its statistics stay; what it has are buffers
        self.ledger = torch.nn.Parameter(torch.zeros(ROWS))

    def forward(self, x: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layers(x), self.ledger[rows]


class Plan:
    """Who kills itself where: (place, step, ranks), each once in the whole job.

    Places: "step", between a commit and the optimizer's step; "copies", before a shard is sent to where its copy lies;
    "complete", before a commit counts; "build"; "divide", in the middle of dividing a commit anew. The last two strike
    in the first world of all workers that begins at that step; "divide again" also in a smaller one.
    """

    def __init__(self, folder: str, blows: list[tuple[str, int, tuple[int, ...]]], full: int) -> None:
        self._folder = folder
        self._blows = blows
        self._full = full

    def wait(self, state: Any) -> None:
        """Before a blow all workers are there again."""
        if any(step == state.step for _, step, _ in self._blows):
            await_size(state, self._full)

    def inject_fault(self, place: str, step: int, group: Any) -> None:
        for number, (where, at, ranks) in enumerate(self._blows):
            due = at == step and (group.size == self._full or where == "divide again")
            if where.split()[0] != place or not due or group.rank not in ranks:
                continue
            try:
                open(f"{self._folder}/{number}-{group.rank}", "x").close()
            except FileExistsError:
                continue
            os.kill(os.getpid(), signal.SIGKILL)


def train(
    folder: str, blows: list[tuple[str, int, tuple[int, ...]]], full: int, epochs: int
) -> dict[str, Any]:
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    import spark_elastic.torch as hvd
    from spark_elastic.handwritten.fsdp import FSDPState
    from spark_elastic.handwritten.sharded_commits import ShardedCommits
    from spark_elastic.worker.context import get_context

    hvd.init()
    torch.set_num_threads(1)
    in_job = get_context() is not None
    plan = Plan(folder, blows, full)
    drawn = torch.Generator().manual_seed(3)
    x = torch.randn(ROWS, 4, generator=drawn, dtype=torch.float64)
    dataset = torch.utils.data.TensorDataset(torch.arange(ROWS), x, x.sum(dim=1, keepdim=True).sin())
    loader = hvd.elastic.ElasticDataLoader(dataset, BATCH, seed=5)

    def build(state: Any) -> dict[str, Any]:
        torch.manual_seed(7)
        model = Net().double()
        if in_job:
            dist.init_process_group()
            plan.inject_fault("build", state.step, get_context().group)  # type: ignore[union-attr]
            fully_shard(model.layers[0])
            fully_shard(model)
        optimizer = torch.optim.AdamW(model.layers.parameters(), lr=0.05)
        counter = torch.optim.SGD([model.ledger], lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.9)
        return {"model": model, "optimizer": optimizer, "counter": counter, "scheduler": scheduler}

    @hvd.elastic.run
    def loop(state: Any) -> dict[str, Any]:
        plan.wait(state)
        while loader.epoch < epochs:
            for rows, features, targets in loader:
                state.optimizer.zero_grad()
                state.counter.zero_grad()
                predictions, ledger = state.model(features, rows)
                loss = (predictions - targets).pow(2).mean() - ledger.mean() * loader.global_rows
                if in_job:
                    plan.inject_fault("step", state.step, get_context().group)  # type: ignore[union-attr]
                (loss * loader.loss_weight).backward()
                for stepper in (state.optimizer, state.counter, state.scheduler):
                    stepper.step()
                state.step += 1
                state.commit()
                plan.wait(state)
        whole = {
            name: (p.full_tensor() if in_job else p).detach().flatten().tolist()
            for name, p in state.model.named_parameters()
        }
        ledger = whole.pop("ledger")
        weights = [value for values in whole.values() for value in values]
        return {"weights": weights, "ledger": ledger, "step": state.step}

    state = FSDPState(build, loader=loader, step=0)
    places = {"copies": "_exchange_copies", "divide": "_redistribute", "complete": "keep_only"}
    for place, name in places.items():
        method = getattr(ShardedCommits, name)

        def call_with_fault(self: Any, *given: Any, place: str = place, method: Any = method) -> Any:
            plan.inject_fault(place, state.step, get_context().group)  # type: ignore[union-attr]
            return method(self, *given)

        setattr(state._commits, name, call_with_fault.__get__(state._commits))
    return loop(state)


def assert_exact(results: list[dict[str, Any]], alone: dict[str, Any], epochs: int) -> None:
    """P1, P2 and P4."""
    expected = torch.tensor(alone["weights"], dtype=torch.float64)
    for result in results:
        assert result["weights"] == results[0]["weights"]
        assert result["step"] == epochs * STEPS_PER_EPOCH
        got = torch.tensor(result["weights"], dtype=torch.float64)
        assert float((got - expected).abs().max() / expected.abs().max()) < 1e-9
        counts = torch.tensor(result["ledger"], dtype=torch.float64)
        assert float((counts - epochs).abs().max()) < 1e-9, "a row was left out, or taken twice"
