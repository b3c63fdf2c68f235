"""R5 and P4: a receiver takes the state over bit by bit, or keeps its own."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elastic_collectives import CollectiveError, Group
from spark_elastic.errors import StoreError
from spark_elastic.protocol.types import START, Phase, Position
from spark_elastic.training.progress import TrainingProgress
from spark_elastic.training.torch.state import TorchTrainingState
from spark_elastic.training.trainer import sync_state
from tests.unit.torch.worlds import run_in_world

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(2))


class Net(nn.Module):
    """Tied weights, and buffers of every awkward kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.tied = self.first
        self.register_buffer("flag", torch.tensor(False))
        self.register_buffer("coarse", torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("secret", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.tied(self.norm(self.first(x)))


NET = Net()


def state(kind: Any = torch.optim.Adam, **arguments: Any) -> TorchTrainingState:
    model = copy.deepcopy(NET)
    optimizer = kind(model.parameters(), lr=0.1, **arguments)
    return TorchTrainingState(model, optimizer, [torch.optim.lr_scheduler.StepLR(optimizer, 1)])


def train(trained: TorchTrainingState, steps: int = 2) -> TorchTrainingState:
    for _ in range(steps):
        trained.optimizer.zero_grad()
        trained.model(X).pow(2).sum().backward()
        trained.optimizer.step()
        trained.schedulers[0].step()
    buffers = dict(trained.model.named_buffers())
    buffers["flag"].fill_(True)
    buffers["coarse"].fill_(0.3)
    buffers["secret"].fill_(4)
    trained.progress = TrainingProgress(history=[{"loss": 1.5}])
    trained.position = Position(1, Phase.TRAIN, 7)
    return trained


OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.NAdam, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.Adagrad, {}),
]


@pytest.mark.parametrize(("kind", "arguments"), OPTIMIZERS)
def test_r05_p4_a_newcomer_continues_as_the_source_does(kind: Any, arguments: dict[str, Any]) -> None:
    """Rank 2 has a fresh state, without any of the tensors that an optimizer makes at its first step."""

    def work(group: Group) -> tuple[str, str, Any]:
        mine = state(kind, **arguments) if group.rank == 2 else train(state(kind, **arguments))
        identities = [id(p) for p in mine.model.parameters()]
        assert sync_state(mine, group, source=1, receives=group.rank == 2) == Position(1, Phase.TRAIN, 7)
        assert [id(p) for p in mine.model.parameters()] == identities
        taken, progress, secret = mine.digest(), str(mine.progress), mine.model.get_buffer("secret").tolist()
        train(mine, 1)
        return taken, mine.digest(), (progress, secret, mine.optimizer.param_groups[0]["lr"])

    done = run_in_world(3, work)
    assert done[0] == done[1] == done[2]


def test_p4_optimizer_tensors_keep_their_dtype() -> None:
    """torch casts them to the parameter's dtype when it loads: a counter of 2^24 + 1 would be rounded."""

    def work(group: Group) -> tuple[Any, str]:
        mine = train(state()) if group.rank == 0 else state()
        if group.rank == 0:
            mine.optimizer.state[next(iter(mine.model.parameters()))]["count"] = torch.tensor(2**24 + 1)
        sync_state(mine, group, 0, group.rank == 1)
        return mine.optimizer.state[next(iter(mine.model.parameters()))]["count"], mine.digest()

    (ours, one), (theirs, other) = run_in_world(2, work)
    assert ours.dtype == theirs.dtype
    assert int(theirs) == 2**24 + 1
    assert one == other


def test_r05_ranks_that_do_not_receive_keep_their_state() -> None:
    def work(group: Group) -> Position:
        return sync_state(train(state()) if group.rank == 0 else state(), group, 0, False)

    assert run_in_world(2, work) == [Position(1, Phase.TRAIN, 7), START]


@pytest.mark.parametrize("at", range(1, 4))
def test_r05_a_sync_that_breaks_leaves_the_old_state(at: int) -> None:
    """The receiver's group fails at its at-th broadcast, or (4 bytes later) hands over garbled bytes."""

    def work(group: Group) -> None:
        mine = train(state()) if group.rank == 0 else state()
        before = mine.digest()
        group.barrier()  # connects the two: an abort tells connected peers

        class Failing:
            rank, size, calls = group.rank, group.size, 0

            def broadcast(self, array: Any, root: int) -> None:
                self.calls += 1
                if self.calls == at:
                    group.abort("for the test")
                group.broadcast(array, root)

        with pytest.raises(CollectiveError):  # noqa: PT012 - where it shows depends on who is faster
            sync_state(mine, Failing() if group.rank else group, 0, group.rank == 1)  # type: ignore[arg-type]
            group.barrier()  # the sender may have sent all before it hears
        assert mine.digest() == before
        assert mine.position == (START if group.rank else Position(1, Phase.TRAIN, 7))

    run_in_world(2, work)


@pytest.mark.parametrize("at", [2, 3])
def test_r05_a_state_that_is_damaged_in_transit_is_refused(at: int) -> None:
    def work(group: Group) -> None:
        mine = train(state()) if group.rank == 0 else state()
        before = mine.digest()

        class Garbling:
            rank, size, calls = group.rank, group.size, 0

            def broadcast(self, array: Any, root: int) -> None:
                self.calls += 1
                group.broadcast(array, root)
                if self.calls == at:
                    array[len(array) // 2] ^= np.uint8(1)

        if group.rank == 0:
            sync_state(mine, group, 0, group.rank == 1)
        else:
            with pytest.raises(StoreError, match="not the one that was sent"):
                sync_state(mine, Garbling(), 0, True)  # type: ignore[arg-type]
        assert mine.digest() == before

    run_in_world(2, work)


def test_p4_the_digest_covers_weights_buffers_and_optimizer() -> None:
    seen = {train(state()).digest()}
    assert train(state()).digest() in seen
    for change in (
        lambda s: s.model.first.bias.data.mul_(1.0000001),
        lambda s: s.model.get_buffer("flag").fill_(False),
        lambda s: next(iter(s.optimizer.state.values()))["exp_avg"].mul_(1.0000001),
    ):
        other = train(state())
        change(other)
        seen.add(other.digest())
    assert len(seen) == 4
