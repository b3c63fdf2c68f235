"""A step of the whole world: as one process takes it, whole or not at all."""

from __future__ import annotations

import copy
import signal
import threading
from collections.abc import Iterator
from functools import partial, wraps
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from elastic_collectives import CollectiveError, Group
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.exchange import GradientExchange
from spark_elastic.gradients.generators import borrow_rng
from spark_elastic.gradients.modes import OneBucketMode
from spark_elastic.gradients.step_summary import count_summary_bytes
from spark_elastic.protocol.types import START, MembershipVersion, Phase, Position
from spark_elastic.training.batch import LocalBatch
from spark_elastic.training.torch.loss import MultiOutputLoss
from spark_elastic.training.torch.metrics import Metrics
from spark_elastic.training.torch.step import GradientScaling, is_plain_optimizer, take_step
from spark_elastic.training.trainer import DeferredInterrupts, StepCall
from tests.unit.training.torch.trainees import (
    NEXT,
    ROWS,
    TrainedModel,
    X,
    Y,
    divide_rows,
    have_equal_values,
    take_steps,
    train_plain,
)
from tests.worlds import run_in_world

NET = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
NORMED = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()


@pytest.mark.parametrize("one_bucket", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 12])
def test_r08_a_world_of_any_size_takes_the_step_of_one_process(size: int, one_bucket: bool) -> None:
    """12 ranks for 10 rows: two have none."""

    done = run_in_world(size, partial(take_steps, model=NET, steps=2, one_bucket=one_bucket))
    assert len({trainee.state.digest() for trainee, _ in done}) == 1
    trainee, decision = done[0]
    assert isinstance(trainee.mode, OneBucketMode) == (one_bucket and size > 1)
    assert (decision.rows, decision.denominator) == (ROWS, ROWS)
    assert have_equal_values(trainee.model, train_plain(NET, 2))


@pytest.mark.parametrize("one_bucket", [False, True])
def test_r08_unused_and_frozen_parameters_are_left_alone(one_bucket: bool) -> None:
    """Weight decay moves whatever has a gradient, be it zero."""

    class NetWithUnusedLayer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused, self.frozen = (nn.Linear(5, 3).double() for _ in range(3))
            self.tied = self.used
            self.frozen.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> Any:
            return self.used(x) + self.tied(x) + self.frozen(x)

    model = NetWithUnusedLayer()
    for trainee, _ in run_in_world(2, partial(take_steps, model=model, one_bucket=one_bucket)):
        assert trainee.model.unused.weight.grad is None  # type: ignore[union-attr]
        assert have_equal_values(trainee.model, train_plain(model))


def test_r09_dropout_differs_by_rank_and_generators_stay_equal() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(5, 3).double())

    def masks(own_rank: int) -> list[torch.Tensor]:
        class WorldOfOne:
            rank, size, fence = own_rank, 1, (1, 1)

            def allgather(self, array: Any) -> Any:
                return array[None]

        trainee = TrainedModel(model, batch_size=ROWS)
        seen: list[torch.Tensor] = []
        trainee.model[0].register_forward_hook(lambda module, given, out: seen.append(out == 0))  # type: ignore[index]
        for _ in range(2):
            trainee.take(WorldOfOne(), range(ROWS))  # type: ignore[arg-type]
        trainee.exchange.close()
        return seen

    generator = torch.get_rng_state()
    first, second, again = masks(0), masks(1), masks(0)
    assert torch.equal(torch.get_rng_state(), generator)
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[0], first[1])
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_r02_a_rank_writes_its_ledger_before_it_sends_a_bucket() -> None:
    trainee = TrainedModel(NET)
    seen: list[list[str]] = []

    def work(group: Group) -> None:
        allreduce = group.allreduce

        def watch(*what: Any, **how: Any) -> None:
            seen.append(list(trainee.ledger.lines))
            allreduce(*what, **how)

        if group.rank == 0:
            group.allreduce = watch  # type: ignore[method-assign]
            trainee.take(group, divide_rows(group))
            trainee.exchange.close()
        else:
            take_steps(group, NET)

    run_in_world(2, work)
    assert seen
    assert all(lines == ["contributes [0, 1, 2, 3, 4]"] for lines in seen)
    assert trainee.ledger.lines[-1] == "applied"


