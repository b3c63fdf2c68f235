"""Hand-written training's names on one process: states, handlers, registry, sampler, topology; frozen parameters."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

import spark_elastic.torch as hvd
from elastic_collectives import CollectiveError, Group
from spark_elastic.errors import InvalidInput
from spark_elastic.handwritten import torch_state
from spark_elastic.handwritten.torch_state import ModelStateHandler, OptimizerStateHandler
from spark_elastic.protocol.types import MembershipVersion
from spark_elastic.runs.snapshot import Snapshot
from spark_elastic.worker.context import GroupContext, get_process_context
from tests.unit.handwritten.stage import FakeDriver
from tests.worlds import Runner, enter_group


@pytest.fixture(autouse=True)
def process_as_before() -> Iterator[None]:
    yield
    get_process_context().state_handlers = None
    get_process_context().is_initialized = False


def net() -> torch.nn.Sequential:
    layers = torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.ReLU(), torch.nn.Linear(6, 1)
    return torch.nn.Sequential(*layers)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, width: int = 4) -> None:
    optimizer.zero_grad()
    model(torch.randn(8, width)).pow(2).mean().backward()
    optimizer.step()


def copy_states(*things: Any) -> list[Any]:
    return [copy.deepcopy(thing.state_dict()) for thing in things]


def assert_same(mine: Any, theirs: Any) -> None:
    if isinstance(mine, torch.Tensor):
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)
    elif isinstance(mine, dict):
        assert mine.keys() == theirs.keys()
        for key in mine:
            assert_same(mine[key], theirs[key])
    elif isinstance(mine, list | tuple):
        for one, other in zip(mine, theirs, strict=True):
            assert_same(one, other)
    else:
        assert mine == theirs


class CountingSgd(torch.optim.SGD):
    """Its state has a number that belongs to no parameter."""

    def step(self, closure: Any = None) -> Any:
        self.state["count"] = self.state.get("count", 0) + 1  # type: ignore[index]
        return super().step(closure)


class OwnFormatSgd(torch.optim.SGD):
    """Its `state_dict` has an entry of its own."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        given = dict(state_dict)
        self.count = given.pop("count")
        super().load_state_dict(given)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "tensor rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)),
    "counting": lambda p: CountingSgd(p, lr=0.1, momentum=0.9),
    "own format": lambda p: OwnFormatSgd(p, lr=0.1, momentum=0.9),
}


def distribute(kind: str, parameters: Any) -> Any:
    """kind: of `OPTIMIZERS`, with exchanged gradients where it says so."""
    own = OPTIMIZERS[kind.removeprefix("distributed ")](parameters)
    return hvd.DistributedOptimizer(own) if kind.startswith("distributed") else own


@pytest.mark.scenario("U2")
@pytest.mark.parametrize(
    "kind", [*OPTIMIZERS, *(f"distributed {kind}" for kind in ("sgd", "counting", "own format"))]
)
@pytest.mark.parametrize("steps_before", [0, 2])
def test_restore_brings_back_every_bit_of_model_and_optimizer(kind: str, steps_before: int) -> None:
    model = net()
    optimizer = distribute(kind, model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    state: Any = hvd.elastic.TorchState(model, optimizer, schedule=schedule, batch=0)
    for _ in range(steps_before):
        step(model, optimizer)
        schedule.step()
    state.batch = steps_before
    state.commit()
    kept = copy_states(model, optimizer, schedule)
    parameters = list(model.parameters())
    for _ in range(3):
        step(model, optimizer)
        schedule.step()
        state.batch += 1
    state.restore()
    assert state.batch == steps_before
    assert_same(copy_states(model, optimizer, schedule), kept)
    assert all(mine is was for mine, was in zip(model.parameters(), parameters, strict=True))
    step(model, optimizer)
    getattr(optimizer, "close", int)()


def test_r20_commits_right_before_each_step_are_never_torn() -> None:
    """The optimizer's step waits for the copy; what is restored is of one step throughout."""
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(1 << 16)) for _ in range(20)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    state: Any = hvd.elastic.TorchState(model, optimizer, batch=0)
    for number in range(1, 20):
        for parameter in model:
            parameter.grad = -torch.ones_like(parameter)
        optimizer.step()
        state.batch = number
        state.commit()
        for parameter in model:
            parameter.grad = torch.full_like(parameter, 1000.0)
        optimizer.step()
        state.restore()
        assert state.batch == number
        found = {float(value) for parameter in model for value in parameter.detach()[::4096]}
        assert found == {float(number)}


