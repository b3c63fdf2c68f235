"""`ElasticKerasEstimator`, the estimator of Spark ML for Keras models.

Its parameters are in `params.py`; what a fit does is in `fitting.py`; its fitted model is in `keras_model.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import cloudpickle
import keras
from pyspark.ml.util import MLReadable

from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.elastic_estimator import ElasticEstimator
from spark_elastic.estimators.fit_rows import RowSource
from spark_elastic.estimators.fitting import Framework, train_model
from spark_elastic.estimators.keras_model import ElasticKerasModel, KerasPredictor
from spark_elastic.estimators.keras_objects import (
    check_keras_objects,
    check_lambdas,
    check_on_two_rows,
    check_watched,
    make_archive,
)
from spark_elastic.estimators.params import KerasParams, with_horovod_names
from spark_elastic.estimators.transformer import try_shapes
from spark_elastic.estimators.validation import FitRequest
from spark_elastic.training.keras.archive import Archive, iter_leaves, list_optimizers, select_user_objects
from spark_elastic.training.keras.trainer import KerasTrainProgram, KerasUserObjects
from spark_elastic.training.spec import TrainSpec

PACKAGES = ("tensorflow", "keras")


def _build_program(spec: TrainSpec, objects: KerasUserObjects) -> KerasTrainProgram:
    check_on_two_rows(objects, spec)
    return KerasTrainProgram(spec, objects)


KERAS = Framework(PACKAGES, (*PACKAGES, KerasTrainProgram.__module__), ".keras", _build_program)


def fit_keras(rows: RowSource, request: FitRequest[KerasUserObjects]) -> ElasticKerasModel:
    """Train on `rows`; the request's model is only read."""
    objects = request.objects
    check_watched(objects, rows.has_validation(request))
    result = train_model(rows, request, KERAS)
    archive = objects.model.with_weights(result.weights)
    transformation = None if objects.transformation is None else cloudpickle.dumps(objects.transformation)
    predictor = KerasPredictor(archive, result.features, transformation, request.config.data.label_cols)
    return ElasticKerasModel(predictor, result.summary, try_shapes(predictor, result.sample))


_CONFIGURED = ("optimizer", "loss", "metrics")  # parameters that Keras serializes as JSON


@with_horovod_names
class ElasticKerasEstimator(  # type: ignore[misc,unused-ignore]
    ElasticEstimator, KerasParams, MLReadable["ElasticKerasEstimator"]
):
    """Trains a Keras 3 model (TensorFlow backend) on the rows of a DataFrame with workers that may come and go.

    Every parameter is a Param of Spark ML: a keyword here, `setX`/`getX`, `copy({estimator.epochs: 5})`.
    One step takes batch_size × num_workers rows, however many workers there are at that moment. The model is called
    with one tensor per feature column: by the keys or names of its inputs if the columns have these, else in order (a
    dict with other keys is refused). Labels are matched with outputs, and transform's columns with labels, likewise.

    model: compiled, or compiled here on a copy with optimizer, loss, loss_weights and metrics. Keras's callbacks are
    called once for everything that became part of the training, whatever workers come and go. ModelCheckpoint and
    others that write files do so only on rank 0, on its machine. Logs of batches have only the loss; on_train_batch_end
    comes once the step is final (after the next batch has begun); on_test_batch_begin and on_test_batch_end are not
    called. Gradients of embeddings are summed to dense ones (Keras alone gives its optimizers a repeated row as several
    entries, which Adam squares one by one). Loss scaling for float16, and models with their own train_step, are
    refused. Horovod's names are accepted, or refused with what to use instead.
    store: shared by driver and executors; optional if all of them run on this machine.
    config, or any field of `ElasticConfig` as a keyword: ports, addresses, time limits, ledger.

    `fit` raises InvalidInput if an argument or a column is wrong: before any Spark job where the schema shows it, else
    after the rows were written or their footers read; PreflightError if a host cannot take part; JobFailed and its
    subclasses; JobCancelled; StoreError.
    """

    _check_objects, _train = staticmethod(check_keras_objects), staticmethod(fit_keras)

    def _pack_objects(self, objects: Mapping[str, Any]) -> dict[str, bytes]:
        """The model as a `.keras` file, optimizer, loss and metrics as JSON; functions and callbacks by cloudpickle."""
        objects, parts = dict(objects), {}
        configured = {name: objects.pop(name) for name in _CONFIGURED if name in objects}
        optimizer = configured.get("optimizer")
        names = ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern")
        if any(getattr(each, name, None) for each in list_optimizers(optimizer) for name in names):
            raise InvalidInput(
                "the optimizer's exclude_from_weight_decay is not saved with an estimator: compile the model with this "
                "optimizer, and leave the parameter out."
            )
        check_lambdas(iter_leaves(configured))
        plain = {name: keras.saving.serialize_keras_object(value) for name, value in configured.items()}
        custom = {**select_user_objects(iter_leaves(configured)), **(objects.get("custom_objects") or {})}
        if isinstance(objects.get("model"), keras.Model):
            archive = make_archive(objects.pop("model"), custom)
            if archive.adapters:
                raise InvalidInput(
                    "a model with LoRA layers is not saved with an estimator, since Keras reads their matrices back as "
                    "zeros: give the estimator a function that makes the model."
                )
            parts = {"model.keras": archive.content, "floatx": archive.floatx.encode()}
            if archive.undecayed:
                parts["undecayed"] = json.dumps(archive.undecayed).encode()
            custom = cloudpickle.loads(archive.custom)
        if custom:
            parts["custom"] = cloudpickle.dumps(custom)
        if objects:
            parts["objects"] = cloudpickle.dumps(objects)
        return {**parts, "configured": json.dumps(plain).encode()}

    def _unpack_objects(self, parts: Mapping[str, bytes]) -> dict[str, Any]:
        found: dict[str, Any] = cloudpickle.loads(parts["objects"]) if "objects" in parts else {}
        custom = found.get("custom_objects") or {}
        custom = cloudpickle.loads(parts["custom"]) if "custom" in parts else custom
        safe = "custom" not in parts  # what runs code comes from the same path
        if "model.keras" in parts:
            content, floatx = parts["model.keras"], parts["floatx"].decode()
            undecayed = tuple(json.loads(parts.get("undecayed", b"[]")))
            found["model"] = Archive(content, cloudpickle.dumps(custom), floatx, safe, undecayed).load()
        plain = json.loads(parts["configured"])
        load = keras.saving.deserialize_keras_object
        found.update({name: load(value, custom, safe_mode=safe) for name, value in plain.items()})
        return found
