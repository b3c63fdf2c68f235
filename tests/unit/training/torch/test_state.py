"""R5, P4: a receiver takes the state over bit by bit, or keeps its own; callbacks and user's values in checkpoints."""

from __future__ import annotations

import copy
import io
import itertools
import os
import pickle
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.prune import l1_unstructured

from elastic_collectives import CollectiveError, Group
from spark_elastic.errors import InvalidInput, StoreError
from spark_elastic.protocol.types import START, Fence, Phase, Position
from spark_elastic.runs.checkpoint import CheckpointStore, SnapshotReader
from spark_elastic.runs.snapshot import Codec
from spark_elastic.training.keras.state import JsonCodec
from spark_elastic.training.progress import TrainingProgress
from spark_elastic.training.torch.callbacks import Callback, LearningRateSchedule, TorchCallbackList, Training
from spark_elastic.training.torch.state import TorchCodec, TorchTrainingState, check_storable
from spark_elastic.training.trainer import sync_state
from tests.checkpoints import reload_from_checkpoint
from tests.fake_group import FakeFabric
from tests.memory_store import make_memory_store
from tests.worlds import run_in_world

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
    # torch casts an optimizer's tensors to the parameter's dtype when it loads: this one would be rounded.
    trained.optimizer.state[trained.model.first.weight]["count"] = torch.tensor(2**24 + 1)
    trained.progress = TrainingProgress(history=[{"loss": 1.5}])
    trained.position = Position(1, Phase.TRAIN, 7)
    return trained


PLAIN = torch.optim.NAdam, torch.optim.ASGD, torch.optim.Adagrad
OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [(kind, {}) for kind in PLAIN]
OPTIMIZERS += [(torch.optim.Adam, {"amsgrad": True}), (torch.optim.SGD, {"momentum": 0.9})]


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
        count = mine.optimizer.state[mine.model.first.weight]["count"]
        assert int(count) == 2**24 + 1
        return taken, mine.digest(), (progress, secret, count.dtype, mine.optimizer.param_groups[0]["lr"])

    done = run_in_world(3, work)
    assert done[0] == done[1] == done[2]


def test_r05_ranks_that_do_not_receive_keep_their_state() -> None:
    def work(group: Group) -> Position:
        return sync_state(train(state()) if group.rank == 0 else state(), group, 0, False)

    assert run_in_world(2, work) == [Position(1, Phase.TRAIN, 7), START]


@pytest.mark.parametrize(
    ("at", "error"),
    [(1, CollectiveError), (2, CollectiveError), (3, CollectiveError), (2, StoreError), (3, StoreError)],
)
def test_r05_a_sync_that_breaks_or_is_damaged_leaves_the_old_state(at: int, error: type[Exception]) -> None:
    """The receiver's group fails at its at-th broadcast, or hands over garbled bytes."""

    def work(group: Group) -> None:
        mine = train(state()) if group.rank == 0 else state()
        before = mine.digest()
        group.barrier()  # connects the two: an abort tells connected peers

        calls, broadcast = itertools.count(1), group.broadcast

        def disturb(array: Any, root: int) -> None:
            is_due = next(calls) == at
            if is_due and error is CollectiveError:
                group.abort("for the test")
            broadcast(array, root)
            if is_due:
                array[len(array) // 2] ^= np.uint8(1)

        if group.rank:
            group.broadcast = disturb  # type: ignore[method-assign]
        if group.rank == 0 and error is StoreError:
            sync_state(mine, group, 0, False)
        else:
            with pytest.raises(error):  # noqa: PT012 - where it shows depends on who is faster
                sync_state(mine, group, 0, group.rank == 1)
                group.barrier()  # the sender may have sent all before it hears
        assert mine.digest() == before
        assert mine.position == (START if group.rank else Position(1, Phase.TRAIN, 7))

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


class StatefulCallback(Callback):
    def __init__(self, kept: Any = None) -> None:
        self.kept = kept


def make_state(callback: Callback, **settings: Any) -> TorchTrainingState:
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), **({"lr": 0.1} | settings))
    callback_list = TorchCallbackList([callback], net, optimizer)
    return TorchTrainingState(net, optimizer, callback_list.callbacks)


def test_numpys_numbers_and_arrays_come_back_with_the_same_values() -> None:
    numbers = {"best": np.float64(1.5), "seen": {np.int64(3)}, np.int64(7): [np.float32(0.5), np.bool_(True)]}
    arrays = {"array": np.arange(3.0), "empty": np.zeros((0, 2), np.float32), "scalar": np.array(2.0)}
    kept = numbers | arrays | {"none": None}
    state = make_state(StatefulCallback(kept), lr=np.float64(0.1), weight_decay=np.float64(0.25))
    check_storable(kept, "callback StatefulCallback")
    reload_from_checkpoint(state)
    found = state.schedulers[0].kept
    assert found["array"].dtype == np.float64
    assert found.pop("scalar").shape == ()
    assert found["empty"].shape == (0, 2)
    assert [found.pop("array").tolist(), found.pop("empty").tolist()] == [[0.0, 1.0, 2.0], []]
    assert found == {"best": 1.5, "seen": {3}, 7: [0.5, True], "none": None}
    assert state.optimizer.param_groups[0]["weight_decay"] == 0.25