@pytest.mark.parametrize("through_data", [False, True], ids=["in place", "through .data"])
@pytest.mark.parametrize("zeros", [0, 64], ids=["all", "not the first"])
@pytest.mark.parametrize("changes_momentum", [False, True], ids=["a parameter", "an optimizer's state"])
def test_r20_a_change_outside_of_the_optimizer_spoils_that_commit_only(
    changes_momentum: bool, zeros: int, through_data: bool
) -> None:
    """Also if the copy ends within the change; no counter shows one through `.data`. zeros: as a row of padding has
    them, which many changes leave as they are."""
    model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(1 << 22))])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    model[0].grad = torch.zeros(1 << 22)
    optimizer.step()
    optimizer.zero_grad()
    changed = optimizer.state[model[0]]["momentum_buffer"] if changes_momentum else model[0]
    with torch.no_grad():
        changed[zeros:] = 1.0
    state: Any = hvd.elastic.TorchState(model, optimizer, batch=0)
    for number in range(1, 30):
        state.batch = number
        state.commit()
        with torch.no_grad():
            (changed.data if through_data else changed).mul_(2.0)
        with warnings.catch_warnings():
            warnings.simplefilter("error" if number > 1 else "ignore")  # a void commit is told once
            state.restore()
        now = optimizer.state[model[0]]["momentum_buffer"] if changes_momentum else model[0]
        assert set(now.detach()[64 :: 1 << 12].tolist()) == {1.0}
        assert not now[:zeros].any()
        assert state.batch == (number if number > 1 else 0)
    state.commit()


def test_weights_are_loaded_right_after_the_state_is_made() -> None:
    for _ in range(20):
        model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(1 << 20))])
        state: Any = hvd.elastic.TorchState(model, torch.optim.SGD(model.parameters(), lr=1.0))
        model.load_state_dict({"0": torch.ones(1 << 20)})
        state.restore()
        assert not model[0].any()


def test_a_model_that_no_optimizer_of_the_state_trains_is_copied_at_once() -> None:
    model, average = net(), net()
    state: Any = hvd.elastic.TorchState(model, torch.optim.SGD(model.parameters(), lr=0.1), average=average)
    state.commit()
    kept = copy_states(average)
    with torch.no_grad():
        for parameter in average.parameters():
            parameter.add_(1.0)
    state.restore()
    assert_same(copy_states(average), kept)


def test_layouts_and_dtypes_survive() -> None:
    model = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    buffers = {"short": torch.randn(5).bfloat16(), "nothing": torch.empty(0), "flag": torch.tensor(True)}
    buffers |= {"wide": torch.ones(1).expand(3), "phase": torch.full((2,), 4 - 1j).conj()}
    for name, buffer in buffers.items():
        model.register_buffer(name, buffer)
    state: Any = hvd.elastic.TorchState(model)
    kept = copy_states(model)
    with torch.no_grad():
        model.weight.mul_(2)
        model.short.mul_(2)
        model.flag, model.wide = torch.tensor(False), torch.zeros(1).expand(3)
        model.phase = torch.zeros(2, dtype=torch.complex64)
    state.restore()
    assert_same(copy_states(model), kept)
    assert model.weight.is_contiguous(memory_format=torch.channels_last)


