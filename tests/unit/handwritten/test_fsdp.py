"""What `FSDPState` commits of models that FSDP2 divides: as rank 1 of 4, over torch's fake process group."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from spark_elastic.errors import InvalidInput
from spark_elastic.handwritten.fsdp import DividedModelHandler, DividedOptimizerHandler
from spark_elastic.handwritten.sharded_commits import (
    CommitKey,
    DividedTensor,
    ShardBuilder,
    ShardedCommits,
    get_shard_range,
    lay_out,
)
from spark_elastic.handwritten.torch_state import ModelStateHandler, OptimizerStateHandler, TorchState
from spark_elastic.integrations import torch_distributed as registration
from spark_elastic.integrations.divided_models import DividedModel
from spark_elastic.protocol.types import Phase, Position
from spark_elastic.runs.snapshot import SnapshotBuilder

RANK, SIZE = 1, 4


@pytest.fixture(autouse=True)
def place(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """(rank, size)"""
    rank, size = getattr(request, "param", (RANK, SIZE))
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    yield rank, size
    dist.destroy_process_group()


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 5)  # 5 rows over 4 ranks: 2, 2, 1, 0
        self.norm = torch.nn.BatchNorm1d(5)
        self.last = torch.nn.Linear(5, 1)  # one row: rank 1 has nothing of it


def make(**options: Any) -> tuple[Net, Net]:
    """(whole, divided)"""
    torch.manual_seed(2)
    whole, divided = Net().double(), Net().double()
    divided.load_state_dict(whole.state_dict())
    fully_shard(divided, **options)
    return whole, divided


def test_a_commit_holds_this_ranks_shards_and_replicated_values() -> None:
    whole, divided = make()
    builder = ShardBuilder()
    values = DividedModelHandler(divided).capture(builder)
    assert set(values["divided"]) == {name for name, _ in whole.named_parameters()}
    assert not values["parameters"]
    assert set(values["buffers"]) == {name for name, _ in whole.named_buffers()}
    for name, parameter in whole.named_parameters():
        piece = values["divided"][name]
        begin, end = get_shard_range(len(parameter), SIZE, RANK)
        expected = parameter.detach()[begin:end].numpy()
        kept = builder.locals[piece.number].view(np.float64).reshape(expected.shape)
        np.testing.assert_array_equal(kept, expected)
        assert builder.tensors[piece.number] == DividedTensor(len(parameter), 8 * parameter[0].numel())
    extents = lay_out(builder.tensors, SIZE, RANK)[0]
    assert [extent.nbytes for extent in extents] == [local.nbytes for local in builder.locals]


@pytest.mark.parametrize("through_data", [False, True], ids=["in place", "through .data"])
@pytest.mark.parametrize("changes_momentum", [False, True], ids=["a parameter", "an optimizer's state"])
def test_r20_a_divided_commit_is_whole_before_anything_can_change_it(
    changes_momentum: bool, through_data: bool
) -> None:
    _, model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    handlers = {"model": DividedModelHandler(model), "optimizer": DividedOptimizerHandler(optimizer)}
    key, position = CommitKey(1, (1, 1), SIZE), Position(0, Phase.TRAIN, 1)

    def capture(builder: SnapshotBuilder) -> dict[str, Any]:
        return {name: handler.capture(builder) for name, handler in handlers.items()}

    commit = ShardedCommits().copy_state(RANK, key, position, capture)
    shard, common = commit.shards[RANK].tobytes(), commit.common.memory.tobytes()
    weight: Any = model.first.weight
    changed = optimizer.state[weight]["momentum_buffer"] if changes_momentum else weight
    before = changed.to_local().detach().numpy().copy()
    with torch.no_grad():
        (changed.to_local().data if through_data else changed.to_local()).mul_(2.0)
    assert (changed.to_local().detach().numpy() == 2.0 * before).all()
    assert before.tobytes() in shard
    assert (commit.shards[RANK].tobytes(), commit.common.memory.tobytes()) == (shard, common)


def test_a_state_of_whole_models_refuses_a_divided_one() -> None:
    says = "TorchState holds whole models: divide the model by fully_shard and use"
    with pytest.raises(InvalidInput, match=says):
        TorchState(make()[1])


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_model_that_fsdp1_divides_is_refused(use_orig_params: bool) -> None:
    part = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"), use_orig_params=use_orig_params)
    for handler in (ModelStateHandler, DividedModelHandler):
        with pytest.raises(InvalidInput, match="divide it by fully_shard and use FSDPState"):
            handler(torch.nn.Sequential(part))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_an_optimizer_that_divides_its_state_is_refused() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    optimizer = ZeroRedundancyOptimizer(Net().parameters(), torch.optim.Adam, lr=0.1)
    own = OptimizerStateHandler, SnapshotBuilder()
    for handler, builder in (own, (DividedOptimizerHandler, ShardBuilder())):
        with pytest.raises(InvalidInput, match="use the optimizer that it wraps"):
            handler(optimizer).capture(builder)


def test_parameters_and_moments_are_restored_divided() -> None:
    _, source = make()
    source.norm.bias.requires_grad_(False)  # training has frozen it
    optimizer = torch.optim.AdamW(source.parameters(), lr=0.1)
    for parameter in source.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    builder = ShardBuilder()
    saved = DividedModelHandler(source).capture(builder), DividedOptimizerHandler(optimizer).capture(builder)
    memory = np.empty(builder.size, np.uint8)
    for offset, piece in builder.immediate + builder.deferred:
        memory[offset : offset + piece.nbytes] = piece
    _, target = make()
    fresh = torch.optim.AdamW(target.parameters(), lr=0.5)
    handlers = DividedModelHandler(target), DividedOptimizerHandler(fresh)
    for handler, values in zip(handlers, saved, strict=True):
        handler.pieces = [local.copy() for local in builder.locals]
        handler.load(values, memory)
    assert fresh.param_groups[0]["lr"] == 0.1
    assert [name for name, p in target.named_parameters() if not p.requires_grad] == ["norm.bias"]
    for mine, theirs in zip(target.parameters(), source.parameters(), strict=True):
        assert torch.equal(mine.to_local(), theirs.to_local())
        for name in ("exp_avg", "exp_avg_sq"):
            moment, expected = fresh.state[mine][name], optimizer.state[theirs][name]
            assert moment.placements == (Shard(0),)
            assert (moment.shape, moment.stride()) == (expected.shape, expected.stride())
            assert torch.equal(moment.to_local(), expected.to_local())
        assert fresh.state[mine]["step"] == 1
        mine.grad = torch.ones_like(mine)
    fresh.step()


def test_a_trainers_model_is_divided_again_in_place_without_values() -> None:
    model = Net().double()
    whole, hooks = list(model.parameters()), len(model._forward_hooks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    divided = DividedModel(model, lambda: [optimizer], [optimizer])
    fully_shard(model.first)
    fully_shard(model)
    divided.restore(with_values=True)
    assert list(model.parameters()) == whole, "nothing was committed yet, and the initial weights are gone"
    optimizer.load_state_dict(optimizer.state_dict())  # makes new groups, as Accelerate does
    divided.restore(with_values=False)
    assert (type(model), type(model.first), len(model._forward_hooks)) == (Net, torch.nn.Linear, hooks)
    assert all(parameter.is_meta for parameter in model.parameters())
    fully_shard(model.first)
    fully_shard(model)
    divided.fill(torch.device("cpu"))
    assert [tuple(p.to_local().shape) for p in model.first.parameters()] == [(2, 3), (2,)]
    assert not any(parameter.is_meta for parameter in model.parameters())
    trained = optimizer.param_groups[0]["params"]
    assert all(mine is theirs for mine, theirs in zip(trained, model.parameters(), strict=True))
    with pytest.raises(InvalidInput, match="lost before the first step, and the initial weights with them"):
        divided.restore(with_values=True)
    stranger = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    with pytest.raises(InvalidInput, match="trains a parameter that belongs to no part of the model"):
        DividedModel(model, lambda: [stranger], [stranger])


def test_other_placements_are_refused() -> None:
    by_columns = torch.nn.Linear(SIZE, 2, bias=False)
    fully_shard(by_columns, shard_placement_fn=lambda p: Shard(1))
    says = r"'weight' has the placements \(Shard\(dim=1\),\).*call fully_shard"
    with pytest.raises(InvalidInput, match=says):
        DividedModelHandler(by_columns).capture(ShardBuilder())
    _, hybrid = make(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    with pytest.raises(InvalidInput, match=r"on a mesh of shape \(2, 2\): call fully_shard without mesh"):
        DividedModelHandler(hybrid).capture(ShardBuilder())


def test_another_model_is_refused() -> None:
    _, divided = make()
    handler = DividedModelHandler(divided)
    values = handler.capture(ShardBuilder())
    del values["divided"]["last.bias"]
    with pytest.raises(InvalidInput, match=r"made another model than in the world before.*last\.bias"):
        handler.load(values, np.empty(0, np.uint8))


OLDER = """
import torch, torch.distributed.fsdp as fsdp
version, torch.__version__ = torch.__version__, "2.6.0+cpu"
for _ in range(2):
    try:
        import spark_elastic.torch.fsdp
    except Exception as error:
        print(error)
    torch.__version__ = version
    vars(fsdp).pop("FSDPModule", None)
"""


def test_an_older_torch_gets_a_sentence() -> None:
    done = subprocess.run([sys.executable, "-c", OLDER], check=False, capture_output=True, text=True)
    said = "FSDPState needs torch 2.7 or newer, whose fully_shard runs on CPUs; this is torch"
    assert done.stdout.count(said) == 2, done.stderr


@pytest.mark.parametrize("place", [(0, 3), (2, 3)], indirect=True)
def test_results_of_divided_tensors_have_the_place_of_a_worker_in_its_new_world(
    place: tuple[int, int],
) -> None:
    rank, size = place
    divided = DTensor.from_local(
        torch.ones(2), init_device_mesh("cpu", (size,)), (Shard(0),), run_check=False
    )
    assert (divided + 1).device_mesh.get_coordinate() == (rank,)
    registration._WorldGroups().close()
