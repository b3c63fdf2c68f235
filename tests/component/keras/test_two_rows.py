"""A Keras model or loss that cannot work is refused by the driver, which runs copies of them on two rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from spark_elastic.data.manifest import Manifest
from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.keras_objects import check_on_two_rows
from tests.component.keras.job import JOBS, Job, compare_pairs
from tests.component.torch.job import CLASSES, WIDTH, make_data
from tests.fit_configs import change

pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation:DeprecationWarning"
)  # Keras 3 with numpy 2

Data = tuple[Store, Manifest]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return make_data(tmp_path_factory.mktemp("data"))


def check(data: Data, job: Job, settings: Mapping[str, Any] | None = None, **changes: Any) -> None:
    """settings: of the fit; changes: other objects of the user's."""
    program = job.task(*data)
    spec = replace(program._spec, config=change(program._spec.config, **(settings or {})))
    check_on_two_rows(replace(program._trainer._objects, **changes), spec)  # type: ignore[attr-defined]


def make(width: int, loss: Any, units: int = CLASSES) -> Callable[[], Any]:
    def build() -> Any:
        model = keras.Sequential([keras.Input((width,), name="x"), keras.layers.Dense(units)])
        model.compile("sgd", loss)
        return model

    return build


def compute_wrong_loss(label: Any, output: Any) -> Any:
    """Of outputs that are one column short."""
    return keras.ops.sum(output[:, 1:] - output, axis=-1)


