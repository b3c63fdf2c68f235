"""A model as bytes: what a worker's file may say, what loading leaves behind; values as JSON, columns as inputs."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

from spark_elastic.data.manifest import Column
from spark_elastic.errors import InvalidInput, StoreError
from spark_elastic.protocol.types import START
from spark_elastic.runs.snapshot import SnapshotBuilder, build_snapshot
from spark_elastic.training.keras.archive import Archive, save_model
from spark_elastic.training.keras.batching import Inputs
from spark_elastic.training.keras.compiled import CompiledLosses
from spark_elastic.training.keras.state import from_json_tree, is_plain, to_json_tree

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
X = np.random.default_rng(0).normal(size=(8, 2)).astype("f")
Y = 2 * X.sum(1, keepdims=True)


def net(units: int = 1, between: Any = None) -> Any:
    layers = [keras.Input((2,)), *filter(None, [between]), keras.layers.Dense(units)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.Adam(0.1), keras.losses.MeanSquaredError())
    return model


def test_only_numbers_are_read_from_the_file_that_a_worker_wrote() -> None:
    mine, theirs = Archive.of(net()), net()
    theirs.train_on_batch(X, Y)
    weights, steps = theirs.get_weights(), int(theirs.optimizer.iterations)
    trained = mine.load()
    trained.train_on_batch(X, Y)
    trained.set_weights(weights)
    found = mine.with_weights(save_model(trained)).load()
    np.testing.assert_array_equal(found.get_weights()[0], weights[0])
    assert int(found.optimizer.iterations) == steps == 1
    np.testing.assert_array_equal(found.optimizer.variables[2], trained.optimizer.variables[2])
    with pytest.raises(StoreError, match="do not fit the model"):
        mine.with_weights(save_model(net(units=3)))
    with pytest.raises(StoreError, match="do not fit the model"):
        mine.with_weights(b"nothing of the kind")


def test_a_worker_cannot_put_code_into_the_model() -> None:
    mine, theirs = Archive.of(net()), net(between=keras.layers.Lambda(lambda x: x * 0))
    theirs.optimizer.build(theirs.trainable_variables)
    (layer,) = mine.with_weights(save_model(theirs)).load().layers
    assert type(layer).__name__ == "Dense"


def test_a_trained_model_is_compiled_as_the_user_compiled_it() -> None:
    user, trained = net(), Archive.of(net()).load()
    CompiledLosses(trained, np.zeros((1, 1), "f"), trained(np.zeros((1, 2), "f")))
    fitted = Archive(save_model(trained), Archive.of(user).custom).load()
    fitted.set_weights(user.get_weights())
    assert fitted.loss.get_config() == user.loss.get_config()
    assert fitted.train_on_batch(X, Y) == pytest.approx(user.train_on_batch(X, Y))
    np.testing.assert_allclose(fitted.get_weights()[0], user.get_weights()[0], rtol=1e-6)


def test_a_worker_whose_keras_runs_on_another_backend_says_what_to_set(monkeypatch: Any) -> None:
    archive = Archive.of(net())
    monkeypatch.setattr(keras.backend, "backend", lambda: "torch")
    with pytest.raises(InvalidInput, match="on torch in this process: set KERAS_BACKEND=tensorflow"):
        archive.load()


def test_variables_without_weight_decay_stay_without_it() -> None:
    model = net()
    optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    model.compile(optimizer, "mse")
    archive = Archive.of(model)
    for loaded in (archive.load(), archive.with_weights(save_model(archive.load())).load()):
        assert [loaded.optimizer._use_weight_decay(v) for v in loaded.trainable_variables] == [True, False]
    assert archive.identity() != dataclasses.replace(archive, undecayed=()).identity()


def test_a_layer_with_adapters_still_learns() -> None:
    model = net()
    model.layers[0].enable_lora(1)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    archive = Archive.of(model)
    trained = archive.load()
    np.testing.assert_array_equal(trained(X), model(X))
    kernel, before = trained.layers[0]._kernel.numpy(), trained(X).numpy()
    for _ in range(3):
        trained.train_on_batch(X, Y)
    np.testing.assert_array_equal(trained.layers[0]._kernel, kernel)
    moved = np.abs(trained(X) - before - trained.layers[0].bias.numpy()).max()
    assert moved > 0.01, "the bias alone learned"
    found = archive.with_weights(save_model(trained)).load()
    np.testing.assert_allclose(found(X), trained(X), rtol=1e-5, atol=1e-6)
    assert np.any(found.layers[0].lora_kernel_a.numpy())


@pytest.mark.skipif(
    not hasattr(keras.optimizers, "ScheduleFreeAdamW"), reason="this Keras has no ScheduleFreeAdamW"
)
@pytest.mark.parametrize(("steps", "adapts"), [(0, False), (0, True), (2, False)])
def test_an_optimizer_that_keeps_a_copy_of_weights_has_that_of_the_loaded(steps: int, adapts: bool) -> None:
    model = net()
    if adapts:
        model.layers[0].enable_lora(1)
    model.compile(keras.optimizers.ScheduleFreeAdamW(0.1), "mse")
    for _ in range(steps):
        model.train_on_batch(X, Y)
    loaded = Archive.of(model).load()
    assert model.optimizer.built == (steps > 0), "the user's own optimizer was built"
    model.optimizer.build(model.trainable_variables)
    for ours, theirs in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(ours, theirs)


class Halved(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step: Any) -> Any:
        return 0.5

    def get_config(self) -> dict[str, Any]:
        return {}


class OwnAdamW(keras.optimizers.AdamW):  # type: ignore[misc,unused-ignore] # untyped
    """Of the user's."""


