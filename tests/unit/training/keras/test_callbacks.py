"""Callbacks of Keras: each hook once, writers on rank 0 alone, rank 0's decisions for all, put back where it broke."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

from elastic_collectives import CollectiveError
from spark_elastic.training.keras.callback_list import KerasCallbackList

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
PARAMS = {"epochs": 3, "steps": 2, "verbose": 0}


class CallCounter(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def on_train_begin(self, logs: Any = None) -> None:
        self.calls.append("begin")

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.calls.append(f"epoch {epoch}")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.calls.append(f"end {epoch} {sorted(logs)}")


class SilentModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Writes nothing, but is of the kind that does."""

    def __init__(self) -> None:
        super().__init__("unused.keras")
        self.calls = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Nothing."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.calls += 1


def begin(*callbacks: Any) -> tuple[KerasCallbackList, Any]:
    """As `make`, of a world that has begun its first epoch."""
    callback_list, model = make(*callbacks)
    callback_list.on_world_begin(make_group())
    callback_list.on_epoch_begin(0)
    return callback_list, model


def make(*callbacks: Any) -> tuple[KerasCallbackList, Any]:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.5), "mse")
    return KerasCallbackList(callbacks, model, PARAMS), model


def make_group(rank: int = 0, theirs: bytes | None = None) -> Any:
    """A group whose rank 0 says `theirs`, or what this rank says."""
    return SimpleNamespace(rank=rank, size=1, allgather_bytes=lambda mine: [theirs or mine])


def make_recorder(said: list[bytes]) -> Any:
    """Rank 0 of two; what it says is kept."""
    return SimpleNamespace(rank=0, size=2, allgather_bytes=lambda mine: said.append(mine) or [mine, b""])


def break_gather(mine: bytes) -> list[bytes]:
    raise CollectiveError([1], "a peer is gone")


BROKEN: Any = SimpleNamespace(rank=0, size=2, allgather_bytes=break_gather)


def test_a_newcomer_takes_over_the_state_of_callbacks() -> None:
    stopping = keras.callbacks.EarlyStopping("loss", patience=5, restore_best_weights=True)
    callback_list, model = begin(stopping)
    for epoch in range(2):
        callback_list.on_epoch_end(make_group(), {"epoch": epoch, "loss": 1.0 + epoch})
    other = keras.callbacks.EarlyStopping("loss", patience=5, restore_best_weights=True)
    joined, _ = make(other)
    model.stop_training = True  # by a callback, and no step has carried it yet
    joined.load(callback_list.capture())
    joined.on_world_begin(make_group(rank=1))
    assert joined.wants_stop()
    assert (other.wait, other.best, other.best_epoch) == (1, 1.0, 0)
    np.testing.assert_array_equal(other.best_weights[0], model.get_weights()[0])


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("kind", [keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau])
def test_what_counts_as_progress_stays_where_a_callback_is_taken_over(kind: Any, breaks: bool) -> None:
    """Keras makes min_delta negative in the first epoch that a process sees, so it would become positive in a newcomer,
    or where that epoch's end breaks: every epoch would count as progress."""
    first = kind("loss", patience=2, min_delta=0.1)
    callback_list, _ = begin(first)
    if breaks:
        with pytest.raises(CollectiveError):
            callback_list.on_epoch_end(BROKEN, {"epoch": 0, "loss": 1.0})
    callback_list.on_epoch_end(make_group(), {"epoch": 0, "loss": 1.0})
    second = kind("loss", patience=2, min_delta=0.1)
    joined, _ = make(second)
    joined.load(callback_list.capture())
    for each, callback in ((callback_list, first), (joined, second)):
        each.on_world_begin(make_group())
        each.on_epoch_begin(1)
        each.on_epoch_end(make_group(), {"epoch": 1, "loss": 0.95})
        assert (callback.wait, callback.best) == (1, 1.0)


def test_a_resumed_run_may_have_other_callbacks() -> None:
    before, _ = begin(CallCounter(), keras.callbacks.EarlyStopping("loss", patience=5))
    for _ in range(2):  # worlds that continue the same epoch: each hook is called once
        before.on_world_begin(make_group())
        before.on_epoch_begin(0)
    before.on_epoch_end(make_group(), {"epoch": 0, "loss": 1.0})
    stopping = keras.callbacks.EarlyStopping("loss", patience=5)
    added, counts = SilentModelCheckpoint(), CallCounter()
    after, _ = make(stopping, added, counts, CallCounter())
    after.load(before.capture())
    after.on_world_begin(make_group())
    assert (stopping.best, added.calls) == (1.0, 0)
    assert counts.calls == ["begin", "epoch 0", "end 0 ['loss']"]


