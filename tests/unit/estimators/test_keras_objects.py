"""What the Keras estimator is given: each mistake is one sentence; nothing of the user's is changed."""

from __future__ import annotations

import json
import math
import pickle
import random
from contextlib import nullcontext
from threading import Lock
from typing import Any

import cloudpickle
import keras
import numpy as np
import pytest

from spark_elastic import ElasticKerasEstimator
from spark_elastic.data.manifest import Column
from spark_elastic.errors import InvalidInput
from spark_elastic.estimators import keras_objects
from spark_elastic.estimators.keras_model import ElasticKerasModel, KerasPredictor
from spark_elastic.estimators.keras_objects import (
    check_keras_objects,
    check_watched,
    compile_model,
    find_activation,
)
from spark_elastic.tensorflow import SyncBatchNormalization
from spark_elastic.training.keras.archive import Archive, collect_custom_objects
from spark_elastic.training.keras.batching import order_labels

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
needs_several = pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"), reason="this Keras has no MultiOptimizer"
)


def net(**compile_with: Any) -> Any:
    model = keras.Sequential([keras.Input((2,), name="x"), keras.layers.Dense(1)])
    if compile_with:
        model.compile(**compile_with)
    return model


class OwnStep(keras.Sequential):
    def train_step(self, data: Any) -> Any:
        return {}


def build(*layers: Any, kind: Any = keras.Sequential, **compile_with: Any) -> Any:
    model = kind([keras.Input((2,)), *layers, keras.layers.Dense(1)])
    model.compile(**({"optimizer": "sgd", "loss": "mse"} | compile_with))
    return model


def build_masked() -> Any:
    taken = keras.Input((4,), dtype="int32")
    coded = keras.layers.Embedding(5, 3, mask_zero=True)(taken)
    model = keras.Model(taken, keras.layers.TimeDistributed(keras.layers.Dense(1))(coded))
    model.compile("sgd", "mse")
    return model


def build_stateful() -> Any:
    sequences = keras.Input(batch_shape=(8, 3, 1))
    model = keras.Model(sequences, keras.layers.LSTM(1, stateful=True)(sequences))
    model.compile("sgd", "mse")
    return model


def build_float8() -> Any:
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(16, name="narrow")])
    model.layers[0].quantize("float8")
    model.compile("sgd", "mse")
    return model


def values(**changes: Any) -> dict[str, Any]:
    given = {"feature_cols": "x", "label_cols": "y", "num_workers": 1} | changes
    return ElasticKerasEstimator(**given)._values


def compiled(**changes: Any) -> Any:
    """A function that makes a model."""
    return lambda: net(**({"optimizer": "sgd", "loss": "mse"} | changes))


class Warmup(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, peak: float) -> None:
        self.peak = peak

    def __call__(self, step: Any) -> Any:
        return self.peak * keras.ops.minimum(1.0, keras.ops.cast(step, "float32") / 10)

    def get_config(self) -> dict[str, Any]:
        return {"peak": self.peak}


class WarmupWithoutConfig(Warmup):
    get_config = keras.optimizers.schedules.LearningRateSchedule.get_config