def choose_optimizer(variable: Any) -> Any:
    return OwnAdamW(Halved(), weight_decay=0.5)


@pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"), reason="this Keras has no MultiOptimizer"
)
@pytest.mark.parametrize("how", ["by name", "by function"])
def test_optimizers_of_a_multi_optimizer_are_those_of_the_user(how: str) -> None:
    """Their classes, their schedules, and what each excludes from its weight decay."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, name="one"), keras.layers.Dense(1)])
    kept = OwnAdamW(Halved(), weight_decay=0.5)
    kept.exclude_from_weight_decay(var_names=["bias"])
    others = keras.optimizers.AdamW(weight_decay=0.5)
    others.exclude_from_weight_decay(var_names=["kernel"])
    places = keras.optimizers.OptimizerMap(others, {".*one/.*": kept})
    model.compile(keras.optimizers.MultiOptimizer(places if how == "by name" else choose_optimizer), "mse")
    loaded = Archive.of(model).load()
    find, variables = loaded.optimizer._optimizer_map, loaded.trainable_variables
    assert type(find(variables[0])) is OwnAdamW
    assert type(find(variables[0])._learning_rate) is Halved
    if how == "by name":
        assert [find(v)._use_weight_decay(v) for v in variables] == [True, False, False, True]


def test_plain_values_survive_a_round_trip() -> None:
    given = {"a": [1, None, True, "x", 2.5], "b": {"c": np.arange(3.0)}, "d": np.float32(0.5), "e": (1, 2)}
    given["by epoch"] = {0: 0.5, np.int64(1): {"last": np.float32(0.25)}}
    snapshot = build_snapshot(START, lambda builder: to_json_tree(given, builder))
    found = from_json_tree(json.loads(json.dumps(snapshot.values)), snapshot.memory)
    assert (found["a"], found["d"], found["e"]) == (given["a"], 0.5, [1, 2])
    assert found["by epoch"] == {0: 0.5, 1: {"last": 0.25}}
    np.testing.assert_array_equal(found["b"]["c"], [0.0, 1.0, 2.0])


@pytest.mark.parametrize("value", [object(), {(1, 2): 2}, [len], {"a": {3}}, np.array([object()])])
def test_other_values_are_refused(value: Any) -> None:
    assert not is_plain(value)
    with pytest.raises(TypeError, match="no plain value"):
        to_json_tree(value, SnapshotBuilder())


def test_a_custom_class_of_inputs_gets_the_result_of_the_transformation() -> None:
    columns = (Column("image", "object"), Column("n", "int32", (4,)))
    inputs = Inputs.of(SimpleNamespace(), columns, free=True)
    made = {"image": np.array([[0.25, 0.5]]), "n": np.array([[1, 2]], "int32")}
    image, numbers = inputs.arrays(made)
    assert (image.dtype, image.tolist()) == (np.dtype("float32"), [[0.25, 0.5]])
    assert (numbers.dtype, numbers.tolist()) == (np.dtype("int64"), [[1, 2]])