@keras.saving.register_keras_serializable("tests")
class Squares(keras.losses.Loss):  # type: ignore[misc,unused-ignore]
    """Of a class Keras does not bring the labels into the outputs' shape."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return keras.ops.square(y_true - y_pred)


CROSS_ENTROPY = "sparse_categorical_crossentropy"


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (make(WIDTH + 1, CROSS_ENTROPY), rf"'x' of float64 \(2, {WIDTH}\), .* ValueError: .*incompatible"),
        (make(WIDTH, "categorical_crossentropy"), r"'y' of int64 \(2,\), with ValueError: .*target"),
        (make(WIDTH, Squares(), 1), r"\(2, 2\) out of the model's output \(2, 1\) and labels \(2,\): give"),
        (make(WIDTH, compute_wrong_loss), "with InvalidArgumentError: .*Incompatible shapes"),
    ],
)
def test_what_fails_is_refused_in_one_sentence(data: Data, build: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence) as caught:
        check(data, Job(build))
    assert not re.search(r"\n|\x1b|Arguments received", str(caught.value))
    assert str(caught.value).endswith(".")


@pytest.mark.parametrize("name", JOBS)
def test_what_trains_is_not_refused(data: Data, caplog: pytest.LogCaptureFixture, name: str) -> None:
    check(data, JOBS[name])
    check(data, JOBS[name], {"max_workers": 3})
    assert not caplog.messages


@keras.saving.register_keras_serializable("tests")
class Spreads(keras.layers.Layer):  # type: ignore[misc,unused-ignore]
    """Wants its outputs to differ between the rows."""

    def call(self, x: Any) -> Any:
        self.add_loss(-keras.ops.mean(keras.ops.std(x, axis=0)))
        return x


def make_spreading() -> Any:
    layers = keras.Input((WIDTH,), name="x"), keras.layers.Dense(CLASSES), Spreads()
    model = keras.Sequential([*layers])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def test_a_loss_that_compares_rows_is_refused_by_name(data: Data, caplog: pytest.LogCaptureFixture) -> None:
    says = r"^the model's loss compares .*set loss_scope='step' .*loss_scope='worker'"
    for loss, units in ((compare_pairs, 4), (keras.losses.Tversky(), 1), (keras.losses.Circle(), 4)):
        job = Job(make(WIDTH, loss, units))
        with pytest.raises(InvalidInput, match=says):
            check(data, job, {"max_workers": 3})
        check(data, job, {"max_workers": 3, "loss_scope": "step"})
    for scope in (None, "step"):
        with pytest.raises(InvalidInput, match=r"^what a layer adds .* compares the rows .* in the loss"):
            check(data, Job(make_spreading), {"max_workers": 3, "loss_scope": scope})
    caplog.clear()
    check(data, Job(make(WIDTH, compare_pairs, 4)), {"max_workers": 3, "loss_scope": "worker"})
    assert "depend on the number of workers through the model's loss, which compares" in caplog.messages[0]


@keras.saving.register_keras_serializable("tests")
class Noise(keras.layers.Layer):  # type: ignore[misc,unused-ignore]
    """Draws from a generator that is no part of the model."""

    def call(self, x: Any, training: bool = False) -> Any:
        return x + keras.random.normal(keras.ops.shape(x)) if training else x


@keras.saving.register_keras_serializable("tests")
class Means(keras.layers.Layer):  # type: ignore[misc,unused-ignore]
    """One row of all."""

    def call(self, x: Any) -> Any:
        return keras.ops.mean(x, axis=0, keepdims=True)


def compare_with_noise(label: Any, output: Any) -> Any:
    return compare_pairs(label, output + keras.random.normal(keras.ops.shape(output)))


def make_layers(*makers: Callable[[], Any], loss: Any = compare_pairs) -> Callable[[], Any]:
    def build() -> Any:
        layers = [make_layer() for make_layer in makers]
        model = keras.Sequential([keras.Input((WIDTH,), name="x"), *layers, keras.layers.Dense(4)])
        model.compile("sgd", loss)
        return model

    return build


def test_the_scope_of_a_step_says_what_it_cannot_give(data: Data, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"max_workers": 3, "loss_scope": "step"}
    check(
        data, Job(make_layers(lambda: keras.layers.Dropout(0.5), keras.layers.BatchNormalization)), settings
    )
    for build, sentence in (
        (make_layers(Means), r"^loss_scope='step' joins .* shape \(1, 4\) for 2 rows and \(1, 4\) for 8"),
        (make_layers(Noise), r"^loss_scope='step' computes outputs again .*SeedGenerator"),
        (make_layers(loss=compare_with_noise), r"^loss_scope='step' has each worker .* not the loss"),
    ):
        with pytest.raises(InvalidInput, match=sentence):
            check(data, Job(build), settings)
    assert not caplog.messages
    check(data, Job(make(WIDTH, CROSS_ENTROPY)), settings)
    (message,) = caplog.messages
    assert message.startswith(
        "loss_scope='step' is for a loss that compares rows, and the model's loss does not"
    )


class Prepares(keras.callbacks.Callback):  # type: ignore[misc,unused-ignore]
    """Does something to the model before the first step."""

    def on_train_begin(self, logs: Any = None) -> None:
        """It would do it here."""


def test_a_model_that_a_callback_prepares_is_not_tried(data: Data) -> None:
    wrong = Job(make(WIDTH + 1, CROSS_ENTROPY))
    check(data, wrong, callbacks=(Prepares(),))
    with pytest.raises(InvalidInput, match="two rows"):
        check(data, wrong, callbacks=(keras.callbacks.TerminateOnNaN(),))


def test_rows_that_cannot_be_read_are_not_tried(data: Data, tmp_path: Path) -> None:
    check((Store.open(str(tmp_path)), data[1]), Job(make(WIDTH + 1, CROSS_ENTROPY)))


def test_only_a_model_of_strings_is_given_strings(data: Data) -> None:
    def read(columns: dict[str, Any]) -> dict[str, Any]:
        return {"x": np.array([["two words"]] * len(columns["y"]), object), "y": columns["y"]}

    def build() -> Any:
        vocabulary = keras.layers.TextVectorization(output_sequence_length=2, vocabulary=["two", "words"])
        inner = keras.layers.Embedding(4, 2), keras.layers.Flatten(), keras.layers.Dense(CLASSES)
        model = keras.Sequential([keras.Input((1,), dtype="string"), vocabulary, *inner])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    check(data, Job(build), transformation=read)
    with pytest.raises(InvalidInput, match="returned column 'x' as str, of which no tensor can be made"):
        check(data, Job(make(1, CROSS_ENTROPY)), transformation=read)