class Trap:
    """A pickle of it makes a folder when it is read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._folder),)


@pytest.mark.parametrize("codec", [TorchCodec(), JsonCodec()])
@pytest.mark.parametrize("form", ["pickle", "torch", "parts"])
def test_a_malicious_checkpoint_runs_no_code_and_is_named(tmp_path: Path, codec: Codec, form: str) -> None:
    store, trap = make_memory_store(), Trap(tmp_path / "caught")
    torch_file = io.BytesIO()
    torch.save(trap, torch_file)
    values = pickle.dumps(trap) if form == "pickle" else torch_file.getvalue()
    parts = {"other": b""} if form == "parts" else {"values": values, "memory": b"m"}
    written = CheckpointStore(store, "r").write(Fence(1, 1), Position(0, Phase.TRAIN, 1), parts)
    with pytest.raises(StoreError, match=f"checkpoint {written.name} cannot be loaded") as caught:
        SnapshotReader(store, "r", codec).read([written])
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "caught").exists()


@pytest.mark.parametrize(
    ("kept", "says"),
    [
        (deque([1]), "the deque of callback StatefulCallback, at 'kept'"),
        ([StatefulCallback()], "the StatefulCallback of"),
        (np.array(["a"]), "the array of <U1 of"),
        (lambda: 1, "the function of"),
    ],
)
def test_values_that_no_checkpoint_can_hold_are_refused_by_name(kept: Any, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        check_storable(StatefulCallback(kept).state_dict(), "callback StatefulCallback")


def test_a_stop_that_no_step_has_carried_yet_is_part_of_the_state() -> None:
    old, new = make_state(StatefulCallback()), make_state(StatefulCallback())
    lists = [TorchCallbackList([s.schedulers[0]], s.model, s.optimizer) for s in (old, new)]
    lists[0]._training.stop("the loss is good enough")
    lists[1].load_state_dict(lists[0].state_dict())
    assert lists[1].wants_stop()


class OtherCallback(StatefulCallback):
    """Another class with an attribute of the same name."""


def test_a_resumed_run_may_have_other_callbacks() -> None:
    """Each continues the one of its class; a user has mended one, or added a logger."""
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    rate = LearningRateSchedule(lambda o: torch.optim.lr_scheduler.StepLR(o, 1))
    before = TorchCallbackList([StatefulCallback(1), rate, StatefulCallback(2), Callback()], net, optimizer)
    state = TorchTrainingState(net, optimizer, before.callbacks)
    optimizer.step()
    rate.on_epoch_end(None, {})  # type: ignore[arg-type]
    again = LearningRateSchedule(lambda o: torch.optim.lr_scheduler.StepLR(o, 1))
    after = [OtherCallback(3), StatefulCallback(), StatefulCallback(), StatefulCallback(4), again]
    resumed = TorchTrainingState(net, optimizer, TorchCallbackList(after, net, optimizer).callbacks)
    reload_from_checkpoint(state, resumed)
    assert [each.kept for each in resumed.schedulers[:4]] == [3, 1, 2, 4]
    assert again.state_dict()["last_epoch"] == 1


def test_a_stop_of_the_last_step_survives_a_world_that_breaks_at_the_epochs_end() -> None:
    """`on_step_end`, which asked for it, is not called again for that step."""

    class Stopping(Callback):
        def on_step_end(self, training: Training, logs: Mapping[str, Any]) -> None:
            training.stop("it is enough")

    net, world = torch.nn.Linear(2, 1), FakeFabric(1).group(0)
    callback_list = TorchCallbackList([Stopping()], net, torch.optim.SGD(net.parameters()))
    callback_list.on_step_finalized({})
    world.abort("a peer was lost")
    with pytest.raises(CollectiveError):
        callback_list.on_epoch_end(world, {})
    assert callback_list.on_epoch_end(FakeFabric(1).group(0), {}) == "it is enough"


class Thawing(Callback):
    """Lowers the rate in each epoch; changes what the model trains, and its optimizer's groups, once in epoch 2."""

    def __init__(self) -> None:
        self.begun = 0

    def on_epoch_begin(self, training: Training, epoch: int) -> None:
        self.begun += 1
        training.learning_rate *= 0.5
        if epoch == 2:
            model, bias = training.model, training.model.get_parameter("bias")
            bias.requires_grad_(True)
            training.optimizer.add_param_group({"params": [bias], "lr": 4.0})
            model.get_parameter("weight").requires_grad_(False)
            model.temperature = np.float64(0.5)  # type: ignore[assignment]
            model.levels["sizes"].append(32)  # type: ignore[index,union-attr]
            with torch.no_grad():
                model.get_parameter("weight").mul_(0.5)
            model.wide = torch.ones(1, dtype=torch.float64)
            model.training = False


