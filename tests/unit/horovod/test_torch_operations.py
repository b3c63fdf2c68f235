"""Operations of torch beyond `test_frameworks.py`: layouts, handles, in place, sparse, derivatives, joins."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import spark_elastic.torch as hvd
from elastic_collectives import Group
from spark_elastic.errors import InvalidInput
from spark_elastic.horovod.torch import optimizer as optimizer_module
from tests.worlds import Runner


def test_operations_take_any_layout_and_size(world: Runner) -> None:
    def work(group: Group) -> None:
        wide = torch.arange(6.0).reshape(2, 3).t()
        assert hvd.allreduce(wide, op=hvd.Sum).tolist() == (2 * wide).tolist()
        strided = torch.arange(6.0)[::2]
        assert hvd.allreduce_(strided, op=hvd.Sum) is strided
        assert strided.tolist() == [0, 4, 8]
        empty, came = hvd.alltoall(torch.empty(0, 2), torch.tensor([0, 0]))
        assert (empty.shape, came.tolist(), came.dtype) == ((0, 2), [0, 0], torch.int32)
        kept = torch.nn.Parameter(torch.full((2,), float(group.rank)))
        hvd.broadcast_(kept.data, 1)
        assert kept.tolist() == [1, 1]

    world(2, work)


def test_operations_return_handles_and_take_groups(world: Runner) -> None:
    def work(group: Group) -> None:
        mine = torch.full((3,), float(group.rank + 1))
        handles = [
            hvd.allreduce_async(mine, name="a", op=hvd.Sum),
            hvd.allgather_async(mine[:1], name="a"),
            hvd.broadcast_async(mine, 1, name="a"),
            hvd.alltoall_async(mine[:2], name="a"),
            hvd.reducescatter_async(mine, name="a", op=hvd.Sum),
            hvd.grouped_allreduce_async([mine, mine.double()], name="g", op=hvd.Sum),
            hvd.grouped_allgather_async([mine[:1], mine.long()[:1]], name="g"),
            hvd.grouped_reducescatter_async([mine, mine], name="g", op=hvd.Sum),
        ]
        order = handles if group.rank else handles[::-1]
        results = {id(handle): hvd.synchronize(handle) for handle in order}
        told = [results[id(handle)] for handle in handles]
        assert all(hvd.poll(handle) for handle in handles)
        assert told[0].tolist() == [3, 3, 3]
        assert told[1].tolist() == [1, 2]
        assert told[2].tolist() == [2, 2, 2]
        assert told[3].tolist() == [1, 2]
        assert told[4].tolist() == [3, 3][group.rank :]
        assert [(t.dtype, t[0].item()) for t in told[5]] == [(torch.float32, 3), (torch.float64, 3)]
        assert [t.tolist() for t in told[6]] == [[1, 2], [1, 2]]
        assert [len(t) for t in told[7]] == [2 - group.rank] * 2
        assert mine.tolist() == [group.rank + 1.0] * 3
        pair = [mine, mine.clone()]
        hvd.grouped_allreduce_(pair, op=hvd.Max)
        hvd.synchronize(hvd.allreduce_async_(pair[1], op=hvd.Sum))
        hvd.synchronize(hvd.grouped_allreduce_async_(pair, op=hvd.Min))
        hvd.synchronize(hvd.broadcast_async_(pair[1], 0))
        assert [t.tolist() for t in pair] == [[2, 2, 2], [4, 4, 4]]

    world(2, work)


@pytest.mark.parametrize("own", [False, True])
def test_gathered_rows_carry_the_gradient_of_the_loss_of_all_rows(world: Runner, own: bool) -> None:
    """Of ranks with 3, 0 and 2 rows. own: each rank has the loss of its own rows, compared with all."""
    x = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    bounds = 0, 3, 3, 5

    def compare(rows: torch.Tensor, whole: torch.Tensor, first: int) -> torch.Tensor:
        numbers = torch.arange(first, first + len(rows))
        return torch.nn.functional.cross_entropy(rows @ whole.T, numbers, reduction="sum")

    def compute_gradient(rows: torch.Tensor, first: int) -> tuple[float, torch.Tensor]:
        weight = torch.eye(4, dtype=torch.float64, requires_grad=True)
        mine = torch.nn.functional.normalize(rows @ weight)
        whole = hvd.gather_rows(mine)
        assert hvd.gather_rows(torch.arange(first, first + len(rows))).tolist() == list(range(5))
        loss = (compare(mine, whole, first) * hvd.size() if own else compare(whole, whole, 0)) / 5
        loss.backward()
        assert weight.grad is not None
        return loss.item(), hvd.allreduce(weight.grad)

    (alone,) = world(1, lambda group: compute_gradient(x, 0))
    parts = [(x[first:past], first) for first, past in pairwise(bounds)]
    found = world(3, lambda group: compute_gradient(*parts[group.rank]))
    assert sum(loss for loss, _ in found) / 3 == pytest.approx(alone[0], rel=1e-12)
    assert all(torch.allclose(gradient, alone[1], rtol=0, atol=1e-12) for _, gradient in found)


NAMED, PLAIN = torch.nn.Module.named_parameters, torch.nn.Module.parameters
LISTS = [torch.nn.Module.state_dict, lambda model: [*NAMED(model)], lambda model: [*PLAIN(model)]]


@pytest.mark.parametrize("listed", LISTS)
def test_parameters_and_optimizer_state_are_broadcast(engine: Runner, listed: Callable[..., Any]) -> None:
    def work(group: Group) -> tuple[list[float], float, int]:
        model = torch.nn.Linear(2, 1, bias=False)
        torch.nn.init.constant_(model.weight, float(group.rank))
        opt = torch.optim.Adam(model.parameters(), lr=0.1 * (group.rank + 1))
        for _ in range(group.rank + 1):
            model(torch.ones(1, 2)).sum().backward()
            opt.step()
        hvd.broadcast_parameters(listed(model), root_rank=1)
        hvd.broadcast_optimizer_state(opt, root_rank=1)
        steps = int(opt.state[model.weight]["step"])
        return model.weight.detach().flatten().tolist(), opt.param_groups[0]["lr"], steps

    results = engine(2, work)
    assert results[0] == results[1]
    assert results[0][1:] == (0.2, 2)


def test_sparse_sums_and_averages(world: Runner) -> None:
    def work(group: Group) -> None:
        place = torch.tensor([[0, group.rank + 1]])
        mine = torch.sparse_coo_tensor(place, torch.tensor([[1.0], [2.0]]), (4, 1), check_invariants=False)
        total = hvd.sparse_allreduce_async(mine, "s", hvd.Sum)()
        average = hvd.synchronize(hvd.sparse_allreduce_async(mine, "s", hvd.Average))
        assert total.to_dense().flatten().tolist() == [2, 2, 2, 0]
        assert average.to_dense().flatten().tolist() == [1, 1, 1, 0]
        with pytest.raises(InvalidInput, match="sparse_allreduce_async"):
            hvd.allreduce(mine)

    world(2, work)


def make_weight(**how: Any) -> tuple[torch.nn.Parameter, Any]:
    """A weight of zeros, and its optimizer."""
    weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    return weight, hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("w", weight)], **how)


def take_step(weight: torch.nn.Parameter, optimizer: Any, *gradient: float) -> None:
    optimizer.zero_grad()
    (weight * torch.tensor(gradient)).sum().backward()
    optimizer.step()


def test_unscaled_learning_rates_are_logged_once(world: Runner, caplog: pytest.LogCaptureFixture) -> None:
    optimizer_module._warn_unscaled_rate.cache_clear()

    def work(group: Group) -> None:
        for scale_lr in (True, False, False):
            make_weight(scale_lr=scale_lr)[1].close()

    world(2, work)
    assert [r.message for r in caplog.records if "does not multiply" in r.message] == [
        "DistributedOptimizer takes the learning rate as it is and does not multiply it by the world's size: "
        "scale_lr=True does, once, unless the program already does."
    ]


def test_optimizers_that_would_train_alone_beside_others_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")  # as torchrun sets it
    says = r"none of the 2 processes that torchrun, .*: use torch's DistributedDataParallel"
    with pytest.raises(InvalidInput, match=says):
        hvd.DistributedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=1.0))
    with pytest.raises(InvalidInput, match="such as allreduce knows none of the 2 processes"):
        hvd.allreduce(torch.ones(3))


def test_buckets_of_gradients_have_rows_in_the_timeline(world: Runner, tmp_path: Path) -> None:
    def work(group: Group) -> None:
        hvd.start_timeline(str(tmp_path / "trace.json"))
        weight, optimizer = make_weight()
        take_step(weight, optimizer, 1.0)
        optimizer.close()
        hvd.stop_timeline()

    world(2, work)
    events = [event for event in json.loads((tmp_path / "trace.json").read_text()) if event]
    row = next(event["pid"] for event in events if event.get("args") == {"name": "gradients 0"})
    spans = [event for event in events if event["pid"] == row and event["ph"] == "X"]
    assert [span["name"] for span in spans] == ["QUEUE", "ALLREDUCE"]
    assert [span["args"] for span in spans] == [{"bytes": 64}] * 2  # whole cache lines


def test_operations_have_second_derivatives(world: Runner) -> None:
    """Of the sum of squares of what each operation gives: its gradients, twice."""
    operations: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: hvd.allreduce(x, op=hvd.Sum),
        hvd.alltoall,
        hvd.allgather,
        lambda x: hvd.broadcast(x, 1),
        lambda x: hvd.reducescatter(x, op=hvd.Average),
    ]

    def work(group: Group) -> list[list[float]]:
        found = []
        for operation in operations:
            x = torch.full((2,), group.rank + 1.0, requires_grad=True)
            (first,) = torch.autograd.grad(operation(x).square().sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), x)
            found.append(second.tolist())
        return found

    first, second = world(2, work)
    assert first == [[8, 8], [2, 2], [1, 1], [0, 0], [2, 2]]
    assert second == [[8, 8], [2, 2], [1, 1], [1, 1], [2, 2]]


def test_invalid_arguments_are_refused() -> None:
    for operation in (hvd.allreduce, hvd.allreduce_, hvd.allgather, hvd.alltoall, hvd.reducescatter):
        with pytest.raises(InvalidInput, match="takes tensors; got a ndarray"):
            operation(np.ones(2))  # type: ignore[operator]
    with pytest.raises(InvalidInput, match="takes tensors; got a float"):
        hvd.broadcast(1.0, 0)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="broadcast_parameters takes tensors; 'lr' is a float"):
        hvd.broadcast_parameters({"lr": 0.1}, root_rank=0)
    for model in (torch.nn.Linear(1, 1), torch.nn.Sequential(torch.nn.Linear(1, 1)), None):
        with pytest.raises(InvalidInput, match=r"a state dict or parameters, such as model.state_dict"):
            hvd.broadcast_parameters(model, root_rank=0)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator")
def test_tensors_of_a_gpu_go_through_pinned_memory(world: Runner) -> None:
    def work(group: Group) -> None:
        mine = torch.full((5, 3), float(group.rank + 1), device="cuda")
        total = hvd.allreduce(mine, op=hvd.Sum)
        assert (total.device.type, total[0, 0].item()) == ("cuda", 3.0)
        assert hvd.allgather(mine[:1]).device.type == "cuda"
        hvd.broadcast_(mine, 1)
        assert mine[0, 0].item() == 2.0
        norm = hvd.SyncBatchNorm(3).cuda()
        norm(mine).sum().backward()

    world(2, work)


def test_ranks_out_of_data_take_part_in_the_steps_of_others(world: Runner) -> None:
    def work(group: Group) -> tuple[list[float], int]:
        weight, optimizer = make_weight()
        for step in range(3 - group.rank):
            take_step(weight, optimizer, 3.0, 6.0)
            if step % 2:
                hvd.allreduce(torch.ones(1), name="metric")
        last = hvd.join()
        hvd.broadcast_parameters({"w": weight}, last)
        second = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("w", weight)])
        with pytest.raises(InvalidInput, match="2 optimizers"):
            hvd.join()
        for one in (optimizer, second):
            one.close()
        return weight.tolist(), last

    # Three ranks' average of 3, then of two and of one over three.
    assert world(3, work) == [([-6.0, -12.0], 0)] * 3


def test_join_with_pending_gradients_is_refused(world: Runner) -> None:
    def work(group: Group) -> list[float]:
        weight, optimizer = make_weight(op=hvd.Sum, backward_passes_per_step=2)
        for batch in range(4 - group.rank):
            weight.sum().backward()
            if batch % 2:
                optimizer.step()
                optimizer.zero_grad()
        if group.rank == 1:
            with pytest.raises(InvalidInput, match=r"call step\(\) first"):
                hvd.join()
            optimizer.step()
            optimizer.zero_grad()
        hvd.join()
        optimizer.close()
        return weight.tolist()

    assert world(2, work) == [[-7.0, -7.0]] * 2


def test_ranks_join_beside_adasum(world: Runner) -> None:
    def work(group: Group) -> tuple[list[float], int]:
        weight, optimizer = make_weight(op=hvd.Adasum)
        for _ in range(3 - group.rank):
            take_step(weight, optimizer, 3.0, 4.0)
        last = hvd.join()
        optimizer.close()
        return weight.tolist(), last

    # Equal steps combine to one of them, and with nothing to that one.
    assert world(2, work) == [([-9.0, -12.0], 0), ([-6.0, -8.0], 0)]


def test_the_rank_with_most_steps_counts_as_the_last_of_a_process_set_to_join(world: Runner) -> None:
    def work(group: Group) -> tuple[list[float], int]:
        part = hvd.add_process_set([0, 1])
        weight, optimizer = make_weight(process_set=part)
        for _ in range((2, 1, 5)[group.rank]):
            take_step(weight, optimizer, 1.0, 2.0)
        last = hvd.join()
        optimizer.close()
        hvd.remove_process_set(part)
        return weight.tolist(), last

    assert world(3, work) == [([-1.5, -3.0], 0), ([-1.0, -2.0], 0), ([-5.0, -10.0], 0)]


def train_compiled(compiled: Callable[[Any], Any], group: Group) -> list[float]:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), hvd.SyncBatchNorm(2), torch.nn.Linear(2, 1))
    for parameter in net.parameters():
        torch.nn.init.constant_(parameter, 0.5)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    model, step = compiled(net), compiled(optimizer.step)
    features = torch.arange(6.0).view(3, 2).square() * (group.rank + 1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(features).square().sum()
        loss.backward()
        step()
    optimizer.close()
    average = compiled(lambda value: hvd.allreduce(2 * value) + 1)(loss.detach())
    return [average.item(), *torch.nn.utils.parameters_to_vector(net.parameters()).tolist()]


@pytest.mark.faults  # for its time
@pytest.mark.filterwarnings("ignore")  # those of torch's compiler
def test_torch_compile_works_with_models_steps_and_operations(world: Runner) -> None:
    expected = world(2, partial(train_compiled, lambda function: function))
    compiled = world(2, partial(train_compiled, partial(torch.compile, backend="eager")))
    assert compiled[0] == compiled[1] == pytest.approx(expected[0])
