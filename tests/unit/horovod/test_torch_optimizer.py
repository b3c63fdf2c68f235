"""`DistributedOptimizer`: as one process over all the batches; what travels and how: groups, 16 bits, Adasum."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from elastic_collectives import CollectiveError, Group
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from spark_elastic.gradients.reduction import Compressor
from spark_elastic.handwritten.torch_state import has_unapplied
from spark_elastic.torch import Adasum, Average, Compression, DistributedOptimizer, Sum
from spark_elastic.worker.context import WorkerContext, set_context
from tests.reductions import reduce_parts
from tests.worlds import Runner

X = torch.randn(12, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
NET = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)).double()


def net() -> torch.nn.Sequential:
    """The same one each time, whatever other threads draw."""
    return copy.deepcopy(NET)


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01, weight_decay=0.1)


def make(**how: Any) -> tuple[torch.nn.Sequential, Any]:
    """A net and its optimizer."""
    model = net()
    return model, DistributedOptimizer(adam(model.parameters()), model.named_parameters(), **how)


def take_step(model: torch.nn.Module, opt: Any, *passes: torch.Tensor) -> None:
    """With the mean loss of the rows of all passes, which have equally many."""
    opt.zero_grad()
    for rows in passes:
        (model(rows).pow(2).mean() / len(passes)).backward()
    opt.step()


def train_plain(batches: list[torch.Tensor]) -> torch.Tensor:
    model = net()
    opt = adam(model.parameters())
    for batch in batches:
        take_step(model, opt, batch)
    return weights(model)


def train_net(*passes: torch.Tensor, **how: Any) -> torch.Tensor:
    """Three steps of `net` over this rank's rows. how: `groups` may have lists of numbers."""
    model = net()
    named = list(model.named_parameters())
    if "groups" in how and not isinstance(how["groups"], int):
        how["groups"] = [[named[i][1] for i in part] for part in how["groups"]]
    opt = DistributedOptimizer(adam(model.parameters()), named, **how)
    for _ in range(3):
        take_step(model, opt, *passes)
    opt.close()  # type: ignore[attr-defined]
    return weights(model)


@pytest.fixture
def alone() -> Iterator[tuple[torch.nn.Sequential, Any]]:
    model, opt = make()
    yield model, opt
    opt.close()


@pytest.mark.parametrize(
    "how",
    [
        *({"gradient_predivide_factor": factor} for factor in (1.0, 4.0)),
        *({"gradient_predivide_factor": factor, "backward_passes_per_step": 2} for factor in (1.0, 4.0)),
        # Gradients that travel together.
        *({"num_groups": 2}, {"groups": 3}, {"groups": [[0, 3]]}),
    ],
)
def test_average_of_three_ranks_equals_one_process(engine: Runner, how: dict[str, Any]) -> None:
    parts = X.reshape(3, how.get("backward_passes_per_step", 1), -1, 5)
    replicas = engine(3, lambda group: train_net(*parts[group.rank], **how))
    assert all(torch.equal(replica, replicas[0]) for replica in replicas)
    assert torch.allclose(replicas[0], train_plain([X] * 3), rtol=0, atol=1e-12)


def test_sum_is_not_divided_and_clipping_comes_between(engine: Runner) -> None:
    def work(group: Group) -> tuple[float, torch.Tensor]:
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
    for seen, replica in engine(2, work):
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
def test_gradients_changed_between_backward_and_step_are_refused(
    engine: Runner, change: Any, by: int
) -> None:
    """Some of them have been summed already, without the change. The others do not wait for who did it."""

    def work(group: Group) -> str:
        model, opt = make()
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

    found = engine(2, work)
    assert all("call optimizer.synchronize() before they are clipped" in said for said in found[:by])
    assert all("a step was given up" in said for said in found[by:]), found


@pytest.mark.parametrize("by_model", [False, True])
def test_a_gradient_that_no_rank_has_is_none_and_any_other_is_averaged(
    engine: Runner, by_model: bool
) -> None:
    """Weight decay would move a parameter with a gradient of zero."""

    def work(group: Group) -> list[torch.Tensor | None]:
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
    for first, second, third in engine(2, work):
        assert third is None
        assert first is not None
        assert second is not None
        assert torch.allclose(first, total)
        assert torch.allclose(second, total / 2)