OF_A_FUNCTION = {"optimizer": keras.optimizers.Adam(lambda: 0.1)}
UNSAVED = {"optimizer": keras.optimizers.Adam(WarmupWithoutConfig(0.5)), "loss": "mse"}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model": 3}, "model must be a Keras model or a function"),
        ({"model": net, "seed": 2**32}, r"seed must be a whole number from 0, below 2\*\*32; got 4294967296"),
        ({"model": keras.Sequential}, "model is the class Sequential"),
        ({"model": lambda: keras.Sequential([keras.layers.Dense(1)])}, "has no weights yet"),
        ({"model": net}, "the model is not compiled: call model.compile"),
        ({"model": net, "optimizer": "sgd"}, "give the estimator an optimizer and a loss"),
        ({"model": net, "optimizer": "nonsense", "loss": "mse"}, "optimizer must be a Keras optimizer"),
        ({"model": net, "loss": "mse", **OF_A_FUNCTION}, "optimizer's learning_rate is a function"),
        ({"model": compiled(**OF_A_FUNCTION)}, "optimizer's learning_rate is a function"),
        ({"model": net(**UNSAVED)}, "'WarmupWithoutConfig' must override"),
        ({"model": net(), **UNSAVED}, "'WarmupWithoutConfig' must override"),
        ({"model": build(kind=OwnStep)}, "OwnStep has a train_step"),
        ({"model": compiled(steps_per_execution=4)}, "steps_per_execution"),
        ({"model": compiled(), "callbacks": [3]}, "callbacks must be"),
        ({"model": compiled(), "callbacks": [keras.callbacks.BackupAndRestore("d")]}, "has no meaning here"),
        ({"model": compiled(), "class_weight": 3}, "class_weight must be"),
        ({"model": compiled(metrics=[keras.metrics.Mean("rows")])}, "a metric is named 'rows', as one of"),
        ({"model": build(SyncBatchNormalization())}, "SyncBatchNormalization, whose forward passes wait"),
        ({"model": build_stateful}, "is stateful, but no row of a step goes on"),
        ({"model": build_masked}, "carries a mask"),
        ({"model": build_float8}, "layer 'narrow' is quantized to float8, with scales"),
        ({"model": net, "optimizer": "sgd", "loss": {"none": "mse"}}, "the loss does not fit the model's"),
        ({"model": compiled(loss=keras.losses.MeanSquaredError(reduction=None))}, "has reduction=None: cho"),
    ],
)
def test_mistakes_are_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        check_keras_objects(values(**changes))


class AddsNumber(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["own"] = 1.0


class Watched(keras.layers.Layer):
    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.seen = keras.metrics.Mean("seen")

    def call(self, x: Any) -> Any:
        self.seen.update_state(x)
        return x


STOP, BEST = keras.callbacks.EarlyStopping, keras.callbacks.ModelCheckpoint


@pytest.mark.parametrize(
    ("callbacks", "validates", "sentence"),
    [
        ([STOP()], False, "watches 'val_loss', but nothing is validated: set validation"),
        ([STOP("los", mode="min")], True, "one of loss, .*mae, AUC, .*val_loss, .*val_mae, val_AUC"),
        ([STOP("seen", mode="min")], False, None),  # a metric of a layer
        ([BEST("m.keras", "own", save_best_only=True)], True, "'own', which no epoch will have"),
        ([BEST("m.keras")], False, None),
        ([STOP("val_AUC", mode="max"), STOP("learning_rate", mode="min")], True, None),
        ([AddsNumber(), STOP("own", mode="min")], False, None),
    ],
)
def test_what_callbacks_watch_must_exist(callbacks: Any, validates: bool, sentence: str | None) -> None:
    model = build(Watched(), metrics=["mae", keras.metrics.AUC(name="AUC")])
    objects = check_keras_objects(values(model=model, callbacks=callbacks))
    with nullcontext() if sentence is None else pytest.raises(InvalidInput, match=sentence):
        check_watched(objects, validates)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("initial_epoch", ""),
        ("determinism", "only ElasticTorchEstimator can train with the same bits"),
        ("checkpoint_callback", "epoch's weights are kept by callbacks="),
        ("tensorflow_dataset_prefetch_buffer_size", "one thread reads ahead in each worker"),
    ],
)
def test_keras_names_without_a_meaning_are_refused(name: str, says: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{name} has no meaning here: .*{says}"):
        ElasticKerasEstimator(**{name: 3})


def test_a_model_compiled_anew_is_a_copy() -> None:
    model, optimizer = net(), keras.optimizers.Adam(0.3)
    copy = compile_model(values(model=model, optimizer=optimizer, loss="mae", metrics=["mse"]))
    assert not model.compiled
    assert copy is not model
    assert copy.optimizer is not optimizer
    assert float(np.asarray(copy.optimizer.learning_rate)) == pytest.approx(0.3)
    again = compile_model(values(model=copy, metrics=["mae"]))
    assert again.loss == "mae"


def combine(optimizer: Any) -> Any:
    """That one for kernels, and another for what else there is."""
    places = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1), {".*kernel": optimizer})
    return keras.optimizers.MultiOptimizer(places)


