"""`DistributedOptimizer`: what travels and how: groups, 16 bits, rows missing, parts of the world, Adasum."""

from __future__ import annotations

import copy
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
from spark_elastic.torch import Adasum, Compression, DistributedOptimizer, Sum
from tests.reductions import reduce_parts
from tests.unit.torch.loops import CurrentWorker, X, adam, enter, net, train_plain, weights
from tests.unit.torch.worlds import run_in_world


def train(here: CurrentWorker, group: Group, rows: torch.Tensor, **how: Any) -> torch.Tensor:
    """Three steps of `net` over this rank's rows."""
    enter(here, group)
    model = net()
    named = list(model.named_parameters())
    if "groups" in how and not isinstance(how["groups"], int):
        how["groups"] = [[named[i][1] for i in part] for part in how["groups"]]
    opt: Any = DistributedOptimizer(adam(model.parameters()), named, **how)
    for _ in range(3):
        opt.zero_grad()
        model(rows).pow(2).mean().backward()
        opt.step()
    opt.close()
    return weights(model)


@pytest.mark.parametrize("how", [{"num_groups": 2}, {"groups": 3}, {"groups": [[0, 3]]}])
def test_groups_of_gradients_are_exchanged_together_and_change_nothing(
    here: CurrentWorker, how: dict[str, Any]
) -> None:
    replicas = run_in_world(2, lambda group: train(here, group, X[group.rank * 6 :][:6], **how))
    assert torch.equal(*replicas)
    assert torch.allclose(replicas[0], train_plain([X] * 3, adam), rtol=0, atol=1e-12)


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
def test_16_bit_gradients_are_summed_as_float32(
    here: CurrentWorker, dtype: torch.dtype, compression: Any, error: float
) -> None:
    """Gradients 1/3, 2/3 and 1 of three ranks."""

    def work(group: Group) -> torch.Tensor:
        enter(here, group)
        layer = torch.nn.Linear(40, 40, bias=False, dtype=dtype)
        sgd = torch.optim.SGD(layer.parameters(), lr=0.1)
        opt: Any = DistributedOptimizer(sgd, op=Sum, compression=compression)
        (layer.weight * ((group.rank + 1) / 3)).sum().backward()
        opt.synchronize()
        assert layer.weight.grad is not None
        found = layer.weight.grad.clone()
        opt.close()
        return found

    first, *others = run_in_world(3, work)
    assert all(torch.equal(first, other) for other in others)
    assert first.dtype == dtype
    assert torch.allclose(first.double(), torch.full_like(first, 2.0).double(), rtol=error)


@pytest.mark.parametrize("as_dense", [False, True])
def test_gradients_with_rows_missing_equal_dense_ones(here: CurrentWorker, as_dense: bool) -> None:
    """Rank r looks at rows r and r + 1; rank 1 at none in the second step. The dense weight travels beside."""
    first = torch.nn.ModuleList([torch.nn.Embedding(6, 4), torch.nn.Linear(4, 2)]).double()
    looked = [[(0, 1), (1, 2)], [(0, 1), ()], [(0, 1), (1, 2)]]

    def gradient(rank: int, step: int, embedding: Any, layer: Any) -> torch.Tensor:
        rows = torch.tensor(looked[step][rank], dtype=torch.long)
        out: torch.Tensor = layer(embedding(rows)).sum() + 0 * layer.weight.sum()
        return out

    def work(group: Group) -> tuple[torch.Tensor, list[bool]]:
        enter(here, group)
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

    results = run_in_world(2, work)
    modules = first
    opt = torch.optim.SGD(modules.parameters(), lr=0.1)
    for step in range(3):
        opt.zero_grad()
        (sum(gradient(rank, step, *modules) for rank in range(2)) / 2).backward()  # type: ignore[union-attr]
        opt.step()
    assert torch.equal(results[0][0], results[1][0])
    assert torch.allclose(results[0][0], weights(modules), rtol=0, atol=1e-12)
    assert [kinds for _, kinds in results] == [[not as_dense] * 3] * 2