def test_buffers_that_were_set_or_registered_after_the_commit_are_gone_after_a_restore() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    model[0].register_buffer("unset", None)
    state = hvd.elastic.TorchState(model)
    model[0].unset = torch.ones(3)
    model[0].register_buffer("late", torch.ones(3))
    state.restore()
    assert dict(model[0].named_buffers()) == {}
    assert model[0].unset is None
    model[0].unset = torch.ones(3)
    state.commit()
    model[0].unset = None
    state.restore()
    assert model[0].unset.tolist() == [1.0] * 3


def test_a_buffer_that_a_model_has_gained_since_its_checkpoint_stays() -> None:
    state: Any = hvd.elastic.TorchState(torch.nn.Linear(1, 1))
    kept = state._snapshots.wait_for_newest()
    model = torch.nn.Linear(1, 1)
    model.register_buffer("gained", torch.ones(3))
    ModelStateHandler(model).load(kept.values["model"], kept.memory)
    assert model.gained.tolist() == [1.0] * 3


def test_a_buffer_that_two_modules_share_stays_one() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    for module in model:
        module.register_buffer("shared", model[0]._buffers.get("shared", torch.ones(2)))
    state = hvd.elastic.TorchState(model)
    model[0].shared.zero_()
    state.restore()
    assert model[0].shared is model[1].shared
    assert model[1].shared.tolist() == [1.0, 1.0]


@pytest.mark.skipif(not hasattr(torch.amp, "GradScaler"), reason="torch before 2.3 scales on CUDA alone")
@pytest.mark.parametrize("enabled", [True, False])
def test_a_scaler_forgets_the_gradients_of_a_step_that_broke(enabled: bool) -> None:
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=enabled)
    state = hvd.elastic.TorchState(model, optimizer, scaler=scaler)

    def take_step(factor: float, *, breaks: bool) -> None:
        optimizer.zero_grad()
        scaler.scale(model(factor * torch.ones(8, 4)).mean()).backward()
        scaler.unscale_(optimizer)
        if not breaks:  # in a collective of the clipping, say
            scaler.step(optimizer)
            scaler.update()

    take_step(float("inf"), breaks=True)
    state.restore()
    take_step(1.0, breaks=False)
    assert scaler.get_scale() == (4.0 if enabled else 1.0), "an infinity that is void has changed the scale"


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_an_optimizer_in_a_wrapper_without_hooks_is_watched() -> None:
    from torch.distributed.optim import PostLocalSGDOptimizer

    model = net()
    inner = OPTIMIZERS["sgd"](model.parameters())
    averager = PeriodicModelAverager(period=1000, warmup_steps=0, process_group=object())
    optimizer = PostLocalSGDOptimizer(inner, averager)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    state: Any = hvd.elastic.TorchState(model, optimizer, schedule=schedule)
    averager.step = 1  # not a step at which it averages
    step(model, optimizer)
    schedule.step()
    assert not state.in_mid_step()
    state.commit()
    kept = copy_states(model, optimizer)
    step(model, optimizer)
    state.restore()
    assert_same(copy_states(model, optimizer), kept)
    assert averager.step == 2
    schedule.step()
    assert inner.param_groups[0]["lr"] == 0.025, "the wrapper has kept groups that nobody reads"