@pytest.mark.parametrize("place", [lambda optimizer: optimizer, pytest.param(combine, marks=needs_several)])
def test_an_optimizer_keeps_its_schedule_and_what_it_does_not_decay(place: Any) -> None:
    """Alone, and as one of several."""
    optimizer, estimator = keras.optimizers.AdamW(Warmup(0.5), weight_decay=0.5), ElasticKerasEstimator()
    optimizer.exclude_from_weight_decay(var_names=["kernel"])
    given = {"optimizer": place(optimizer), "loss": "mse"}
    trained = check_keras_objects(values(model=net(), **given)).model.load()
    with pytest.raises(InvalidInput, match="exclude_from_weight_decay is not saved with an estimator"):
        estimator._pack_objects({"model": net(), **given})
    loaded = estimator._unpack_objects(estimator._pack_objects({"model": net(**given)}))["model"]
    for model in (trained, loaded):
        found = getattr(model.optimizer, "optimizers", [model.optimizer])[0]
        assert found._learning_rate.peak == 0.5
        decayed = [found._use_weight_decay(variable) for variable in model.trainable_variables]
        assert decayed == [False, True]
    scheduled = {"optimizer": keras.optimizers.Adam(Warmup(0.5))}
    kept = estimator._unpack_objects(estimator._pack_objects(scheduled))
    assert kept["optimizer"]._learning_rate.peak == 0.5


class Unwritten(keras.Model):  # type: ignore[misc,unused-ignore]
    """Keras cannot write what it is given, without get_config()."""

    def __init__(self, names: set[str]) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(len(names))

    def call(self, x: Any) -> Any:
        return self.dense(x)


def make_unwritten() -> Any:
    model = Unwritten({"y"})
    model(np.ones((1, 2)))
    return model


def make_adapted() -> Any:
    model = net(optimizer="sgd", loss="mse")
    model.layers[0].enable_lora(1)
    return model


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (make_unwritten, r"cannot be written to a .keras file: .*must override `get_config\(\)`"),
        (make_adapted, "LoRA layers is not saved with an estimator"),  # the adapters would be zeros
    ],
)
def test_an_estimator_is_not_saved_with_a_model_that_keras_cannot_write(make: Any, sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        ElasticKerasEstimator()._pack_objects({"model": make()})


@needs_several
def test_several_optimizers_take_no_common_rate() -> None:
    optimizers = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1))
    given = {"model": net(), "optimizer": keras.optimizers.MultiOptimizer(optimizers), "loss": "mse"}
    assert check_keras_objects(values(**given)).model.load().optimizer.optimizers
    with pytest.raises(InvalidInput, match="MultiOptimizer has no learning rate of its own"):
        check_keras_objects(values(**given, learning_rate=0.1))


@needs_several
def test_each_of_several_optimizers_is_checked_as_one_would_be() -> None:
    for optimizer, sentence in (
        (keras.optimizers.SGD(lambda: 0.1), "learning_rate is a function"),
        (keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), "use backward_passes_per_step"),
    ):
        with pytest.raises(InvalidInput, match=sentence):
            check_keras_objects(values(model=net(), optimizer=combine(optimizer), loss="mse"))


def weighted_crossentropy(y: Any, logits: Any) -> Any:
    return keras.ops.square(y - logits)


class FocalCrossentropy(keras.losses.Loss):
    def call(self, y: Any, logits: Any) -> Any:
        return keras.ops.square(y - logits)


class BalancedCrossentropy(keras.losses.SparseCategoricalCrossentropy):
    """A loss of classes of the user's."""


