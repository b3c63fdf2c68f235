"""`DistributedOptimizer`: alone as the plain optimizer, in a world as one process over all the batches."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from elastic_collectives import CollectiveError, Group
from spark_elastic.errors import InvalidInput
from spark_elastic.handwritten.torch_state import has_unapplied
from spark_elastic.torch import Adasum, Average, Compression, DistributedOptimizer, Sum
from tests.unit.torch.loops import CurrentWorker, X, adam, enter, net, train_plain, weights
from tests.unit.torch.worlds import run_in_world


@pytest.fixture
def alone() -> Iterator[tuple[torch.nn.Sequential, Any]]:
    model = net()
    opt = DistributedOptimizer(adam(model.parameters()), model.named_parameters())
    yield model, opt
    opt.close()


@pytest.mark.parametrize("predivide", [1.0, 4.0])
@pytest.mark.parametrize("passes", [1, 2])
def test_average_of_three_ranks_equals_one_process(
    here: CurrentWorker, passes: int, predivide: float
) -> None:
    parts = X.reshape(3, passes, -1, 5)

    def work(group: Group) -> torch.Tensor:
        enter(here, group)
        model = net()
        opt: Any = DistributedOptimizer(
            adam(model.parameters()),
            model.named_parameters(),
            backward_passes_per_step=passes,
            gradient_predivide_factor=predivide,
        )
        for _ in range(3):
            opt.zero_grad()
            for part in parts[group.rank]:
                (model(part).pow(2).mean() / passes).backward()
            opt.step()
        opt.close()
        return weights(model)

    replicas = run_in_world(3, work)
    assert all(torch.equal(replica, replicas[0]) for replica in replicas)
    assert torch.allclose(replicas[0], train_plain([X] * 3, adam), rtol=0, atol=1e-12)


def test_sum_is_not_divided_and_clipping_comes_between(here: CurrentWorker) -> None:
    def work(group: Group) -> tuple[float, torch.Tensor]:
        enter(here, group)
        model = net()
        opt: Any = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=Sum)
        opt.zero_grad()
        model(X[group.rank * 6 :][:6]).pow(2).sum().backward()
        opt.synchronize()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        with opt.skip_synchronize():
            opt.step()
        opt.close()
        return float(norm), weights(model)

    model = net()
    model(X).pow(2).sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for seen, replica in run_in_world(2, work):
        assert seen == pytest.approx(float(norm), rel=1e-12)
        assert torch.allclose(replica, weights(model), rtol=0, atol=1e-12)


def clip(opt: Any, scaler: Any) -> None:
    torch.nn.utils.clip_grad_norm_(opt.param_groups[0]["params"], 1e-3)
    opt.step()


def unscale(opt: Any, scaler: Any) -> None:
    scaler.unscale_(opt)
    scaler.step(opt)


def take_scaled_step(opt: Any, scaler: Any) -> None:
    scaler.step(opt)


def replace(opt: Any, scaler: Any) -> None:
    opt.param_groups[0]["params"][0].grad = torch.zeros(7, 5, dtype=torch.float64)
    opt.step()


@pytest.mark.parametrize("by", [1, 2], ids=["one rank", "both"])
@pytest.mark.parametrize("change", [clip, unscale, take_scaled_step, replace])
def test_gradients_changed_between_backward_and_step_are_an_error(
    here: CurrentWorker, change: Callable[[Any, Any], None], by: int
) -> None:
    """Some of them have been summed already, without the change. The others do not wait for who did it."""

    def work(group: Group) -> str:
        enter(here, group)
        model = net()
        opt: Any = DistributedOptimizer(adam(model.parameters()), model.named_parameters())
        opt.step()  # the ranks have met
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        x = X * (float("inf") if group.rank == 0 and change is take_scaled_step else 1.0)
        scaler.scale(model(x).pow(2).mean()).backward()  # type: ignore[no-untyped-call]
        try:
            change(opt, scaler) if group.rank < by else opt.step()
        except (InvalidInput, CollectiveError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            opt.close()
        return "went on"

    found = run_in_world(2, work)
    assert all("call optimizer.synchronize() before they are clipped" in said for said in found[:by])
    assert all("a step was given up" in said for said in found[by:]), found


@pytest.mark.parametrize("by_model", [False, True])
def test_a_gradient_that_no_rank_has_is_none_and_one_that_a_rank_has_is_averaged(
    here: CurrentWorker, by_model: bool
) -> None:
    """Weight decay would move a parameter with a gradient of zero."""

    def work(group: Group) -> list[torch.Tensor | None]:
        enter(here, group)
        layers = torch.nn.ModuleList(torch.nn.Linear(5, 1, bias=False, dtype=torch.float64) for _ in range(3))
        torch.nn.init.ones_(layers[2].weight)  # type: ignore[arg-type]
        opt: Any = DistributedOptimizer(adam(layers.parameters()), layers.named_parameters())
        for step in range(2):
            (layers if by_model else opt).zero_grad()
            used = [layers[0], layers[1]] if step == 0 or group.rank == 0 else [layers[0]]
            sum(layer(X).sum() for layer in used).backward()
            opt.synchronize()
        found = [None if p.grad is None else p.grad.clone() for p in layers.parameters()]
        opt.step()
        opt.close()
        assert torch.equal(layers[2].weight, torch.ones_like(layers[2].weight))  # type: ignore[arg-type]
        return found

    total = X.sum(0, keepdim=True)
    for first, second, third in run_in_world(2, work):
        assert third is None
        assert first is not None
        assert second is not None
        assert torch.allclose(first, total)
        assert torch.allclose(second, total / 2)


def test_r03_a_broken_exchange_leaves_weights_and_optimizer_untouched(here: CurrentWorker) -> None:
    broken = threading.Barrier(2)

    def work(group: Group) -> None:
        enter(here, group)
        model = net()
        opt: Any = DistributedOptimizer(adam(model.parameters()), model.named_parameters())
        opt.zero_grad()
        model(X).pow(2).mean().backward()
        opt.step()
        before, moments = weights(model).clone(), str(opt.state_dict())
        broken.wait(20)
        if group.rank == 0:
            group.abort("for the test")
        opt.zero_grad()
        with pytest.raises(CollectiveError):  # noqa: PT012 - where it shows depends on who is faster
            model(X).pow(2).mean().backward()
            opt.step()
        assert torch.equal(weights(model), before)
        assert str(opt.state_dict()) == moments
        assert all(p.grad is None for p in model.parameters())
        here.is_worker = False  # the next world is one of its own
        opt.zero_grad()
        model(X).pow(2).mean().backward()
        opt.step()
        assert torch.equal(weights(model), train_plain([X, X], adam))
        opt.close()

    run_in_world(2, work)


def test_an_interrupted_step_leaves_nothing_in_the_next_world(here: CurrentWorker) -> None:
    """Buckets of the first step are on their way when user code leaves it; then a new group is there."""
    models = [net(), net()]
    opts: list[Any] = [DistributedOptimizer(adam(m.parameters()), m.named_parameters()) for m in models]

    def give_up(group: Group) -> None:
        enter(here, group)
        if group.rank == 0:  # rank 1 never comes to this step
            opts[0].zero_grad()
            models[0](X).pow(2).mean().backward()

    def continue_in_world(group: Group) -> None:
        enter(here, group)
        opts[group.rank].zero_grad()
        models[group.rank](X).pow(2).mean().backward()
        opts[group.rank].step()

    run_in_world(2, give_up)
    run_in_world(2, continue_in_world, generation=2)
    for model, opt in zip(models, opts, strict=True):
        assert torch.allclose(weights(model), train_plain([X], adam), rtol=0, atol=1e-12)
        opt.close()


def test_the_optimizer_cannot_step_between_two_worlds(
    here: CurrentWorker, alone: tuple[torch.nn.Sequential, Any]
) -> None:
    _, opt = alone
    enter(here, None)
    with pytest.raises(CollectiveError, match="between two worlds"):
        opt.step()


@pytest.mark.parametrize("scheduler_first", [False, True])
def test_schedulers_work_on_a_distributed_optimizer(scheduler_first: bool) -> None:
    model = net()
    plain_sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        early = torch.optim.lr_scheduler.StepLR(plain_sgd, 1, 0.5) if scheduler_first else None
        opt: Any = DistributedOptimizer(plain_sgd, model.named_parameters())
        scheduler = early or torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
        for _ in range(2):
            opt.zero_grad()
            model(X).pow(2).mean().backward()
            opt.step()
            scheduler.step()
    assert opt.param_groups[0]["lr"] == plain_sgd.param_groups[0]["lr"] == 0.25
    opt.load_state_dict(
        opt.state_dict() | {"param_groups": [opt.state_dict()["param_groups"][0] | {"lr": 3.0}]}
    )
    assert plain_sgd.param_groups[0]["lr"] == 3.0
    opt.close()


def test_hooks_of_the_step_run_once(alone: tuple[torch.nn.Sequential, Any]) -> None:
    _, opt = alone
    calls: list[str] = []
    opt.register_step_pre_hook(lambda *_: calls.append("before"))
    opt.register_step_post_hook(lambda *_: calls.append("after"))
    opt.load_state_dict(opt.state_dict())  # torch patches the class's step again here
    opt.step()
    assert calls == ["before", "after"]


def test_a_closure_is_exchanged_before_the_update(here: CurrentWorker) -> None:
    def work(group: Group) -> torch.Tensor:
        enter(here, group)
        model = net()
        opt: Any = DistributedOptimizer(adam(model.parameters()), model.named_parameters(), op=Average)

        def closure() -> torch.Tensor:
            opt.zero_grad()
            loss = model(X[group.rank * 6 :][:6]).pow(2).mean()
            loss.backward()
            return loss

        assert opt.step(closure) > 0
        opt.close()
        return weights(model)

    for replica in run_in_world(2, work):
        assert torch.allclose(replica, train_plain([X], adam), rtol=0, atol=1e-12)


def train_gan(wrap: Callable[[Any, Any], Any], *, freeze: bool) -> torch.Tensor:
    """The weights of the judge after two steps."""
    maker, judge = torch.nn.Linear(5, 5).double(), torch.nn.Linear(5, 1).double()
    for parameter in (*maker.parameters(), *judge.parameters()):
        torch.nn.init.constant_(parameter, 0.1)
    makers, judges = (wrap(torch.optim.SGD(m.parameters(), lr=0.1), m) for m in (maker, judge))
    for _ in range(2):
        judges.zero_grad()
        (judge(maker(X).detach()).pow(2).mean() - judge(X).mean()).backward()
        judges.step()
        judge.requires_grad_(not freeze)
        makers.zero_grad()
        (-judge(maker(X)).mean()).backward()
        makers.step()
        judge.requires_grad_(True)
    return torch.cat([parameter.detach().flatten() for parameter in judge.parameters()])


def test_the_loop_of_a_gan_freezes_the_judge_while_the_maker_learns() -> None:
    """The error of the usual loop, which leaves the judge's gradients to its next zero_grad(), says so."""

    def distribute(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> torch.optim.Optimizer:
        return DistributedOptimizer(optimizer, model.named_parameters())

    with pytest.raises(InvalidInput, match=r"as in a GAN, call requires_grad_\(False\)"):
        train_gan(distribute, freeze=False)
    plain = train_gan(lambda optimizer, model: optimizer, freeze=False)
    assert torch.equal(train_gan(distribute, freeze=True), plain)


def test_a_step_that_a_scaler_skips_is_over(alone: tuple[torch.nn.Sequential, Any]) -> None:
    model, opt = alone
    scaler, before = torch.amp.GradScaler("cpu"), weights(model)
    scaler.scale(model(X).sum() * torch.inf).backward()
    assert has_unapplied(opt)
    opt.synchronize()
    with opt.skip_synchronize():
        scaler.step(opt)
    scaler.update()
    assert torch.equal(weights(model), before)
    assert not has_unapplied(opt), "a commit is due"


def test_more_backward_passes_than_announced_are_an_error(alone: tuple[torch.nn.Sequential, Any]) -> None:
    model, opt = alone
    model(X).sum().backward()
    with pytest.raises(InvalidInput, match="more than 1 times"):
        model(X).sum().backward()
    opt.synchronize()
    opt.set_backward_passes_per_step(2)
    opt.zero_grad()
    model(X).sum().backward()
    model(X).sum().backward()
    with pytest.raises(InvalidInput, match="between steps"):
        opt.set_backward_passes_per_step(1)
    with pytest.raises(InvalidInput, match="synchronize"), opt.skip_synchronize():
        opt.step()
    opt.step()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"compression": object()}, "compression"),
        ({"num_groups": -1}, "1 or more"),
        ({"groups": [[torch.nn.Parameter(torch.ones(1))]]}, "that the optimizer trains"),
        ({"op": Adasum, "compression": Compression.fp16}, "leave compression and groups out"),
        ({"backward_passes_per_step": 0}, "at least 1"),
        ({"gradient_predivide_factor": 0.0}, "above 0"),
    ],
)
def test_unsupported_options_are_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        DistributedOptimizer(adam(net().parameters()), **arguments)