def test_a_process_set_trains_together_and_others_alone(here: CurrentWorker) -> None:
    pair = ProcessSet([0, 2])
    batches = [X[:4], X[4:8], X[8:]]
    add = run_in_world(3, lambda group: enter(here, group) or (group.rank == 0 and add_process_set(pair)))
    assert any(add)
    try:
        work = lambda group: train(here, group, batches[group.rank], process_set=pair)  # noqa: E731
        replicas = run_in_world(3, work, generation=2)
    finally:
        remove_process_set(pair)
    assert torch.equal(replicas[0], replicas[2])
    both = torch.cat([batches[0], batches[2]])
    assert torch.allclose(replicas[0], train_plain([both] * 3, adam), rtol=0, atol=1e-12)
    assert torch.allclose(replicas[1], train_plain([batches[1]] * 3, adam), rtol=0, atol=1e-12)


def test_adasum_combines_the_steps_of_all_ranks(here: CurrentWorker) -> None:
    def work(group: Group) -> torch.Tensor:
        enter(here, group)
        model = net()
        opt: Any = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=Adasum)
        model(X[group.rank * 6 :][:6]).pow(2).mean().backward()
        opt.step()
        return weights(model)

    first, second = run_in_world(2, work)
    assert torch.equal(first, second)
    changes = []
    for part in (X[:6], X[6:]):
        model = net()
        model(part).pow(2).mean().backward()
        changes.append([-0.1 * p.grad.numpy() for p in model.parameters() if p.grad is not None])
    combined = [reduce_parts(list(pair), "float64", "adasum", 1.0) for pair in zip(*changes, strict=True)]
    wanted = weights(net()) + torch.from_numpy(np.concatenate([part.reshape(-1) for part in combined]))
    assert torch.allclose(first, wanted, rtol=0, atol=1e-12)


def test_adasum_leaves_parameters_as_they_were_when_the_exchange_breaks(here: CurrentWorker) -> None:
    def work(group: Group) -> None:
        enter(here, group)
        model = net()
        opt: Any = DistributedOptimizer(adam(model.parameters()), op=Adasum)
        model(X).pow(2).mean().backward()
        group.abort("for the test")
        with pytest.raises(CollectiveError):
            opt.step()
        assert torch.equal(weights(model), weights(net()))

    run_in_world(2, work)


@pytest.mark.parametrize(("chosen", "expected"), [(None, [0.3] * 3), ([0, 2], [0.2, 0.1, 0.2])])
def test_learning_rates_are_scaled_by_the_ranks_of_the_process_set(
    here: CurrentWorker, chosen: list[int] | None, expected: list[float]
) -> None:
    some = global_process_set if chosen is None else ProcessSet(chosen)

    def work(group: Group) -> float:
        enter(here, group)
        sgd = torch.optim.SGD(net().parameters(), lr=0.1)
        opt: Any = DistributedOptimizer(sgd, process_set=some, scale_lr=True)
        opt.close()
        return float(sgd.param_groups[0]["lr"])

    assert run_in_world(3, work) == pytest.approx(expected)


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
def test_a_custom_compressor_compresses_each_exchange(
    here: CurrentWorker, compression: Any, error: float, how: dict[str, Any]
) -> None:
    NarrowingCompressor.seen.clear()
    how = {**how, "compression": compression}
    replicas = run_in_world(2, lambda group: train(here, group, X[group.rank * 6 :][:6], **how))
    assert torch.equal(*replicas)
    assert torch.allclose(replicas[0], train_plain([X] * 3, adam), rtol=0, atol=error)
    shapes = sorted(tuple(parameter.shape) for parameter in net().parameters())
    assert sorted(NarrowingCompressor.seen) == sorted(shapes * 6 * (compression is NarrowingCompressor))


def test_a_compressor_that_changes_the_shape_is_named(here: CurrentWorker) -> None:
    def work(group: Group) -> str:
        says = r"FlatteningCompressor\.decompress must give back the shape .*; got \("
        with pytest.raises(InvalidInput, match=says):
            train(here, group, X, compression=FlatteningCompressor)
        return "told"

    assert run_in_world(2, work) == ["told", "told"]


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