def test_r03_a_broken_exchange_leaves_weights_and_optimizer_untouched(engine: Runner) -> None:
    broken = threading.Barrier(2)

    def work(group: Group) -> None:
        model, opt = make()
        take_step(model, opt, X)
        before, moments = weights(model).clone(), str(opt.state_dict())
        broken.wait(20)
        if group.rank == 0:
            group.abort("for the test")
        with pytest.raises(CollectiveError):
            take_step(model, opt, X)
        assert torch.equal(weights(model), before)
        assert str(opt.state_dict()) == moments
        assert all(p.grad is None for p in model.parameters())
        set_context(None)  # the next world is one of its own
        take_step(model, opt, X)
        assert torch.equal(weights(model), train_plain([X, X]))
        opt.close()

    engine(2, work)


def test_an_interrupted_step_leaves_nothing_in_the_next_world(engine: Runner) -> None:
    """Buckets of the first step are on their way when user code leaves it; then a new group is there."""
    made = [make(), make()]

    def give_up(group: Group) -> None:
        if group.rank == 0:  # rank 1 never comes to this step
            model, opt = made[0]
            opt.zero_grad()
            model(X).pow(2).mean().backward()

    engine(2, give_up)
    engine(2, lambda group: take_step(*made[group.rank], X), generation=2)
    for model, opt in made:
        assert torch.allclose(weights(model), train_plain([X]), rtol=0, atol=1e-12)
        opt.close()


def test_no_step_is_taken_between_two_worlds(engine: Runner, alone: tuple[torch.nn.Sequential, Any]) -> None:
    _, opt = alone
    set_context(WorkerContext("w"))
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
            take_step(model, opt, X)
            scheduler.step()
    assert opt.param_groups[0]["lr"] == plain_sgd.param_groups[0]["lr"] == 0.25
    (group,) = opt.state_dict()["param_groups"]
    opt.load_state_dict(opt.state_dict() | {"param_groups": [group | {"lr": 3.0}]})
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


def test_a_closure_is_exchanged_before_the_update(engine: Runner) -> None:
    def work(group: Group) -> torch.Tensor:
        model, opt = make(op=Average)

        def closure() -> torch.Tensor:
            opt.zero_grad()
            loss = model(X[group.rank * 6 :][:6]).pow(2).mean()
            loss.backward()
            return loss

        assert opt.step(closure) > 0
        opt.close()
        return weights(model)

    for replica in engine(2, work):
        assert torch.allclose(replica, train_plain([X]), rtol=0, atol=1e-12)


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
    ("find_arguments", "says"),
    [
        (lambda pairs: {"compression": object()}, "compression"),
        (lambda pairs: {"num_groups": -1}, "1 or more"),
        (lambda pairs: {"groups": [[torch.nn.Parameter(torch.ones(1))]]}, "that the optimizer trains"),
        (lambda pairs: {"op": Adasum, "compression": Compression.fp16}, "leave compression and groups out"),
        (lambda pairs: {"backward_passes_per_step": 0}, "at least 1"),
        (lambda pairs: {"named_parameters": pairs[:-1]}, "lacks 1"),
        (lambda pairs: {"named_parameters": [*pairs, pairs[0]]}, r"a name twice: 0.weight"),
        (lambda pairs: {"named_parameters": [*pairs, ("again", pairs[0][1])]}, "twice: 0.weight, again"),
        (lambda pairs: {"named_parameters": [p for _, p in pairs]}, "pairs of name and parameter"),
    ],
)
def test_unsupported_options_and_names_are_refused(find_arguments: Callable[..., Any], says: str) -> None:
    model = net()
    with pytest.raises(InvalidInput, match=says):
        DistributedOptimizer(adam(model.parameters()), **find_arguments(list(model.named_parameters())))


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