def test_a_wrapper_that_hides_its_optimizer_is_refused() -> None:
    class Hiding(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self._inner = inner

    with pytest.raises(InvalidInput, match="Hiding has neither step hooks nor"):
        hvd.elastic.TorchState(net(), Hiding(OPTIMIZERS["sgd"](net().parameters())))


@pytest.mark.parametrize("model", ["part", "state_dict", "list"])
def test_p4_an_optimizer_of_a_model_that_the_state_does_not_have_is_refused(model: str) -> None:
    whole = torch.nn.Sequential(net(), net())
    given: Any = {"part": whole[0], "state_dict": whole.state_dict(), "list": [whole]}[model]
    state: Any = hvd.elastic.TorchState(given, torch.optim.SGD(whole.parameters(), lr=0.1))
    with pytest.raises(InvalidInput, match=r"SGD trains a parameter of shape .* no model of this state"):
        state.commit()


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (torch.nn.Linear(2, 5), r"'weight' is torch.bfloat16 \[5, 2\] here and torch.bfloat16 \[5, 3\]"),
        (torch.nn.Linear(3, 5).half(), r"'weight' is torch.float16 \[5, 3\] here and torch.bfloat16"),
        (torch.nn.Linear(3, 5, bias=False), r"different parameters \('bias' is in one alone\)"),
    ],
)
def test_a_model_whose_parameters_differ_is_refused_before_loading(other: torch.nn.Linear, says: str) -> None:
    state: Any = hvd.elastic.TorchState(torch.nn.Linear(3, 5).bfloat16())
    kept = state._snapshots.wait_for_newest()
    if other.weight.dtype == torch.float32:
        other.bfloat16()
    before = copy_states(other)
    with pytest.raises(InvalidInput, match=says):
        ModelStateHandler(other).load(kept.values["model"], kept.memory)
    assert_same(copy_states(other), before)


@pytest.mark.parametrize("distributed", [False, True])
def test_r22_groups_that_were_added_later_come_and_go_with_the_commits(distributed: bool) -> None:
    def make() -> tuple[torch.nn.Sequential, Any]:
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9)
        return model, hvd.DistributedOptimizer(optimizer) if distributed else optimizer

    def thaw(model: torch.nn.Sequential, optimizer: Any) -> None:
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})

    model, optimizer = make()
    state = hvd.elastic.TorchState(model, optimizer)
    committed = copy_states(model, optimizer)
    for _ in range(2):  # the loop adds the group again
        thaw(model, optimizer)
        step(model, optimizer, 3)
        state.restore()
        assert_same(copy_states(model, optimizer), committed)
        assert not model[0].weight.requires_grad
    thaw(model, optimizer)
    step(model, optimizer, 3)
    state.commit()
    kept: Any = state._snapshots.wait_for_newest()
    other, its = make()
    newcomer = hvd.elastic.TorchState(other, its)
    newcomer._load(kept)
    for each in (model, optimizer), (other, its):
        torch.manual_seed(5)
        step(*each, 3)
    assert_same(copy_states(other, its), copy_states(model, optimizer))
    assert its.param_groups[1]["params"][0] is other[0].weight
    if distributed:
        optimizer.close(), its.close()
    else:
        with pytest.raises(InvalidInput, match="2 parameters in 1 groups here, 4 in 2 there"):
            OptimizerStateHandler(make()[1]).load(kept.values["optimizer"], kept.memory)