def test_writing_callbacks_run_on_rank_0_and_their_state_goes_to_all_ranks() -> None:
    said: list[bytes] = []
    leader, follower = SilentModelCheckpoint(), SilentModelCheckpoint()
    first, _ = make(leader)
    first.on_world_begin(make_group())
    told = make_recorder(said)
    first.on_epoch_end(told, {"epoch": 0, "loss": 1.0})
    second, model = make(follower)
    model.optimizer.learning_rate = 0.25
    second.on_world_begin(make_group(rank=1))
    second.on_epoch_end(make_group(rank=1, theirs=said[0]), {"epoch": 0, "loss": 1.0})
    assert (leader.calls, follower.calls) == (1, 1)  # the second was told, it did not write
    assert float(np.asarray(model.optimizer.learning_rate)) == 0.5, "rank 0's rate goes for all"


def test_an_epochs_end_that_breaks_leaves_callbacks_as_they_were() -> None:
    reduce = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.0)
    stop = keras.callbacks.EarlyStopping("loss", patience=1)
    callback_list, model = begin(reduce, stop)
    assert callback_list.on_epoch_end(make_group(), {"epoch": 0, "loss": 1.0}) is None

    with pytest.raises(CollectiveError):
        callback_list.on_epoch_end(BROKEN, {"epoch": 1, "loss": 2.0})
    rate = model.optimizer.learning_rate
    assert (float(np.asarray(rate)), stop.wait, model.stop_training) == (0.5, 0, False)
    reason = callback_list.on_epoch_end(make_group(), {"epoch": 1, "loss": 2.0})
    assert reason == "a callback set stop_training"
    assert float(np.asarray(model.optimizer.learning_rate)) == 0.25


def test_an_epochs_end_that_breaks_leaves_weights_that_a_callback_swaps_as_they_were() -> None:
    swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
    callback_list, model = make(swap)
    model.compile(keras.optimizers.SGD(0.5, use_ema=True), "mse")
    model.optimizer.build(model.trainable_variables)
    averages = model.optimizer._model_variables_moving_average
    for variable, average in zip(model.trainable_variables, averages, strict=True):
        variable.assign(np.full(variable.shape, 1.0))
        average.assign(np.full(variable.shape, 2.0))

    def find_weights() -> set[float]:
        return {float(value) for weights in model.get_weights() for value in weights.ravel()}

    callback_list.on_world_begin(make_group())
    callback_list.on_epoch_begin(0)
    with pytest.raises(CollectiveError):
        callback_list.on_epoch_end(BROKEN, {"epoch": 0, "loss": 2.0})
    assert find_weights() == {1.0}
    callback_list.on_epoch_end(make_group(), {"epoch": 0, "loss": 2.0})
    assert find_weights() == {2.0}
    callback_list.on_epoch_begin(1)
    assert find_weights() == {1.0}


@pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"), reason="this Keras has no MultiOptimizer"
)
def test_several_optimizers_have_no_common_rate_and_end_with_their_averages() -> None:
    callback_list, model = make(keras.callbacks.EarlyStopping("loss"))
    averaging = keras.optimizers.SGD(0.1, use_ema=True)
    optimizers = keras.optimizers.OptimizerMap(averaging, {".*bias": keras.optimizers.Adam(0.01)})
    model.compile(keras.optimizers.MultiOptimizer(optimizers), "mse")
    model.train_on_batch(np.ones((4, 2), "f"), np.ones((4, 1), "f"))
    (average,) = averaging._model_variables_moving_average
    average.assign(np.full(average.shape, 2.0))
    callback_list.on_world_begin(make_group())
    callback_list.on_epoch_begin(0)
    assert callback_list.on_epoch_end(make_group(), {"epoch": 0, "loss": 1.0}) is None
    callback_list.on_fit_end([{"epoch": 0, "loss": 1.0}])
    assert model.get_weights()[0].tolist() == [[2.0], [2.0]]