@pytest.mark.parametrize(
    ("dtype", "compression", "error"),
    [
        (torch.float16, Compression.none, 2e-3),
        (torch.bfloat16, Compression.none, 2e-2),
        (torch.float32, Compression.none, 1e-6),
        (torch.float32, Compression.fp16, 2e-3),
        (torch.float32, Compression.bf16, 2e-2),
    ],
)
def test_16_bits_are_summed_in_32(engine: Runner, dtype: torch.dtype, compression: Any, error: float) -> None:
    """Gradients 1/3, 2/3 and 1 of three ranks."""

    def work(group: Group) -> torch.Tensor:
        layer = torch.nn.Linear(40, 40, bias=False, dtype=dtype)
        sgd = torch.optim.SGD(layer.parameters(), lr=0.1)
        opt: Any = DistributedOptimizer(sgd, op=Sum, compression=compression)
        (layer.weight * ((group.rank + 1) / 3)).sum().backward()
        opt.synchronize()
        assert layer.weight.grad is not None
        found = layer.weight.grad.clone()
        opt.close()
        return found

    first, *others = engine(3, work)
    assert all(torch.equal(first, other) for other in others)
    assert first.dtype == dtype
    assert torch.allclose(first.double(), torch.full_like(first, 2.0).double(), rtol=error)


@pytest.mark.parametrize("as_dense", [False, True])
def test_gradients_with_rows_missing_equal_dense_ones(engine: Runner, as_dense: bool) -> None:
    """Rank r looks at rows r and r + 1; rank 1 at none in the second step. The dense weight travels beside."""
    first = torch.nn.ModuleList([torch.nn.Embedding(6, 4), torch.nn.Linear(4, 2)]).double()
    looked = [[(0, 1), (1, 2)], [(0, 1), ()], [(0, 1), (1, 2)]]

    def gradient(rank: int, step: int, embedding: Any, layer: Any) -> torch.Tensor:
        rows = torch.tensor(looked[step][rank], dtype=torch.long)
        out: torch.Tensor = layer(embedding(rows)).sum() + 0 * layer.weight.sum()
        return out

    def work(group: Group) -> tuple[torch.Tensor, list[bool]]:
        modules = copy.deepcopy(first)
        embedding, layer = modules
        embedding.sparse = True
        sgd = torch.optim.SGD(modules.parameters(), lr=0.1)
        opt: Any = DistributedOptimizer(sgd, sparse_as_dense=as_dense)
        kinds = []
        for step in range(3):
            opt.zero_grad()
            gradient(group.rank, step, embedding, layer).backward()
            opt.synchronize()
            assert embedding.weight.grad is not None
            kinds.append(embedding.weight.grad.is_sparse)
            with opt.skip_synchronize():
                opt.step()
        opt.close()
        return weights(modules), kinds

    results = engine(2, work)
    modules = first
    opt = torch.optim.SGD(modules.parameters(), lr=0.1)
    for step in range(3):
        opt.zero_grad()
        (sum(gradient(rank, step, *modules) for rank in range(2)) / 2).backward()  # type: ignore[union-attr]
        opt.step()
    assert torch.equal(results[0][0], results[1][0])
    assert torch.allclose(results[0][0], weights(modules), rtol=0, atol=1e-12)
    assert [kinds for _, kinds in results] == [[not as_dense] * 3] * 2


def test_a_process_set_trains_together_and_others_alone(engine: Runner) -> None:
    pair = ProcessSet([0, 2])
    batches = [X[:4], X[4:8], X[8:]]
    add = engine(3, lambda group: group.rank == 0 and add_process_set(pair))
    assert any(add)
    try:
        work = lambda group: train_net(batches[group.rank], process_set=pair)  # noqa: E731
        replicas = engine(3, work, generation=2)
    finally:
        remove_process_set(pair)
    assert torch.equal(replicas[0], replicas[2])
    both = torch.cat([batches[0], batches[2]])
    assert torch.allclose(replicas[0], train_plain([both] * 3), rtol=0, atol=1e-12)
    assert torch.allclose(replicas[1], train_plain([batches[1]] * 3), rtol=0, atol=1e-12)