def test_an_optimizer_that_another_replaced_after_the_commit_comes_back_as_it_was() -> None:
    model = net()
    adam = OPTIMIZERS["adam"](model.parameters())
    state: Any = hvd.elastic.TorchState(model, adam)
    step(model, adam)
    state.commit()
    committed = copy_states(model, adam)
    sgd = state.optimizer = OPTIMIZERS["sgd"](model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the commit counts, though its copy was under way
        step(model, sgd)
        state.restore()
    assert state.optimizer is adam
    assert_same(copy_states(model, adam), committed)
    state.optimizer = sgd
    state.commit()
    state.restore()
    assert state.optimizer is sgd


class CountingHandler(ModelStateHandler):
    saves = 0

    def capture(self, builder: Any) -> Any:
        type(self).saves += 1
        return super().capture(builder)


def test_handlers_of_users_are_registered_by_type() -> None:
    registry = hvd.elastic.get_handler_registry()
    assert [kind for kind, _ in registry][:2] == [torch.nn.Module, torch.optim.Optimizer]
    hvd.elastic.set_handler_registry([(torch.nn.Module, CountingHandler), *registry])
    hvd.elastic.TorchState(net()).commit()
    assert CountingHandler.saves == 2


def test_a_state_outside_of_a_job_has_a_world_of_one() -> None:
    assert not hvd.is_initialized()
    hvd.init()
    assert hvd.is_initialized()
    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (0, 1, 0, 1)
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    hvd.barrier()
    assert hvd.broadcast_object({"a": 1}) == {"a": 1}
    assert hvd.allgather_object(3) == [3]
    x = torch.arange(3.0)
    assert torch.equal(hvd.allreduce(x), x)
    assert torch.equal(hvd.allgather(x), x)
    assert torch.equal(hvd.broadcast(x, 0), x)
    hvd.shutdown()
    assert not hvd.is_initialized()


def test_a_state_is_synced_outside_of_the_run_loop(world: Runner) -> None:
    def work(group: Group) -> tuple[int, list[float], list[int]]:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(model.weight, float(group.rank))
        sampler = hvd.elastic.ElasticSampler(range(8), shuffle=False)
        state: Any = hvd.elastic.TorchState(model, epoch=5 - group.rank, sampler=sampler)
        sampler.record_batch(0, 2)
        state.sync()
        state.epoch = 7
        state.restore()
        return state.epoch, model.weight.flatten().tolist(), list(sampler)

    assert world(2, work) == [(5, [0.0], [4, 6]), (5, [0.0], [5, 7])]


@pytest.mark.parametrize("begins", [False, True])
def test_recorded_rows_of_all_ranks_are_merged(begins: bool, world: Runner) -> None:
    """By a sync, and where a world begins in which no rank takes over another's state."""

    def work(group: Group) -> tuple[list[int], list[int]]:
        sampler = hvd.elastic.ElasticSampler(range(8), shuffle=False)
        state: Any = hvd.elastic.TorchState(sampler=sampler)
        sampler.record_indices([1, 2 + group.rank])
        state.commit()
        if begins:
            state.begin_world(None, None)
        else:
            state.sync()
        merged = list(sampler)
        sampler.record_indices([0])
        state.restore()
        return merged, sorted(sampler.processed_indices)

    assert world(2, work) == [([0, 5, 7], [1, 2, 3]), ([4, 6, 0], [1, 2, 3])]


def test_a_plain_optimizers_step_is_under_way_from_its_first_gradient_to_its_step() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state: Any = hvd.elastic.TorchState(model, optimizer)

    def backward() -> None:
        model(torch.randn(8, 4)).square().mean().backward()

    keep: Any = lambda: optimizer.zero_grad(False)  # noqa: E731
    acts = [backward, backward, optimizer.step, keep, backward, optimizer.step, optimizer.zero_grad, backward]
    assert not state.in_mid_step()
    found = [(act(), state.in_mid_step())[1] for act in acts]
    assert found == [True, True, False, False, True, False, False, True]


@pytest.mark.skipif(not hasattr(torch.amp, "GradScaler"), reason="torch before 2.3 scales on CUDA alone")
def test_a_plain_optimizers_step_that_a_scaler_skips_is_over() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state: Any = hvd.elastic.TorchState(model, optimizer, scaler=torch.amp.GradScaler("cpu"), batch=0)

    def take_step(factor: float) -> None:
        optimizer.zero_grad()
        state.scaler.scale(model(torch.randn(8, 4)).mean() * factor).backward()
        assert state.in_mid_step()
        state.scaler.step(optimizer)
        state.scaler.update()
        state.batch += 1
        state.commit()

    for number, factor in enumerate((1.0, torch.inf, torch.inf, 1.0), 1):
        take_step(factor)
        state.restore()
        assert state.batch == number
    assert state.scaler.get_scale() == 2.0**14
    state.scaler = copy.deepcopy(pickle.loads(pickle.dumps(state.scaler)))
    take_step(torch.inf)
    assert state.scaler.get_scale() == 2.0**13
    assert not state.in_mid_step()


def test_gradients_that_one_optimizers_loss_leaves_to_another_do_not_count() -> None:
    generator, judge = net(), torch.nn.Linear(1, 1)
    first, second = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (generator, judge))
    state: Any = hvd.elastic.TorchState(generator=generator, judge=judge, first=first, second=second)
    first.zero_grad()
    judge(generator(torch.randn(8, 4))).mean().backward()
    assert state.in_mid_step()
    first.step()
    assert not state.in_mid_step()