@pytest.mark.parametrize("carries", [False, True])
@pytest.mark.parametrize("at", range(5))
def test_r01_r03_a_step_that_breaks_changes_nothing_and_can_be_taken_again(at: int, carries: bool) -> None:
    """It breaks at the layout's hash (0), at an allreduce on its way (bucket, then buffers), or at the trailer (4). If
    the bucket carries the trailer: as the ranks agree on that (0), at the buffers, at the hash, at the bucket (4)."""
    model = nn.Sequential(NORMED, nn.Dropout(0.5), nn.Linear(3, 3).double())

    def work(group: Group) -> None:
        trainee = TrainedModel(model)
        trainee.exchange.close()
        count = count_summary_bytes if carries else None
        trainee.exchange = GradientExchange(trainee.model.named_parameters(), count_message_bytes=count)
        trainee.taker._exchange = trainee.exchange

        class Breaking:
            rank, size, fence = 0, 2, (1, 1)
            calls = 0

            def buffer(self, nbytes: int) -> Any:
                return np.zeros(nbytes, np.uint8)

            def allreduce(self, array: Any, op: str = "sum", **how: Any) -> None:
                array.fill(7)
                self._call()

            def bind_allreduce(self, array: Any, compression: str | None = None) -> Any:
                return lambda: self.allreduce(array)

            def allgather(self, array: Any) -> Any:
                self._call()
                return np.stack([array, array])

            def abort(self, reason: str) -> None: ...

            def _call(self) -> None:
                self.calls += 1
                if self.calls > at:
                    raise CollectiveError((1,), "broken for the test")

        torch.manual_seed(3)
        before, draws = trainee.state.digest(), torch.get_rng_state()
        with pytest.raises(CollectiveError, match="broken for the test"):
            trainee.take(Breaking(), range(5))  # type: ignore[arg-type]
        assert trainee.state.digest() == before
        assert trainee.state.position == START
        assert torch.equal(torch.get_rng_state(), draws)
        assert "applied" not in trainee.ledger.lines
        trainee.take(group, range(ROWS))
        torch.manual_seed(3)
        undisturbed, _ = take_steps(group, model)
        assert trainee.state.digest() == undisturbed.state.digest()
        trainee.exchange.close()

    run_in_world(1, work)


def test_r03_an_exception_of_the_users_with_buckets_under_way_is_drained() -> None:
    """A hook raises while the first bucket waits for a peer: the next step must not share its memory."""
    trainees = [TrainedModel(NET, batch_size=ROWS) for _ in range(2)]

    def break_step(group: Group) -> None:
        if group.rank == 0:
            handle = trainees[0].model[0].weight.register_post_accumulate_grad_hook(_raise)  # type: ignore[index]
            with pytest.raises(ZeroDivisionError):
                trainees[0].take(group, range(5))
            handle.remove()
            assert trainees[0].exchange.mode.has_launched_buckets

    def take_step(group: Group) -> None:
        trainees[group.rank].take(group, divide_rows(group))

    run_in_world(2, break_step)
    run_in_world(2, take_step, generation=2)
    for trainee in trainees:
        assert have_equal_values(trainee.model, train_plain(NET))
        trainee.exchange.close()


def _raise(parameter: torch.Tensor) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("one_bucket", [False, True])
def test_r06_ranks_at_different_positions_refuse_to_step(one_bucket: bool) -> None:
    def work(group: Group) -> None:
        trainee = TrainedModel(NET, one_bucket=one_bucket)
        trainee.state.position = Position(0, Phase.TRAIN, group.rank)
        before = trainee.state.digest()
        with pytest.raises(CollectiveError):
            trainee.take(group, divide_rows(group))
        assert trainee.state.digest() == before
        trainee.exchange.close()

    run_in_world(2, work)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises; a shell starts what it puts into the background with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_r01_an_interrupt_waits_for_the_end_of_the_apply_section() -> None:
    assert threading.current_thread() is threading.main_thread()
    through = False
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - the interrupt comes at the block's end
        with DeferredInterrupts():
            signal.raise_signal(signal.SIGINT)
            through = True
    assert through
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_an_optimizer_with_code_of_others_is_not_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> torch.optim.SGD:
        return torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)

    optimizer = build()
    assert is_plain_optimizer(optimizer)
    handle = register_optimizer_step_post_hook(lambda *_: None)
    assert not is_plain_optimizer(optimizer)
    handle.remove()
    optimizer.register_step_pre_hook(lambda *_: None)
    assert not is_plain_optimizer(optimizer)
    optimizer = build()
    optimizer.step = lambda: None  # type: ignore[method-assign, assignment, misc]
    assert not is_plain_optimizer(optimizer)
    assert not is_plain_optimizer(type("Own", (torch.optim.SGD,), {})(nn.Linear(2, 1).parameters(), lr=0.1))
    monkeypatch.setattr(torch.optim.SGD, "step", wraps(torch.optim.SGD.step)(lambda self: None))
    assert not is_plain_optimizer(build())


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        (torch.optim.AdamW, {"lr": 0.1}),
        (torch.optim.Rprop, {}),
    ],
)
def test_a_step_of_torchs_optimizer_has_the_bits_of_its_own_call(kind: Any, options: dict[str, Any]) -> None:
    states = []
    for step in (take_step, lambda optimizer: optimizer.step()):
        torch.manual_seed(0)
        optimizer = kind(nn.Linear(9, 7).parameters(), **options)
        for _ in range(3):
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad = torch.randn_like(parameter)
            step(optimizer)
        tensors = [
            tensor for state in optimizer.state.values() for tensor in state.values() if tensor is not None
        ]
        states.append([tensor.tolist() for tensor in (*optimizer.param_groups[0]["params"], *tensors)])
    assert states[0] == states[1]