def test_the_next_rank_0_appends_to_the_csv_log(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    said: list[bytes] = []
    told = make_recorder(said)
    first, _ = make(keras.callbacks.CSVLogger(path))
    second, _ = make(keras.callbacks.CSVLogger(path))
    first.on_world_begin(told)
    second.on_world_begin(make_group(rank=1))
    first.on_epoch_begin(0)
    first.on_epoch_end(told, {"epoch": 0, "loss": 1.0})
    second.on_epoch_begin(0)
    second.on_epoch_end(make_group(rank=1, theirs=said[0]), {"epoch": 0, "loss": 1.0})
    second.on_epoch_begin(1)
    second.on_world_begin(make_group())  # rank 0 was lost
    second.on_epoch_end(make_group(), {"epoch": 1, "loss": 0.5})
    resumed, _ = make(keras.callbacks.CSVLogger(path))  # all were lost
    resumed.load(second.capture())
    resumed.on_world_begin(make_group())
    resumed.on_epoch_end(make_group(), {"epoch": 2, "loss": 0.25})
    for callback_list in (first, second, resumed):
        callback_list._callbacks[0].csv_file.close()
    assert path.read_text().split() == ["epoch,loss,val_loss", "0,1.0,NA", "1,0.5,NA", "2,0.25,NA"]


@pytest.mark.parametrize("name", ["ProgbarLogger", "TensorBoard"])
def test_a_writing_callback_of_keras_continues_in_the_middle_of_an_epoch(name: str, tmp_path: Path) -> None:
    arguments = {"log_dir": str(tmp_path), "write_graph": False} if name == "TensorBoard" else {}
    callback_list, _ = make(getattr(keras.callbacks, name)(**arguments))
    callback_list.on_world_begin(make_group(rank=1))
    assert not list(tmp_path.iterdir()), "rank 0 alone writes"
    callback_list.on_epoch_begin(0)
    callback_list.on_validation_begin()
    callback_list.on_world_begin(make_group())  # rank 0 was lost
    callback_list.on_epoch_end(make_group(), {"epoch": 0, "loss": 1.0, "val_loss": 2.0})
    callback_list.on_fit_end([{"epoch": 0, "loss": 1.0}])


def test_numbers_that_callbacks_add_are_in_the_history_as_rank_0_has_them() -> None:
    def make_adding(number: float) -> KerasCallbackList:
        def add(epoch: int, logs: Any) -> None:
            logs.update(own=number, tensor=keras.ops.convert_to_tensor(number), no_number=make)

        adding = keras.callbacks.LambdaCallback(on_epoch_end=add)
        callback_list, _ = make(adding)
        callback_list.on_world_begin(make_group())
        return callback_list

    said: list[bytes] = []
    told = make_recorder(said)
    logs: list[dict[str, Any]] = [{"epoch": 0, "loss": 1.0} for _ in range(2)]
    make_adding(2.0).on_epoch_end(told, logs[0])
    make_adding(3.0).on_epoch_end(make_group(rank=1, theirs=said[0]), logs[1])
    assert logs == [{"epoch": 0, "loss": 1.0, "own": 2.0, "tensor": 2.0}] * 2


def test_callbacks_begin_an_interrupted_step_once_and_are_called_for_validation() -> None:
    class BatchRecorder(keras.callbacks.Callback):
        calls = ""

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.calls += f"{batch} "

        def on_test_begin(self, logs: Any = None) -> None:
            self.calls += "test "

        def on_test_end(self, logs: Any = None) -> None:
            self.calls += f"{logs} "

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.calls += "end"

    told, joined = BatchRecorder(), BatchRecorder()
    callback_list, _ = make(told)
    callback_list.on_epoch_begin(0)
    callback_list.on_step_begin(0, 0)
    callback_list.on_step_begin(0, 1)
    newcomer, _ = make(joined)
    newcomer.load(callback_list.capture())
    for one in (callback_list, newcomer):  # a new world, after step 1 was given up
        one.on_world_begin(make_group())
        one.on_step_begin(0, 1)
        one.on_validation_begin()
        one.on_validation_begin()
        one.on_epoch_end(make_group(), {"epoch": 0, "loss": 1.0, "val_loss": 2.0, "val_rows": 7})
    assert told.calls == joined.calls == "0 1 test {'loss': 2.0} end"


def test_the_final_weights_are_the_best_or_averaged_ones_if_callbacks_make_them() -> None:
    callback_list, model = begin(keras.callbacks.EarlyStopping("loss", patience=1, restore_best_weights=True))
    kept = []
    for epoch, loss in enumerate((2.0, 1.0, 3.0)):
        model.set_weights([np.full_like(weights, epoch) for weights in model.get_weights()])
        kept.append(callback_list.on_epoch_end(make_group(), {"epoch": epoch, "loss": loss}))
    callback_list.on_fit_end([{"epoch": 2, "loss": 3.0}])
    assert kept == [None, None, "a callback set stop_training"]
    assert {float(value) for weights in model.get_weights() for value in weights.ravel()} == {1.0}
    model.compile(keras.optimizers.SGD(0.1, use_ema=True), "mse")
    model.optimizer.build(model.trainable_variables)
    for average in model.optimizer._model_variables_moving_average:
        average.assign(np.full(average.shape, 2.0))
    KerasCallbackList([], model, PARAMS).on_fit_end([{"epoch": 4, "loss": 0.1}])
    assert {float(value) for weights in model.get_weights() for value in weights.ravel()} == {2.0}