def test_adasum_combines_the_steps_of_all_ranks(engine: Runner) -> None:
    def work(group: Group) -> torch.Tensor:
        model = net()
        opt: Any = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=Adasum)
        model(X[group.rank * 6 :][:6]).pow(2).mean().backward()
        opt.step()
        return weights(model)

    first, second = engine(2, work)
    assert torch.equal(first, second)
    changes = []
    for part in (X[:6], X[6:]):
        model = net()
        model(part).pow(2).mean().backward()
        changes.append([-0.1 * p.grad.numpy() for p in model.parameters() if p.grad is not None])
    combined = [reduce_parts(list(pair), "float64", "adasum", 1.0) for pair in zip(*changes, strict=True)]
    wanted = weights(net()) + torch.from_numpy(np.concatenate([part.reshape(-1) for part in combined]))
    assert torch.allclose(first, wanted, rtol=0, atol=1e-12)


def test_adasum_leaves_parameters_as_they_were_when_the_exchange_breaks(engine: Runner) -> None:
    def work(group: Group) -> None:
        model, opt = make(op=Adasum)
        model(X).pow(2).mean().backward()
        group.abort("for the test")
        with pytest.raises(CollectiveError):
            opt.step()
        assert torch.equal(weights(model), weights(net()))

    engine(2, work)


@pytest.mark.parametrize(("chosen", "expected"), [(None, [0.3] * 3), ([0, 2], [0.2, 0.1, 0.2])])
def test_learning_rates_are_scaled_by_the_ranks_of_the_process_set(
    engine: Runner, chosen: list[int] | None, expected: list[float]
) -> None:
    some = global_process_set if chosen is None else ProcessSet(chosen)

    def work(group: Group) -> float:
        sgd = torch.optim.SGD(net().parameters(), lr=0.1)
        opt: Any = DistributedOptimizer(sgd, process_set=some, scale_lr=True)
        opt.close()
        return float(sgd.param_groups[0]["lr"])

    assert engine(3, work) == pytest.approx(expected)


class NarrowingCompressor(Compressor):
    """A user's own: other dtypes and shapes on the way."""

    seen: ClassVar[list[tuple[int, ...]]] = []

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        cls.seen.append(tuple(tensor.shape))
        return tensor.to(torch.float32).t() if tensor.dim() == 2 else tensor.to(torch.bfloat16), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return (tensor.t() if tensor.dim() == 2 else tensor).to(ctx)


class HalvingCompressor(Compressor):
    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor / 2, 2

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor * ctx


class FlatteningCompressor(Compressor):
    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor.flatten(), None


@pytest.mark.parametrize("how", [{}, {"gradient_predivide_factor": 4.0}, {"groups": 3}])
@pytest.mark.parametrize(
    ("compression", "error"),
    [(HalvingCompressor, 1e-12), (HalvingCompressor(), 1e-12), (NarrowingCompressor, 2e-2)],
)
def test_a_users_own_compressor(engine: Runner, compression: Any, error: float, how: dict[str, Any]) -> None:
    NarrowingCompressor.seen.clear()
    how = {**how, "compression": compression}
    replicas = engine(2, lambda group: train_net(X[group.rank * 6 :][:6], **how))
    assert torch.equal(*replicas)
    assert torch.allclose(replicas[0], train_plain([X] * 3), rtol=0, atol=error)
    shapes = sorted(tuple(parameter.shape) for parameter in net().parameters())
    assert sorted(NarrowingCompressor.seen) == sorted(shapes * 6 * (compression is NarrowingCompressor))


def test_a_compressor_that_changes_the_shape_is_named(engine: Runner) -> None:
    def work(group: Group) -> str:
        says = r"FlatteningCompressor\.decompress must give back the shape .*; got \("
        with pytest.raises(InvalidInput, match=says):
            train_net(X, compression=FlatteningCompressor)
        return "told"

    assert engine(2, work) == ["told", "told"]


def test_adasum_names_a_parameter_that_is_unfrozen_later() -> None:
    model = net()
    model[0].bias.requires_grad_(False)
    opt = DistributedOptimizer(adam(model.parameters()), model.named_parameters(), op=Adasum)
    model[0].bias.requires_grad_(True)
    before = weights(model)
    model(X).pow(2).mean().backward()
    with pytest.raises(InvalidInput, match=r"'0\.bias' was frozen when training began"):
        opt.step()
    assert torch.equal(weights(model), before)
    opt.close()