@pytest.mark.parametrize(
    ("rank", "size", "uses"),
    [(0, 2, ""), (1, 2, ""), (0, 1, "")]
    + [(0, 2, name) for name in ("a distributed optimizer", "operations", "torch.distributed")],
)
def test_p4_ranks_that_train_separate_replicas_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rank: int, size: int, uses: str
) -> None:
    torch_state._warn_once.cache_clear()
    worker = SimpleNamespace(group=SimpleNamespace(rank=rank, size=size), group_context=GroupContext())
    monkeypatch.setattr(torch_state, "get_context", lambda: worker)
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    state = hvd.elastic.TorchState(model, optimizer)

    def take_step() -> None:
        def backward() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(8, 4)).pow(2).mean()
            loss.backward()
            return loss

        optimizer.step(backward)
        state.commit()

    if uses == "a distributed optimizer":
        worker.group_context.record_agreed_version(MembershipVersion())
    elif uses == "operations":
        worker.group_context.get_or_create(dict)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: uses == "torch.distributed")
    take_step()
    state.commit()  # without a step
    assert not caplog.records, "warned after one step"
    for _ in range(3):
        take_step()
    told = ["the ranks exchange no gradients, so"] * ((rank, size, uses) == (0, 2, ""))
    assert [record.getMessage()[:35] for record in caplog.records] == told


@pytest.mark.usefixtures("context_per_thread")
@pytest.mark.parametrize("loss", [False, True], ids=["a planned change", "a loss"])
@pytest.mark.parametrize("synchronized", [False, True])
def test_p1_a_commit_between_two_backward_passes_of_a_step_loses_no_rows(
    caplog: pytest.LogCaptureFixture, loss: bool, synchronized: bool
) -> None:
    """A sampler has counted rows by then whose gradients no snapshot holds."""
    torch_state._warn_once.cache_clear()
    stage = FakeDriver(1)
    stage.enter_group = enter_group
    model = torch.nn.ParameterList([torch.zeros(8)])
    (weight,) = model
    sgd = torch.optim.SGD([weight], lr=1.0)
    optimizer = hvd.DistributedOptimizer(sgd, op=hvd.Sum, backward_passes_per_step=2)
    sampler = hvd.elastic.ElasticSampler(list(range(8)), shuffle=False)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, batch=0)
    losses = [3] if loss else []

    def train(state: Any) -> None:
        for row in state.sampler:
            weight[row].mul(-1.0).backward()
            state.batch += 1
            if state.batch == 3:
                stage.announce()
            state.sampler.record_batch(0, 1)
            if state.batch % 2 == 0:
                if synchronized:
                    optimizer.synchronize()
                    state.commit()
                optimizer.step()
                optimizer.zero_grad()
            state.commit()
            if state.batch in losses:
                losses.remove(state.batch)
                raise CollectiveError((), "somebody is gone")

    stage.train(train, lambda session: state)
    assert weight.tolist() == [1.0] * 8
    assert len(stage.sizes) > 1
    assert caplog.text.count("saves nothing") == 1
    optimizer.close()