def test_hooks_and_profilers_see_a_step_of_torchs_optimizer() -> None:
    optimizer, calls = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1), []
    take_step(optimizer)
    with torch.profiler.profile() as profiled:
        take_step(optimizer)
    assert "Optimizer.step#SGD.step" in {event.name for event in profiled.events()}
    optimizer.register_step_post_hook(lambda *_: calls.append("hook"))
    take_step(optimizer)
    optimizer.step = lambda: calls.append("own")  # type: ignore[method-assign, assignment, misc]
    take_step(optimizer)
    assert calls == ["hook", "own"]


def test_fp16_alone_is_refused_where_torch_has_no_scaler_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.2 is."""
    monkeypatch.delattr(torch.amp, "GradScaler")
    says = r"precision='fp16' needs torch 2\.3 or newer, and this is .* to 'bf16'"
    with pytest.raises(InvalidInput, match=says):
        GradientScaling("fp16")
    for scaling in (GradientScaling("bf16"), GradientScaling()):
        assert scaling.state_dict() == {"scaler": {}, "skipped": 0}


@pytest.mark.parametrize("size", [1, 2])
def test_r09_p4_callbacks_see_the_buffers_of_the_step_that_is_finalized(size: int) -> None:
    """They are told of it after the forward pass of the next one, which writes each rank's own."""

    def work(group: Group) -> tuple[list[Any], list[Any], nn.Module]:
        trainee = TrainedModel(NORMED, batch_size=ROWS)
        trainee.taker.shows_buffers = True
        seen, after = [], []
        rows = divide_rows(group)
        part = slice(rows.start, rows.stop)
        batch = LocalBatch(ROWS, np.array(rows), (X[part],), (Y[part],), None)
        tell = lambda: seen.append(read(trainee))  # noqa: E731
        for _ in range(3):
            call = StepCall(group, MembershipVersion(), lambda decision: NEXT, tell)
            trainee.taker.run(batch, call)
            after.append(read(trainee))
        trainee.exchange.close()
        return seen, after, trainee.model

    def read(trainee: TrainedModel) -> list[Any]:
        return [buffer.tolist() for buffer in trainee.model.buffers()]

    done = run_in_world(size, work)
    for seen, after, model in done:
        assert after == done[0][1], "running statistics differ by rank"
        assert seen == [[buffer.tolist() for buffer in NORMED.buffers()], *after[:-1]]
        if size == 1:
            assert have_equal_values(model, train_plain(NORMED, 3))


WEIGHTS = torch.rand(ROWS, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


take_joined = partial(take_steps, loss_scope="step")


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


EMBEDDING = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4)).double()
torch.manual_seed(0)
TOWERS = TwoTowers()


@pytest.mark.native
@pytest.mark.parametrize(
    ("model", "loss"),
    [(TOWERS, compare_towers), (EMBEDDING, correlate), (EMBEDDING, compute_dice)],
    ids=["clip", "barlow", "dice"],
)
def test_r08_r09_the_loss_of_a_step_is_that_of_one_process_in_any_world(model: nn.Module, loss: Any) -> None:
    """In parts of up to 3 rows; 12 ranks for 10 rows: two have none."""

    once, twice = train_plain(model, 1, loss), train_plain(model, 2, loss)
    for size in (1, 3, 8, 12):
        done = run_in_world(size, partial(take_joined, model=model, loss=loss, steps=2))
        assert len({trainee.state.digest() for trainee, _ in done}) == 1
        trainee, decision = done[0]
        assert have_equal_values(trainee.model, twice)
        assert (decision.rows, decision.denominator) == (ROWS, ROWS)
        assert decision.loss / ROWS == pytest.approx(loss(once(X), Y).item(), rel=1e-12)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.unit, self.head = EMBEDDING, nn.Linear(4, 4).double(), nn.Linear(4, 3).double()

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
    ((trainee, _),) = run_in_world(1, partial(take_joined, model=model, loss=correlate))
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

        def gather(blob: bytes) -> list[bytes]:
            gathered.append(blob)
            if place == "outputs" and fails:
                fails.clear()
                raise CollectiveError("a peer is gone")
            return [blob]

        gathered: list[bytes] = []
        group.allgather_bytes = gather  # type: ignore[method-assign]
        trainee.model.norm.register_forward_hook(fail)
        before = trainee.state.digest(), copy.deepcopy(trainee.model.state_dict()), trainee.model.passes
        with pytest.raises(CollectiveError):
            trainee.take(group, range(ROWS))
        assert (trainee.state.digest(), trainee.model.passes) == (before[0], before[2])
        assert all(torch.equal(value, before[1][name]) for name, value in trainee.model.state_dict().items())
        trainee.take(group, range(ROWS))
        trainee.exchange.close()
        return trainee

    (disturbed,) = run_in_world(1, work)
    ((alone, _),) = run_in_world(1, partial(take_joined, model=model, loss=correlate))
    assert disturbed.state.digest() == alone.state.digest()
