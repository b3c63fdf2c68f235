"""Checks the user's objects of a fit with Keras: model, optimizer, losses, metrics, callbacks.

The user's objects are not changed: a model is compiled on a copy. Knows Keras, not Spark.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from spark_elastic.checks import FUNCTION, make_kind, make_whole
from spark_elastic.clusters.run import user_code
from spark_elastic.data.loader import StepRows
from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.validation import (
    MAX_BYTES,
    MODEL_FACTORY_LOCK,
    STEP_ADVICE,
    TOLERANCE,
    TOLERANCE_16,
    LossTrial,
    PartLoss,
    build_model,
    check_loss_scope,
    check_runs,
    copy_objects,
    has_hook,
    list_callbacks,
    transform_rows,
)
from spark_elastic.gradients.generators import seeded_rng
from spark_elastic.training.batch import Chunk, LocalBatch, join_chunks
from spark_elastic.training.keras.archive import (
    Archive,
    collect_custom_objects,
    exclude_from_decay,
    find_undecayed,
    iter_leaves,
    iter_model_parts,
    list_optimizers,
    select_user_objects,
)
from spark_elastic.training.keras.batching import BatchBuilder, order_features, order_labels
from spark_elastic.training.keras.compiled import (
    CompiledLosses,
    activity_by_row,
    compute_results,
    list_layer_metrics,
)
from spark_elastic.training.keras.state import read_value
from spark_elastic.training.keras.step import RunningStats, make_dense
from spark_elastic.training.keras.trainer import ConnectedModel, KerasUserObjects
from spark_elastic.training.progress import check_metric_names, check_watched_names
from spark_elastic.training.spec import TrainSpec

_BACKUP_CALLBACK = "BackupAndRestore"
_KINDS = ("EarlyStopping", "ModelCheckpoint", "ReduceLROnPlateau")  # callbacks with a `monitor`
_WATCHING = tuple(getattr(keras.callbacks, name) for name in _KINDS)


def check_keras_objects(values: Mapping[str, Any]) -> KerasUserObjects:
    """Check the user's objects among an estimator's parameters. Raises InvalidInput with the first mistake."""
    backend = keras.backend.backend()
    if backend != "tensorflow":
        raise InvalidInput(f"Keras runs on {backend}: set KERAS_BACKEND=tensorflow before it is imported.")
    # Numpy takes no more, whose generator Keras seeds, too
    make_whole(0, 2**32 - 1, "a whole number from 0, below 2**32")("seed", values["seed"])
    model = compile_model(values)
    _check_steps(model)
    _check_columns(model, values)
    _check_rate(model, values["learning_rate"], values["scale_lr"])
    check_lambdas(iter_model_parts(model))
    archive = make_archive(model, values["custom_objects"])
    return KerasUserObjects(
        model=archive,
        callbacks=_callbacks(values["callbacks"]),
        class_weight=_class_weight(values["class_weight"], values["label_cols"] or ()),
        transformation=FUNCTION.or_none()("transformation_fn", values["transformation_fn"]),
        numbers=_check_losses(_read_back(archive)),
        activation=find_activation(model),
    )


_FIRST_HOOKS = ("on_train_begin", "on_epoch_begin", "on_train_batch_begin")  # before the first forward pass


def check_on_two_rows(objects: KerasUserObjects, spec: TrainSpec) -> None:
    """Run copies of model and losses on two rows of the data. Raises InvalidInput with what fails there."""
    if len(objects.model.content) > MAX_BYTES:
        return
    if not has_hook(objects.callbacks, _FIRST_HOOKS, ("keras.", "spark_elastic.")):
        check_runs(spec, functools.partial(_run_on_rows, objects, spec))
    check_keras_loss_scope(objects, spec)


def _run_on_rows(objects: KerasUserObjects, spec: TrainSpec, rows: StepRows) -> None:
    with MODEL_FACTORY_LOCK, seeded_rng(spec.config.data.seed), objects.model.default_dtype():
        _, found, batch = connect_model(objects, spec, rows)
        found.losses.check_labels(batch)
        labels = found.structure.outputs(list(batch.labels))
        found.losses.total(labels, found.outputs, batch.weights, [1.0] * found.losses.count, 1.0)


def check_watched(objects: KerasUserObjects, validates: bool) -> None:
    """Raise InvalidInput if a callback watches a number that no epoch will have. validates: each epoch is validated."""
    watching = [callback for callback in objects.callbacks if isinstance(callback, _WATCHING)]
    watched = [callback.monitor for callback in watching if getattr(callback, "save_best_only", True)]
    # The user's own callbacks may add any number in `on_epoch_end`.
    if not watched or has_hook(objects.callbacks, ("on_epoch_end",), ("keras.", "spark_elastic.")):
        return
    known = objects.numbers
    check_watched_names(
        watched, known or ["loss"], validates, lambda name: known is None or name == "learning_rate"
    )


def compile_model(values: Mapping[str, Any]) -> Any:
    """The model to train: the user's, or a copy that is compiled with the estimator's parameters."""
    model = _model(values["model"], values["seed"])
    names = ("optimizer", "loss", "loss_weights", "metrics")
    given = {name: values[name] for name in names if values[name] is not None}
    if given:
        check_lambdas(iter_model_parts(model))
        copy = _read_back(make_archive(model, values["custom_objects"]))
        before = dict(getattr(getattr(copy, "_compile_config", None), "config", {}))
        optimizer = given.get("optimizer", before.get("optimizer"))
        if optimizer is None or given.get("loss", before.get("loss")) is None:
            raise InvalidInput("the model is not compiled: give the estimator an optimizer and a loss.")
        copied = _copy_optimizer(optimizer, values["custom_objects"]) if "optimizer" in given else optimizer
        given["optimizer"] = copied
        undecayed = find_undecayed(optimizer, model.trainable_variables)
        exclude_from_decay(given["optimizer"], copy.trainable_variables, undecayed)
        copy.compile(**{**before, **given})
        return copy
    if not model.compiled or model._compile_loss is None:
        raise InvalidInput(
            "the model is not compiled: call model.compile(optimizer, loss), or give the estimator both."
        )
    return model


def check_lambdas(things: Iterable[Any]) -> None:
    """Raise InvalidInput for a lambda that uses a global name: Keras saves only its code."""
    for function in filter(inspect.isfunction, things):
        used = inspect.getclosurevars(function).globals if function.__name__ == "<lambda>" else ()
        if used:
            raise InvalidInput(
                f"a lambda of the model, its loss or its metrics uses {', '.join(used)}, which Keras does not save "
                "with it: make it a function with a name (def)."
            )


def find_activation(model: Any) -> str | None:
    """What makes probabilities of the model's outputs, by its loss; None: unknown, as of the user's own losses."""
    loss = getattr(getattr(model, "_compile_config", None), "config", {}).get("loss")
    parts = list(loss.values()) if isinstance(loss, Mapping) else loss
    if isinstance(parts, list | tuple) and len(parts) == 1:
        (loss,) = parts
    try:
        loss = keras.losses.get(loss) if isinstance(loss, str) else loss
    except ValueError:
        return None
    function = getattr(loss, "fn", loss)  # what a loss of Keras computes, whatever its name
    name = str(getattr(function, "__name__", ""))
    if not name.endswith("crossentropy") or getattr(keras.losses, name, None) is not function:
        return None
    if getattr(loss, "_fn_kwargs", {}).get("from_logits", False):
        return "sigmoid" if name.startswith("binary") else "softmax"
    return "probability" if name.startswith("binary") else "identity"


def _model(model: Any, seed: Any) -> Any:
    with MODEL_FACTORY_LOCK, seeded_rng(int(seed)):
        keras.utils.set_random_seed(int(seed))
        model = build_model(model, keras.Model, "a Keras model")
    if not model.built:
        raise InvalidInput("the model has no weights yet: give it an Input, or call model.build(shape).")
    if not model.trainable_variables:
        raise InvalidInput("the model has no trainable weight: there is nothing to train.")
    return model


def make_archive(model: Any, custom_objects: Mapping[str, Any] | None) -> Archive:
    """The model as its `.keras` file. Raises InvalidInput where get_config() is missing, or pickling fails."""
    try:
        return Archive.of(model, custom_objects)
    except NotImplementedError as error:
        raise InvalidInput(f"the model cannot be written to a .keras file: {_shorten(error)}") from error
    except Exception:  # objects may raise anything while they are pickled
        for name, own in {**collect_custom_objects(model), **(custom_objects or {})}.items():
            user_code.dumps(own, f"{name!r} of the model, its loss, its metrics or custom_objects")
        raise


def _shorten(error: Exception) -> str:
    return " ".join(str(error).split()).partition(". ")[0]


def _copy_optimizer(optimizer: Any, custom_objects: Mapping[str, Any] | None) -> Any:
    try:
        found = keras.optimizers.get(optimizer)
    except (ValueError, TypeError) as error:
        raise InvalidInput(f"optimizer must be a Keras optimizer or its name: {error}") from error
    _check_rate_kind(found)
    custom = {**select_user_objects(iter_leaves(found)), **(custom_objects or {})}
    try:
        with keras.saving.custom_object_scope(custom):
            return type(found).from_config(found.get_config())
    except NotImplementedError as error:
        raise InvalidInput(f"the optimizer cannot be copied: {_shorten(error)}") from error


def _check_rate_kind(optimizer: Any) -> None:
    rates = [getattr(each, "_learning_rate", None) for each in list_optimizers(optimizer)]
    schedule = keras.optimizers.schedules.LearningRateSchedule
    if any(callable(rate) and not isinstance(rate, schedule) for rate in rates):
        raise InvalidInput(
            "the optimizer's learning_rate is a function, whose state no newcomer could take over: give a number, a "
            "schedule of keras.optimizers.schedules, or a callback LearningRateScheduler."
        )


def _check_steps(model: Any) -> None:
    """Refuse what the elastic training step does not support."""
    instead_of = {
        "train_step": "the elastic step computes gradients, sums them over the workers and applies them by itself",
        "compute_loss": "losses are summed by rows: give compile() a loss, and penalties to add_loss()",
        "compute_metrics": "metrics see the rows of all workers: give them to compile()",
    }
    for name, instead in instead_of.items():
        own = getattr(type(model), name)
        if own is not getattr(keras.Model, name) and not str(own.__module__).startswith("keras."):
            raise InvalidInput(f"{type(model).__name__} has a {name}(), which is not called: {instead}.")
    if (getattr(model, "steps_per_execution", 1) or 1) != 1:
        raise InvalidInput(
            "steps_per_execution has no meaning here, since workers exchange gradients in each step: leave it out."
        )
    for layer in model._flatten_layers():
        if getattr(layer, "stateful", False):
            raise InvalidInput(
                f"layer {layer.name!r} is stateful, but no row of a step goes on from one of the step before: build it "
                "with stateful=False, and give it whole sequences."
            )
        if any(getattr(v, "overwrite_with_gradient", False) for v in layer._trainable_variables):
            raise InvalidInput(
                f"layer {layer.name!r} is quantized to float8, with scales that are maxima, and the workers sum what "
                "they exchange: train it unquantized, for example with the policy mixed_bfloat16."
            )
        if getattr(layer, "exchanges_statistics", False):
            raise InvalidInput(
                f"layer {layer.name!r} is a SyncBatchNormalization, whose forward passes wait for those of the other "
                "workers, which here have different numbers of them: use BatchNormalization, whose running statistics "
                "are averaged by rows, or LayerNormalization."
            )
    _check_rate_kind(model.optimizer)
    if isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
        raise InvalidInput("float16 with scaled losses is not supported: use the policy mixed_bfloat16.")
    if any(each.gradient_accumulation_steps for each in list_optimizers(model.optimizer)):
        raise InvalidInput(
            "gradient_accumulation_steps: use backward_passes_per_step of the estimator instead."
        )


def _read_back(archive: Archive) -> Any:
    """Load the model from its `.keras` file, as the workers do."""
    try:
        return archive.load()
    except InvalidInput:
        raise
    except Exception as error:  # of the user's classes, too
        last = str(error).strip().rpartition("\n")[2]
        why = f"{type(error).__name__}: {last}"
        raise InvalidInput(
            f"the model cannot be read from its .keras file, as workers do, with {why}"
        ) from error


def _check_columns(model: Any, values: Mapping[str, Any]) -> None:
    features, labels = values["feature_cols"] or (), values["label_cols"] or ()
    order_features(model, features)
    order_labels(model, getattr(model, "output", None), labels)


def _check_losses(model: Any) -> list[str] | None:
    """Check losses and metrics against the outputs, as workers do. model: a copy. Returns the names of each epoch's
    numbers; None: they are not known before the model is called."""
    if not getattr(model, "outputs", None):
        return None
    outputs = getattr(model, "output", model.outputs[0])  # a Sequential that was never called has no `output`
    losses, metrics = CompiledLosses(model, outputs, outputs), list_layer_metrics(model)
    if model._compile_metrics is not None:
        try:
            model._compile_metrics.build(outputs, outputs)
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidInput(f"the metrics do not fit the model's outputs: {error}") from error
        check_metric_names(metric.name for metric in model._compile_metrics.metrics)
        metrics.append(model._compile_metrics)
    try:
        return ["loss", *losses.names, *compute_results(metrics)]
    except Exception:  # a metric of the user's may have no result without rows
        return None


def _check_rate(model: Any, rate: Any, scales: Any) -> None:
    if rate is None and not scales:
        return
    if isinstance(model.optimizer._learning_rate, keras.optimizers.schedules.LearningRateSchedule):
        raise InvalidInput("the optimizer has a schedule of its rates: leave learning_rate and scale_lr out.")
    if not hasattr(model.optimizer, "learning_rate"):
        raise InvalidInput(
            f"a {type(model.optimizer).__name__} has no learning rate of its own: leave learning_rate and scale_lr "
            "out, and give its optimizers their rates."
        )


def _callbacks(callbacks: Any) -> tuple[Any, ...]:
    found = list_callbacks(callbacks, keras.callbacks.Callback, "keras.callbacks.Callback")
    for callback in found:
        if type(callback).__name__ == _BACKUP_CALLBACK:
            raise InvalidInput(
                f"{_BACKUP_CALLBACK} has no meaning here: checkpoints are written by themselves, and a fit with the "
                "same run_id continues from the last one."
            )
    return found


def _class_weight(weights: Any, labels: Any) -> dict[int, float] | None:
    if weights is None:
        return None
    if len(labels) != 1:
        raise InvalidInput("class_weight needs one label column: use sample_weight_col for several.")
    make_kind("a dict of class numbers and weights", Mapping)("class_weight", weights)
    return {int(number): float(weight) for number, weight in weights.items()}


def check_keras_loss_scope(objects: KerasUserObjects, spec: TrainSpec) -> None:
    """Refuse losses that compare rows, those of layers also with loss_scope='step': these see the rows of one pass."""
    tries: list[_Tries] = []

    def prepare(rows: StepRows) -> LossTrial:
        tries.append(_Tries(objects, spec, rows))
        return tries[0].make_trial(tries[0].compute_losses)

    check_loss_scope(spec, "the model's loss", STEP_ADVICE, prepare)
    if tries and tries[0].model.losses:
        what, scope = "what a layer adds to the loss (add_loss)", spec.config.loss.loss_scope
        advice = f"return from the model what it compares, compare it in the loss, and {STEP_ADVICE}"
        loss = replace(spec.config.loss, loss_scope=None if scope == "step" else scope)
        spec = replace(spec, config=replace(spec.config, loss=loss))
        check_loss_scope(spec, what, advice, lambda _: tries[0].make_trial(tries[0].compute_added))


def connect_model(
    objects: KerasUserObjects, spec: TrainSpec, rows: StepRows
) -> tuple[Any, ConnectedModel, LocalBatch[Any]]:
    """A copy of the model, how it takes the columns, and the batch of these rows."""
    (transformation,) = copy_objects((objects.transformation,))
    rows = transform_rows(spec, transformation, rows)
    model = objects.model.load()
    found = ConnectedModel.of(model, spec, rows, transformed=transformation is not None)
    builder = BatchBuilder(spec.config, found.inputs, found.label_cols, objects.class_weight)
    return model, found, builder.build(rows)


class _Tries:
    """A copy of the model, and the rows that its losses are tried on, of outputs that it computed once."""

    def __init__(self, objects: KerasUserObjects, spec: TrainSpec, rows: StepRows) -> None:
        self._seed, self._dtype = spec.config.data.seed, objects.model.default_dtype
        with MODEL_FACTORY_LOCK, seeded_rng(self._seed), self._dtype():
            self.model, self._found, self._whole = connect_model(objects, spec, rows)
        self._outputs = keras.tree.flatten(self._found.outputs)
        sixteen = any(each.dtype.size == 2 for each in self._outputs)
        self._tolerance = TOLERANCE_16 if sixteen else TOLERANCE
        if spec.config.loss.loss_scope == "step":
            self._check_step()

    def make_trial(self, compute: Callable[[LocalBatch[Any], slice, bool], PartLoss]) -> LossTrial:
        def measure(part: slice, seed: int, moved: bool) -> PartLoss:
            with seeded_rng(self._seed, seed), self._dtype():
                return compute(self._whole.cut(part), part, moved)

        return LossTrial(measure, lambda: None, is_apart=True, tolerance=self._tolerance)

    def compute_losses(self, batch: LocalBatch[Any], part: slice, moved: bool) -> PartLoss:
        factor, losses = tf.zeros(()), self._found.losses
        with tf.GradientTape() as tape:
            tape.watch(factor)
            outputs = [
                (each + float(moved) * tf.roll(way, 1, 0) + tf.cast(factor, each.dtype) * way)[part]
                for each, way in zip(self._outputs, map(_choose_direction, self._outputs), strict=True)
            ]
            labels, packed = map(self._found.structure.outputs, (list(batch.labels), outputs))
            total, _ = losses.total_of_outputs(labels, packed, batch.weights, [1.0] * losses.count)
        slope = tape.gradient(total, factor)
        return PartLoss(float(total), float(len(batch)), 0.0 if slope is None else float(slope))

    def compute_added(self, batch: LocalBatch[Any], part: slice, moved: bool) -> PartLoss:
        trained, fraction = self.model.trainable_variables, len(batch) / len(self._whole)
        with tf.GradientTape() as tape:
            self._call_model(batch, training=False)
            total = self._found.losses.total_of_layers(len(batch), fraction)
        found = zip(make_dense(tape.gradient(total, trained)), trained, strict=True)
        slopes = [float(tf.reduce_sum(g * _choose_direction(v))) for g, v in found if g is not None]
        return PartLoss(float(total), fraction, sum(slopes))

    def _call_model(self, batch: LocalBatch[Any], *, training: bool) -> list[Any]:
        with activity_by_row(self.model, len(batch)):
            outputs = self.model(self._found.structure.inputs(list(batch.features)), training=training)
        return [read_value(each) for each in keras.tree.flatten(outputs)]

    def _check_step(self) -> None:
        """Refuse what workers would compute in different ways without noticing: they would train on gradients of other
        outputs than the loss has seen, or each of another loss."""
        whole, stats, passes = self._whole, RunningStats(self.model), []
        with self._dtype():
            parts = (whole, whole.cut(slice(0, 2)))
            join_chunks([Chunk(len(part), self._call_model(part, training=False)) for part in parts])
            for _ in range(2):
                stats.begin(self._seed)
                passes.append(self._call_model(whole, training=True))
                stats.restore()
        trial = self.make_trial(self.compute_losses)
        values = [[trial.measure(slice(0, len(whole)), 0, False).total] for _ in range(2)]
        of_passes = (
            "computes outputs again for their gradients, and the model returns others when it is called again: let its "
            "layers draw by a keras.random.SeedGenerator that they keep."
        )
        of_values = (
            "has each worker compute the loss of all rows, and the model's loss is another one when it is computed "
            "again: let a layer of the model draw random numbers, not the loss."
        )
        for tried, sentence in ((passes, of_passes), (values, of_values)):
            for a, b in zip(*tried, strict=True):
                if not np.allclose(a, b, rtol=self._tolerance, atol=self._tolerance, equal_nan=True):
                    raise InvalidInput(f"loss_scope='step' {sentence}")


def _choose_direction(tensor: Any) -> Any:
    """In which slopes are taken: one of each tensor, the same in every call."""
    return tf.random.stateless_normal(tensor.shape, (0, 0), dtype=tensor.dtype)