@pytest.mark.parametrize(
    ("loss", "activation"),
    [
        ("mse", None),
        ("sparse_categorical_crossentropy", "identity"),
        (keras.losses.SparseCategoricalCrossentropy(from_logits=True), "softmax"),
        (keras.losses.BinaryCrossentropy(from_logits=True), "sigmoid"),
        (keras.losses.BinaryFocalCrossentropy(), "probability"),
        (keras.losses.binary_crossentropy, "probability"),
        ({"dense": "categorical_crossentropy"}, "identity"),
        (BalancedCrossentropy(from_logits=True), "softmax"),
        ([keras.losses.CategoricalCrossentropy(from_logits=True, name="of_binary_codes")], "softmax"),
        (weighted_crossentropy, None),
        (FocalCrossentropy(), None),
    ],
)
def test_probabilities_follow_from_the_loss(loss: Any, activation: str | None) -> None:
    assert find_activation(net(optimizer="sgd", loss=loss)) == activation


def test_a_saved_model_keeps_its_adapters_and_what_has_no_weight_decay() -> None:
    model = net()
    model.layers[0].enable_lora(1)
    optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_list=[model.trainable_variables[0]])
    model.compile(optimizer, "mse")
    predictor = KerasPredictor(Archive.of(model), (Column("x", "float32", (2,)),))
    extra = json.loads(json.dumps(ElasticKerasModel(predictor, None)._extra()))
    found = ElasticKerasModel._restore_predictor(predictor.parts(), predictor.columns, extra).model()
    decayed = [found.optimizer._use_weight_decay(v) for v in found.trainable_variables]
    assert decayed == [False, *[True] * (len(decayed) - 1)]
    adapters = [found.layers[0].lora_kernel_a, model.layers[0].lora_kernel_a]
    np.testing.assert_array_equal(*adapters)


def build_two_inputs(nested: str) -> Any:
    """A model of two inputs and two outputs: `sum` has twice their sum, `store` has two numbers of `store` alone."""
    store, day = keras.Input((1,), name="store"), keras.Input((1,), name="day")
    both = keras.layers.Add()([store, day])
    total = keras.layers.Dense(1, name="sum", kernel_initializer="ones")(both)
    kept = keras.layers.Dense(2, name="kept", kernel_initializer="ones")(store)
    if nested == "list":
        return keras.Model([store, day], [total, kept])
    return keras.Model({"store": store, "day": day}, {"sum": total, "kept": kept})


@pytest.mark.parametrize("nested", ["list", "dict"])
def test_columns_of_inputs_and_outputs_are_found_by_key_or_name(nested: str) -> None:
    """The labels' order is the reverse of the model's, and a dict's keys are flattened by the alphabet."""
    model, labels = build_two_inputs(nested), ("kept", "sum")
    columns = (Column("store", "float64"), Column("day", "float64"))
    predictor = KerasPredictor(Archive.of(model), columns, None, labels)
    kept, total = predictor.predict([np.array([1.0, 2.0]), np.array([10.0, 20.0])])
    np.testing.assert_allclose(kept, [[1.0, 1.0], [2.0, 2.0]])
    np.testing.assert_allclose(total, [[11.0], [22.0]])
    assert [math.prod(shape) for shape in predictor.shapes()] == [2, 1]
    ours = order_labels(model, model.output, labels)
    assert ours == (["kept", "sum"] if nested == "dict" else ["sum", "kept"])
    extra = ElasticKerasModel(predictor, None)._extra()
    assert ElasticKerasModel._restore_predictor(predictor.parts(), columns, extra).labels == labels