def make_thawing() -> tuple[TorchCallbackList, TorchTrainingState]:
    net = torch.nn.Linear(2, 1)
    net.bias.requires_grad_(False)
    net.levels = {"sizes": [16]}  # type: ignore[assignment]
    for name in ("wide", "unused"):
        net.register_buffer(name, torch.zeros(1))
    optimizer = torch.optim.SGD([net.weight], lr=1.0, momentum=0.9)
    callback_list = TorchCallbackList([Thawing()], net, optimizer)
    return callback_list, TorchTrainingState(net, optimizer, [callback_list, *callback_list.callbacks])


@pytest.mark.parametrize("joined", [2, 3])
def test_p2_r22_a_worker_that_joins_trains_the_parameters_that_the_others_train(joined: int) -> None:
    """Whether it joins in the epoch in which a callback has changed that, or later. An epoch begins once, however many
    worlds take its steps."""
    (old_list, old), (new_list, new) = make_thawing(), make_thawing()
    for epoch in range(joined + 1):
        for _ in range(2):
            old_list.on_epoch_begin(epoch)
    del old.model.unused
    old.model(torch.ones(1, 2)).sum().backward()
    old.optimizer.step()
    reload_from_checkpoint(old, new)
    for _ in range(2):
        new_list.on_epoch_begin(joined)
    for list_, state in ((old_list, old), (new_list, new)):
        list_.on_epoch_begin(joined + 1)
        state.optimizer.zero_grad()
        state.model(torch.ones(1, 2)).sum().backward()
        state.optimizer.step()
        model, groups = state.model, state.optimizer.param_groups
        assert [p.requires_grad for p in model.parameters()] == [False, True]
        assert (model.temperature, model.training) == (0.5, False)
        assert (model.levels, dict(model.named_buffers()).keys()) == ({"sizes": [16, 32]}, {"wide"})
        assert model.wide.dtype is torch.float64
        assert [group["lr"] for group in groups] == [0.5 ** (joined + 2)] * 2
        assert groups[1]["params"][0] is model.bias
    assert old.digest() == new.digest()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda net: net.__setitem__(1, torch.nn.Tanh()), "layer '1'"),
        (lambda net: l1_unstructured(net[0], "weight", 0.5), "parameter '0.weight'"),
        (lambda net: net.append(torch.nn.Linear(2, 2)), "parameter '2.bias'"),
    ],
)
def test_r22_layers_and_parameters_that_training_replaces_are_named(change: Any, name: str) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    state = TorchTrainingState(net, torch.optim.SGD(net.parameters(), lr=1.0))
    net.append(torch.nn.Flatten())  # as forward may, when it is first called
    state.module.export()
    del net[2]
    change(net)
    with pytest.raises(InvalidInput, match=f"added, removed or replaced the {name} of the model"):
        state.module.export()


def test_r22_a_part_of_the_model_that_one_rank_alone_has_frozen_is_named() -> None:
    class Freezing(Callback):
        def on_epoch_begin(self, training: Training, epoch: int) -> None:
            if training.rank == epoch == 1:
                training.model.get_parameter("bias").requires_grad_(False)

    def work(group: Group) -> None:
        net = torch.nn.Linear(2, 1)
        callback_list = TorchCallbackList([Freezing()], net, torch.optim.SGD(net.parameters(), lr=1.0))
        callback_list.on_world_begin(group)
        callback_list.on_epoch_begin(0)
        with pytest.raises(InvalidInput, match="'bias' is trained on rank 0 and frozen on rank 1 in epoch 2"):
            callback_list.on_epoch_begin(1)

    run_in_world(2, work)


def test_p7_an_epoch_begins_again_with_a_state_that_has_not_begun_it() -> None:
    """The checkpoint is older than the worker."""
    (old_list, old), (worker_list, worker) = make_thawing(), make_thawing()
    old_list.on_epoch_begin(0)
    worker_list.on_epoch_begin(0)
    worker_list.on_epoch_begin(1)
    reload_from_checkpoint(old, worker)
    worker_list.on_epoch_begin(1)
    assert (worker.optimizer.param_groups[0]["lr"], worker.schedulers[1].begun) == (0.25, 2)
