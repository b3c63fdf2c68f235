"""The fitted model of the Keras estimator. What all frameworks' models can do is `transformer.py`'s."""

from __future__ import annotations

import io
import pkgutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import cloudpickle
import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf
from pyspark.ml.util import MLReadable

from spark_elastic.data.manifest import Column
from spark_elastic.data.transformation import transform_inputs
from spark_elastic.errors import StoreError
from spark_elastic.estimators.outputs import Floats, Shape
from spark_elastic.estimators.predictor import (
    Predictor,
    choose_gpu,
    find_shapes,
    name_parts,
    predict_in_batches,
)
from spark_elastic.estimators.transformer import ElasticModel
from spark_elastic.training.keras.archive import Archive
from spark_elastic.training.keras.batching import Inputs, order_labels, pack_inputs
from spark_elastic.training.keras.devices import let_gpu_memory_grow

PART, CUSTOM, TRANSFORMATION, ADAPTERS = "model.keras", "custom", "transformation", "adapters"


@dataclass(frozen=True)
class KerasPredictor(Predictor):
    """Rows in, predictions out; the model is called with training=False."""

    archive: Archive  # the model
    columns: tuple[Column, ...]  # of the features
    transformation: bytes | None = None  # cloudpickle of the user's function; None: there is none
    labels: tuple[str, ...] = ()  # the outputs have their order; (): the model's own

    def model(self) -> Any:
        return self.archive.load()

    def parts(self) -> dict[str, bytes]:
        inner = self.archive.inner()
        added = {CUSTOM: cloudpickle.dumps(inner)} if inner else {}
        if self.transformation is not None:
            added[TRANSFORMATION] = self.transformation
        if self.archive.adapters:
            added[ADAPTERS] = _pack_arrays(self.archive.adapters)
        return {PART: self.archive.content, **added}

    @property
    def needs_sample(self) -> bool:
        return self.transformation is not None

    def shapes(self, sample: Sequence[Sequence[Any]] | None = None) -> list[Shape]:
        with tf.device("CPU:0"):  # on the driver, where the user's code may use the GPU already
            return find_shapes(self.columns, sample, self._forward)

    def predict(self, columns: Sequence[Sequence[Any]], gpus: Sequence[str] = ()) -> list[Floats]:
        let_gpu_memory_grow()
        number = choose_gpu(gpus, len(tf.config.list_physical_devices("GPU")))
        with tf.device("CPU:0" if number is None else f"GPU:{number}"):
            return predict_in_batches(self.columns, columns, self._forward, self.shapes)

    def call_model(self, columns: Sequence[npt.NDArray[Any]]) -> tuple[Any, Any]:
        model = self.archive.load()
        with self.archive.default_dtype():
            inputs = Inputs.of(model, self.columns)
        arrays = inputs.arrays({c.name: values for c, values in zip(self.columns, columns, strict=True)})
        given = pack_inputs(model, arrays)
        outputs = keras.tree.map_structure(np.asarray, model(given, training=False))
        tensors = getattr(model, "inputs", None) or inputs.columns  # a class of the user's names no inputs
        return _name_parts(given, [each.name for each in tensors]), _name_parts(outputs)

    @cached_property
    def _called(self) -> Any:
        """(inputs of the columns, function of them, transformation)."""
        model = self.archive.load()

        def call(arrays: list[Any]) -> list[Any]:
            outputs = model(pack_inputs(model, arrays), training=False)
            found = list(keras.tree.flatten(outputs))
            if not self.labels:
                return found
            order = order_labels(model, outputs, self.labels)
            return [found[order.index(label)] for label in self.labels]

        change = None if self.transformation is None else cloudpickle.loads(self.transformation)
        with self.archive.default_dtype():
            inputs = Inputs.of(model, self.columns, free=change is not None)
        return inputs, tf.function(call, reduce_retracing=True), change

    def _forward(self, inputs: Sequence[npt.NDArray[Any]]) -> list[Floats]:
        columns, call, change = self._called
        given = transform_inputs(inputs, [column.name for column in self.columns], change)
        named = {c.name: values for c, values in zip(self.columns, given, strict=True)}
        outputs = call([tf.constant(array) for array in columns.arrays(named)])
        return [np.asarray(output).astype(np.float64) for output in outputs]


def _pack_arrays(arrays: Sequence[npt.NDArray[Any]]) -> bytes:
    file = io.BytesIO()
    np.savez(file, *(array.astype(np.float64) for array in arrays))  # numpy writes no bfloat16
    return file.getvalue()


def _unpack_arrays(content: bytes) -> tuple[npt.NDArray[Any], ...]:
    with np.load(io.BytesIO(content)) as file:
        return tuple(file.values())


def _name_parts(structure: Any, names: Sequence[str] = ()) -> Any:
    """The only part, or several by name; those of a dict have its keys."""
    if isinstance(structure, Mapping) and not any(map(keras.tree.is_nested, structure.values())):
        return dict(structure)
    return name_parts(keras.tree.flatten(structure), names)


class ElasticKerasModel(ElasticModel, MLReadable["ElasticKerasModel"]):  # type: ignore[misc,unused-ignore]
    """What `ElasticKerasEstimator.fit` returns.

    With a loss of classes `transform(df)` adds the columns of Spark ML's classifiers: the class as a double, a vector
    of probabilities and one of what these are made of. Else it adds `prediction_col`: a double where the model returns
    one number per row, else an array of doubles.
    A model of several outputs adds a column for each: `output_cols`, by default LABEL__output.

    `history` has a dict per epoch, `summary` tells worlds and seconds too; `history_frame()` and `worlds_frame()`
    are the same as DataFrames. `model` and `getModel()` give a compiled copy of the Keras model.

    The estimator's transformation_fn is applied here, too; it is given the feature columns alone.

    `save` keeps a `.keras` file, which loads without running code from the path. Classes and functions of the user's
    are imported by name from where they are defined. Only a transformation_fn, lambdas and what is defined inside of a
    function go through cloudpickle: such a model must be loaded from paths alone that are trusted.
    """

    def _extra(self) -> dict[str, Any]:
        predictor: Any = self._predictor
        archive, labels = predictor.archive, list(predictor.labels)
        places, undecayed = archive.places(), list(archive.undecayed)
        return {"floatx": archive.floatx, "custom_objects": places, "undecayed": undecayed, "labels": labels}

    @classmethod
    def _restore_predictor(
        cls, parts: Mapping[str, bytes], columns: tuple[Column, ...], extra: Mapping[str, Any]
    ) -> KerasPredictor:
        custom = {name: import_by_name(*place) for name, place in extra["custom_objects"].items()}
        if CUSTOM in parts:
            custom.update(cloudpickle.loads(parts[CUSTOM]))
        safe, undecayed = CUSTOM not in parts, tuple(extra["undecayed"])
        adapters = _unpack_arrays(parts[ADAPTERS]) if ADAPTERS in parts else ()
        content, custom_objects = parts[PART], cloudpickle.dumps(custom)
        archive = Archive(content, custom_objects, extra["floatx"], safe, undecayed, adapters)
        return KerasPredictor(archive, columns, parts.get(TRANSFORMATION), tuple(extra["labels"]))


def import_by_name(module: str, name: str) -> Any:
    """A class or function by its place. Raises StoreError if it is not there."""
    try:
        return pkgutil.resolve_name(f"{module}:{name}")
    except (ImportError, AttributeError, ValueError) as error:
        raise StoreError(
            f"the model needs {name} of {module}, which cannot be imported ({error}): define it in a module that can."
        ) from error
