"""A loss that compares all rows of a step: as one process computes it, in any world and in parts of any size."""

from __future__ import annotations

import copy
from contextlib import closing
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from elastic_collectives import CollectiveError, Group
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.generators import borrow_rng
from spark_elastic.protocol.types import START
from spark_elastic.training.torch.loss import MultiOutputLoss
from spark_elastic.training.torch.metrics import Metrics
from tests.unit.torch.train.trainees import ROWS, TrainedModel, X, Y, have_equal_values, train_plain
from tests.unit.torch.worlds import run_in_world

WEIGHTS = torch.rand(ROWS, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def divide_rows(group: Group) -> range:
    return range(ROWS * group.rank // group.size, ROWS * (group.rank + 1) // group.size)


def take_steps(group: Group, model: nn.Module, loss: Any, steps: int = 1) -> tuple[TrainedModel, Any]:
    """With the newest decision."""
    trainee = TrainedModel(model, loss=loss, loss_scope="step")
    with closing(trainee.exchange):
        for _ in range(steps):
            decision = trainee.take(group, divide_rows(group))
    return trainee, decision


class TwoTowers(nn.Module):
    """As CLIP: two embeddings, and a scale that is trained and returned with them."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, 4).double(), nn.Linear(5, 4).double()
        self.scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"left": self.left(x), "right": self.right(x.sin()), "scale": self.scale.exp()}


def compare_towers(output: Any, label: torch.Tensor) -> torch.Tensor:
    left, right = (nn.functional.normalize(output[name]) for name in ("left", "right"))
    pairs = output["scale"] * left @ right.T
    return nn.functional.cross_entropy(pairs, torch.arange(len(label)))


def correlate(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """As Barlow Twins: of numbers of the whole batch."""
    apart = (output - output.mean(0)) / output.std(0)
    return (apart.T @ apart / len(apart) - torch.eye(apart.shape[1])).square().sum()


def compute_dice(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    share, wanted = output[:, 0].sigmoid(), label > 0
    return 1 - 2 * (share * wanted).sum() / (share.sum() + wanted.sum())


NET = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4)).double()
torch.manual_seed(0)
TOWERS = TwoTowers()


@pytest.mark.native
@pytest.mark.parametrize(
    ("model", "loss"),
    [(TOWERS, compare_towers), (NET, correlate), (NET, compute_dice)],
    ids=["clip", "barlow", "dice"],
)
def test_r08_r09_the_loss_of_a_step_is_that_of_one_process_in_any_world(model: nn.Module, loss: Any) -> None:
    """In parts of up to 3 rows; 12 ranks for 10 rows: two have none."""

    once, twice = train_plain(model, 1, loss), train_plain(model, 2, loss)
    for size in (1, 3, 8, 12):
        done = run_in_world(size, partial(take_steps, model=model, loss=loss, steps=2))
        assert len({trainee.state.digest() for trainee, _ in done}) == 1
        trainee, decision = done[0]
        assert have_equal_values(trainee.model, twice)
        assert (decision.rows, decision.denominator) == (ROWS, ROWS)
        assert decision.loss / ROWS == pytest.approx(loss(once(X), Y).item(), rel=1e-12)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.unit, self.head = NET, nn.Linear(4, 4).double(), nn.Linear(4, 3).double()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        body = self.body(x)
        return nn.functional.normalize(self.unit(body)), self.head(body)


def compare_pairs(unit: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """A number for each row."""
    return nn.functional.cross_entropy(unit @ unit.T / 0.3, torch.arange(len(unit)), reduction="none")


@pytest.mark.native
def test_r08_weights_of_rows_and_several_losses_count_once() -> None:
    """With numbers of each loss, and metrics of the whole step."""
    model, classes = TwoHeads(), torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)

    def work(group: Group) -> tuple[nn.Module, Any, dict[str, Any]]:
        losses = {"a": (compare_pairs, 0.3), "b": (nn.CrossEntropyLoss(classes), 0.7)}
        metrics = Metrics({"mean": lambda output, label: output.mean()}, ["a", "b"], logs=True)
        loss = MultiOutputLoss(losses, weighted=True)
        trainee = TrainedModel(model, loss=loss, metrics=metrics, labels=2, loss_scope="step")
        decision = trainee.take(group, divide_rows(group), weights=WEIGHTS)
        trainee.exchange.close()
        return trainee.model, decision, metrics.results()

    def compute_loss(outputs: Any, label: torch.Tensor) -> torch.Tensor:
        rows, divisors = compare_pairs(outputs[0], label), WEIGHTS * classes[label]
        by_class = nn.functional.cross_entropy(outputs[1], label, classes, reduction="none")
        first, second = (rows * WEIGHTS).sum() / WEIGHTS.sum(), (by_class * WEIGHTS).sum() / divisors.sum()
        return 0.3 * first + 0.7 * second

    plain = train_plain(model, 1, compute_loss)
    with torch.no_grad():
        outputs = model(X)
    for size in (1, 3, 12):
        for trained, decision, numbers in run_in_world(size, work):
            assert have_equal_values(trained, plain)
            mean = decision.loss / decision.denominator
            assert mean == pytest.approx(compute_loss(outputs, Y).item(), rel=1e-12)
            expected = (compare_pairs(outputs[0], Y) * WEIGHTS).sum() / WEIGHTS.sum()
            assert numbers["loss_a"] == pytest.approx(expected.item(), rel=1e-12)
            assert numbers["mean_b"] == pytest.approx(outputs[1].mean().item(), rel=1e-12)


class Layers(nn.Module):
    """Layers that draw, that write buffers, and one whose output depends on what its passes before have written."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.norm = nn.Linear(5, 6), nn.Dropout(0.4), nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 4)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.detach().abs().mean()
        self.passes += 1
        hidden: torch.Tensor = self.last(self.norm(self.drop(self.first(x)))) * (1 + self.seen) + self.passes
        return hidden


@pytest.mark.native
def test_parts_that_run_twice_draw_the_same_numbers_and_write_buffers_once() -> None:
    model = Layers().double()
    ((trainee, _),) = run_in_world(1, partial(take_steps, model=model, loss=correlate))
    plain = copy.deepcopy(model)
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01, weight_decay=0.1)
    with borrow_rng() as seed:
        outputs = []
        for number in range(4):
            seed(0, START.epoch, START.phase, START.step, 0, number)
            outputs.append(plain(X[ROWS * number // 4 : ROWS * (number + 1) // 4]))
    correlate(torch.cat(outputs), Y).backward()
    nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    optimizer.step()
    assert have_equal_values(trainee.model, plain)
    assert trainee.model.passes == 4


@pytest.mark.native
@pytest.mark.parametrize("place", ["outputs", "gradients"])
def test_r03_a_step_that_ends_in_the_middle_leaves_nothing_behind(place: str) -> None:
    """A peer is lost while outputs are gathered, or while a part is computed again."""
    model = Layers().double()

    def work(group: Group) -> TrainedModel:
        trainee, fails = TrainedModel(model, loss=correlate, loss_scope="step"), [True]

        def fail(*_: Any) -> None:
            if place == "gradients" and trainee.model.passes < 4 and fails and gathered:
                fails.clear()
                raise CollectiveError("a peer is gone")

        class Breaking:
            rank, size, fence = 0, 1, group.fence
            allgather = group.allgather

            def allgather_bytes(self, blob: bytes) -> list[bytes]:
                gathered.append(blob)
                if place == "outputs" and fails:
                    fails.clear()
                    raise CollectiveError("a peer is gone")
                return [blob]

        gathered: list[bytes] = []
        trainee.model.norm.register_forward_hook(fail)
        before = trainee.state.digest(), copy.deepcopy(trainee.model.state_dict()), trainee.model.passes
        with pytest.raises(CollectiveError):
            trainee.take(Breaking(), range(ROWS))  # type: ignore[arg-type]
        assert (trainee.state.digest(), trainee.model.passes) == (before[0], before[2])
        assert all(torch.equal(value, before[1][name]) for name, value in trainee.model.state_dict().items())
        trainee.take(group, range(ROWS))
        trainee.exchange.close()
        return trainee

    (disturbed,) = run_in_world(1, work)
    ((alone, _),) = run_in_world(1, partial(take_steps, model=model, loss=correlate))
    assert disturbed.state.digest() == alone.state.digest()


@pytest.mark.native
def test_outputs_that_do_not_make_one_of_all_rows_are_refused() -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 4).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).sum(0)

    def work(group: Group) -> None:
        with pytest.raises(InvalidInput, match=r"^loss_scope='step' joins .* has shape \(4,\) for 2 rows"):
            take_steps(group, Sums(), lambda output, label: output.sum())

    run_in_world(2, work)