def test_names_are_checked() -> None:
    model = net()
    pairs = list(model.named_parameters())
    for named, says in (
        (pairs[:-1], "lacks 1"),
        ([*pairs, ("0.weight", torch.nn.Parameter(torch.ones(1)))], "a name twice: 0.weight"),
        ([*pairs, ("again", pairs[0][1])], "a parameter twice: 0.weight, again"),
        (model.parameters(), "pairs of name and parameter"),
    ):
        with pytest.raises(InvalidInput, match=says):
            DistributedOptimizer(adam(model.parameters()), named)  # type: ignore[arg-type]


@pytest.mark.parametrize("op", [Sum, Adasum])
def test_a_distributed_optimizer_cannot_be_copied(op: Any) -> None:
    """A copy would be of a class whose exchange it has not."""
    optimizer = DistributedOptimizer(adam(net().parameters()), op=op)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(InvalidInput, match=r"take its state_dict\(\)"):
            copied(optimizer)


def test_distributed_optimizer_wraps_once_and_not_lbfgs(alone: tuple[torch.nn.Sequential, Any]) -> None:
    model, opt = alone
    for wrong in (opt, torch.optim.LBFGS(model.parameters()), model):
        with pytest.raises(InvalidInput, match="wraps a plain optimizer once"):
            DistributedOptimizer(wrong)
    torch.optim.Optimizer.add_param_group(opt, {"params": [torch.nn.Parameter(torch.ones(1))]})
    with pytest.raises(InvalidInput, match="call add_param_group of the one that it returned"):
        opt.step()