@pytest.mark.parametrize(
    ("features", "labels", "sentence"),
    [
        (["store", "a"], ["sum", "kept"], "inputs are a dict of store, day and feature_cols names store, a"),
        (["day", "store"], ["y", "sum"], "outputs are a dict of sum, kept and label_cols names y, sum"),
    ],
)
def test_a_dict_of_inputs_names_the_columns(features: list[str], labels: list[str], sentence: str) -> None:
    model = build_two_inputs("dict")
    model.compile("sgd", {"sum": "mse", "kept": "mae"})
    given = values(model=model) | {"feature_cols": features, "label_cols": labels}
    with pytest.raises(InvalidInput, match=sentence):
        check_keras_objects(given)
    given |= {"feature_cols": ["day", "store"], "label_cols": ["kept", "sum"]}
    check_keras_objects(given)
    with pytest.raises(InvalidInput, match="the metrics do not fit the model's outputs"):
        check_keras_objects(given | {"metrics": {"none": ["mae"]}})


def test_a_transformation_makes_the_inputs() -> None:
    def take_two(named: Any) -> Any:
        return {"x": np.array([np.frombuffer(content, "u1")[:2] for content in named["x"]])}

    model, columns, change = net(), (Column("x", "object"),), cloudpickle.dumps(take_two)
    predictor = pickle.loads(pickle.dumps(KerasPredictor(Archive.of(model), columns, change)))
    rows = [b"\x01\x02", b"\x03\x04\x05"]
    expected = model.predict(np.array([[1, 2], [3, 4]]), verbose=0)
    np.testing.assert_allclose(predictor.predict([rows])[0], expected, rtol=1e-5)
    assert predictor.needs_sample
    assert predictor.shapes([rows[:1]]) == [expected.shape[1:]]
    assert predictor.parts()["transformation"] == change


FACTOR = 2.0


class LayerWithoutConfig(keras.layers.Dense):
    """Its configuration does not say what it was made with."""

    def __init__(self, units: int) -> None:
        super().__init__(units)


class LayerThatNeedsAKey(keras.layers.Dense):
    """Its configuration lacks what it is read back from."""

    def __init__(self, factor: float, **given: Any) -> None:
        super().__init__(2, **given)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        return cls(config["factor"])


def build_of_own_functions(factor: float) -> Any:
    """Its activation, its loss and its metric are no other module's."""

    def scale(x: Any) -> Any:
        return keras.ops.abs(x) * factor

    def compute_squared_error(label: Any, output: Any) -> Any:
        return keras.ops.mean(keras.ops.square(label - output), axis=-1)

    def compute_error(label: Any, output: Any) -> Any:
        return keras.ops.abs(label - output)

    wrapped = keras.metrics.MeanMetricWrapper(compute_error, name="error")
    layers = [keras.layers.Lambda(lambda x: x * 2), keras.layers.Dense(1, activation=scale)]
    return build(*layers, loss=compute_squared_error, metrics=[compute_squared_error, wrapped])


def test_functions_of_the_users_travel_and_are_saved_with_the_model() -> None:
    model, x = build_of_own_functions(3.0), np.array([[1.0, 2.0], [0.5, -1.0]])
    archive = check_keras_objects(values(model=model)).model
    predictor = KerasPredictor(archive, (Column("x", "float64", (2,)),))
    extra = ElasticKerasModel(predictor, None)._extra()
    restored = ElasticKerasModel._restore_predictor(predictor.parts(), predictor.columns, extra)
    np.testing.assert_allclose(restored.predict([x])[0], model.predict(x, verbose=0), rtol=1e-5)
    theirs = model.evaluate(x, x[:, 0], verbose=0)
    assert restored.model().evaluate(x, x[:, 0], verbose=0) == pytest.approx(theirs)


def test_an_estimator_is_saved_with_the_functions_that_it_was_given() -> None:
    def far(label: Any, output: Any) -> Any:
        return keras.ops.abs(label - output)

    model = build_of_own_functions(3.0)
    given = {"model": model, "loss": far, "metrics": ["mae", far]}
    estimator = ElasticKerasEstimator()
    found = estimator._unpack_objects(estimator._pack_objects(given))
    assert float(found["loss"](1.0, 3.0)) == float(found["metrics"][1](1.0, 3.0)) == 2.0
    x = np.array([[1.0, 2.0]])
    np.testing.assert_allclose(found["model"].predict(x, verbose=0), model.predict(x, verbose=0))