def test_frozen_parameters_are_copied_once_and_what_changes_through_data_each_time() -> None:
    names = "head", "body", "slow"
    model = torch.nn.ParameterDict({n: torch.nn.Parameter(torch.ones(1 << 12)) for n in names})
    model["body"].requires_grad_(False)
    model["slow"].requires_grad_(False)
    state = hvd.elastic.TorchState(model, torch.optim.SGD([model["head"]], lr=0.1))

    def commit() -> Any:
        model["slow"].data.mul_(0.5)  # a moving average, of which no version tells
        state.commit()
        return state._snapshots.wait_for_newest()

    first, second = commit(), commit()
    bodies = [commit.values["model"]["parameters"]["body"].extent for commit in (first, second)]
    assert bodies[0] is bodies[1]
    assert second.memory.nbytes == 2 << 14
    with torch.no_grad():
        model["body"].fill_(9)
        model["slow"].fill_(9)
    state.restore()
    assert (float(model["body"].max()), float(model["slow"].max())) == (1.0, 0.25)
    after = commit()
    assert after.values["model"]["parameters"]["body"].extent is bodies[0]
    assert after.memory.nbytes == 2 << 14


def adapted(base: float) -> tuple[torch.nn.Module, Any]:
    """A model with a frozen base of 400 kB that is made of that number, and its state."""
    model = torch.nn.Sequential(torch.nn.Linear(1000, 100), torch.nn.Linear(100, 1))
    torch.nn.init.constant_(model[0].weight, base).requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, hvd.elastic.TorchState(model, torch.optim.SGD(trained, 0.1))


@pytest.mark.parametrize("bases", [(1.0, 1.0), (1.0, 2.0), (1.0, 2.0, 1.0)], ids=["same", "other", "both"])
def test_p4_a_newcomer_takes_a_frozen_base_over_only_if_it_has_made_another(
    bases: tuple[float, ...], world: Runner
) -> None:
    sent: list[int] = []  # bytes of each broadcast of the source

    def work(group: Any) -> Any:
        model, state = adapted(bases[group.rank])
        broadcast = group.broadcast

        def watch(array: Any, source: int) -> Any:
            if group.rank == source:
                sent.append(array.nbytes)
            return broadcast(array, source)

        group.broadcast = watch
        if group.rank == 0:
            state.commit()
        state.sync()
        state.commit()
        snapshot = state._snapshots.wait_for_newest()
        (base,) = model[0].weight.unique().tolist()
        return base, len(pickle.dumps(snapshot.values)) > 400_000, snapshot.memory.nbytes

    found = world(len(bases), work)
    # What ranks make differently is a part of each snapshot that is written.
    differs = len(set(bases)) > 1
    assert found == [(1.0, differs, found[0][2])] * len(bases)
    assert found[0][2] < 10_000
    assert any(nbytes >= 400_000 for nbytes in sent) == differs


def test_p7_a_checkpoint_holds_what_is_trained_and_fits_the_frozen_base_that_it_began_with() -> None:
    _, state = adapted(1.0)
    state.commit()
    snapshot = state._snapshots.wait_for_newest()
    written = pickle.dumps(snapshot.values)
    assert len(written) + snapshot.memory.nbytes < 20_000

    class Reader:
        def read(self, candidates: Any) -> Any:
            return Snapshot(snapshot.position, pickle.loads(written), snapshot.memory)

    model, resumed = adapted(1.0)
    torch.nn.init.zeros_(model[1].weight)
    resumed.restore_checkpoint(Reader(), ())
    assert torch.equal(model[1].weight, state.model[1].weight)
    with pytest.raises(InvalidInput, match=r"frozen parameter '0\.weight' is not the one with which"):
        adapted(2.0)[1].restore_checkpoint(Reader(), ())


def test_what_is_frozen_after_it_was_trained_is_a_part_of_checkpoints() -> None:
    model, state = adapted(1.0)
    state.commit()
    model[1].weight.requires_grad_(False)
    state.commit()
    values = pickle.loads(pickle.dumps(state._snapshots.wait_for_newest().values))["model"]["parameters"]
    assert values["0.weight"].extent.memory is None
    assert values["1.weight"].extent.memory.tobytes() == model[1].weight.numpy().tobytes()