@pytest.mark.filterwarnings("ignore:The object being serialized includes a `lambda`:UserWarning")
def test_an_estimator_is_saved_with_a_lambda_as_its_loss_or_metric() -> None:
    estimator = ElasticKerasEstimator()
    given = {"loss": lambda y, p: (y - p) ** 2, "metrics": ["mae", lambda y, p: y * p]}
    found = estimator._unpack_objects(estimator._pack_objects(given))
    assert (found["loss"](3, 1), found["metrics"][1](3, 1)) == (4, 3)
    with pytest.raises(InvalidInput, match="its loss or its metrics uses FACTOR, which Keras"):
        estimator._pack_objects({"loss": lambda y, p: (y - p) * FACTOR})


class LayerWithBuild(keras.layers.Layer):
    """Its build() is its own."""

    def build(self, shape: Any) -> None:
        self.weight = self.add_weight(shape=(shape[-1], 2), name="weight")

    def call(self, x: Any) -> Any:
        return x @ self.weight


class LayerWithFunctions(keras.layers.Layer):
    """Makes the functions that it calls, and gives one to a layer of its own."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.supports_masking = True
        self.first = lambda x: keras.ops.relu(x) * FACTOR * self.supports_masking
        self.second = keras.layers.Lambda(lambda x: keras.ops.relu(x) * FACTOR)

    def build(self, shape: Any) -> None:
        self.second.build(shape)

    def call(self, x: Any) -> Any:
        return self.second(self.first(x))


@pytest.mark.parametrize("layer", [LayerWithBuild, LayerWithFunctions])
def test_a_layer_of_the_users_travels_as_its_class(layer: type) -> None:
    model = build(layer())
    archive = check_keras_objects(values(model=model)).model
    assert collect_custom_objects(model) == {layer.__name__: layer}
    assert archive.inner() == {}
    x = np.array([[1.0, 2.0], [0.5, -1.0]])
    np.testing.assert_allclose(archive.load().predict(x, verbose=0), model.predict(x, verbose=0))


def make_quantile(part: float, name: str = "loss") -> Any:
    def loss(label: Any, output: Any) -> Any:
        error = label - output
        return keras.ops.maximum(part * error, (part - 1) * error)

    loss.__name__ = name
    return loss


def compile_quantiles(losses: list[Any]) -> Any:
    taken = keras.Input((2,), name="x")
    model = keras.Model(taken, [keras.layers.Dense(1, name=f"q{n}")(taken) for n in range(2)])
    model.compile("sgd", losses)
    return values(model=model) | {"label_cols": ["a", "b"]}


def test_different_functions_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidInput, match="two different functions or classes named 'loss'"):
        check_keras_objects(compile_quantiles([make_quantile(0.1), make_quantile(0.9)]))
    x, y = np.ones((4, 2)), [np.full((4, 1), 9.0)] * 2
    named = [make_quantile(0.1, "low"), make_quantile(0.9, "high")]
    for losses in named, [make_quantile(0.5), make_quantile(0.5)]:
        given = compile_quantiles(losses)
        loaded = check_keras_objects(given).model.load()
        assert loaded.evaluate(x, y, verbose=0) == pytest.approx(given["model"].evaluate(x, y, verbose=0))


def test_a_function_that_cannot_be_pickled_is_named() -> None:
    lock = Lock()

    def own_loss(label: Any, output: Any) -> Any:
        with lock:
            return keras.ops.square(label - output)

    says = r"^'own_loss' of the model, its loss, .* cannot be pickled \(.*lock"
    with pytest.raises(InvalidInput, match=says):
        check_keras_objects(values(model=compiled(metrics=[own_loss])))


def relu(x: Any) -> Any:
    return keras.ops.minimum(x, 0.0)


def mse(label: Any, output: Any) -> Any:
    return keras.ops.abs(label - output)


@pytest.mark.parametrize(
    ("activation", "compiled_with", "sentence"),
    [
        (relu, {"loss": "mse"}, "a function of yours named 'relu'"),
        ("relu", {"loss": "mse", "metrics": [mse]}, "a function of yours named 'mse'"),
        ("relu", {"loss": mse, "metrics": ["mae"]}, None),
    ],
)
def test_functions_named_as_those_of_keras_are_refused(
    activation: Any, compiled_with: dict[str, Any], sentence: str | None
) -> None:
    model = build(keras.layers.Dense(1, activation=activation), **compiled_with)
    with nullcontext() if sentence is None else pytest.raises(InvalidInput, match=sentence):
        check_keras_objects(values(model=model))


class ScaledBy(keras.layers.Layer):
    """Makes its function itself."""

    def __init__(self, factor: float, **settings: Any) -> None:
        super().__init__(**settings)
        self.factor, self.function = factor, make_scale(factor)

    def call(self, x: Any) -> Any:
        return self.function(x)

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "factor": self.factor}


def make_scale(factor: float) -> Any:
    def scale(x: Any) -> Any:
        return x * factor

    return scale


def test_functions_that_layers_make_themselves_may_have_one_name() -> None:
    model = build(ScaledBy(2.0), keras.layers.Dense(1), ScaledBy(5.0))
    x = np.array([[1.0, 2.0]])
    loaded = check_keras_objects(values(model=model)).model.load()
    np.testing.assert_allclose(loaded.predict(x, verbose=0), model.predict(x, verbose=0))
    other = build(*(keras.layers.Dense(2, activation=make_scale(n)) for n in (2.0, 5.0)))
    with pytest.raises(InvalidInput, match="named 'scale'"):
        check_keras_objects(values(model=other))


@pytest.mark.parametrize(
    ("layer", "sentence"),
    [
        (lambda: keras.layers.Lambda(lambda x: x * FACTOR), "a lambda of the model, .* uses FACTOR, which"),
        (lambda: LayerWithoutConfig(2), "cannot be read from its .keras file, .*unexpected keyword argument"),
        (lambda: LayerThatNeedsAKey(factor=2), "cannot be read from its .keras file, .* KeyError: 'factor'"),
    ],
)
def test_a_model_that_cannot_be_serialized_is_refused(layer: Any, sentence: str) -> None:
    model = keras.Sequential([keras.Input((2,)), layer(), keras.layers.Dense(1)])
    with pytest.raises(InvalidInput, match=sentence):
        check_keras_objects(values(model=model, optimizer="sgd", loss="mse"))  # compiled on a copy
    model.compile("sgd", "mse")
    with pytest.raises(InvalidInput, match=sentence):
        check_keras_objects(values(model=model))


def test_a_runs_digest_ignores_the_numbers_in_names_of_keras() -> None:
    def identify(units: int = 1, **changes: Any) -> Any:
        given = {"optimizer": "sgd", "loss": "mse", **changes}
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(units)])
        return check_keras_objects(values(model=model, **given)).identity()

    first = identify()
    assert identify() == first  # "dense_1" by now
    changes: Any
    fast = {"optimizer": keras.optimizers.SGD(0.5)}
    for changes in {"units": 2}, {"optimizer": "adam"}, fast, {"loss": "mae"}:
        assert identify(**changes) != first, changes

    def make_loss(call: Any) -> Any:
        return type("Own", (keras.losses.Loss,), {"call": call})()

    one, other = make_loss(lambda self, y, p: y - p), make_loss(lambda self, y, p: p - y)
    assert identify(loss=one) != identify(loss=other)


def test_a_model_s_factory_leaves_the_user_s_random_numbers_as_they_were() -> None:
    factory, drawn = compiled(), []
    for calls in (False, True):
        random.seed(7)
        np.random.seed(7)
        if calls:
            keras_objects._model(factory, 3)
        drawn.append((random.random(), np.random.rand()))
    assert drawn[0] == drawn[1]
    weights = [keras_objects._model(factory, 3).get_weights()[0].tolist() for _ in range(2)]
    assert weights[0] == weights[1]
