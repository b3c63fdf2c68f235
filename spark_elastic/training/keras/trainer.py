"""A Keras model in training, as the training loop takes it: state, step, validation, weights.

Shipped by cloudpickle with the user's model inside, as a `.keras` file. Main thread only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from spark_elastic.data.loader import StepRows
from spark_elastic.data.reading.readers import read_sample_rows
from spark_elastic.data.transformation import Transformation, transform_columns
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.step_summary import StepDecision
from spark_elastic.protocol.types import Phase, Position
from spark_elastic.runs.identity import digest
from spark_elastic.runs.ledger import Ledger
from spark_elastic.training.keras.archive import Archive, save_model
from spark_elastic.training.keras.batching import BatchBuilder, Inputs, order_labels, pack_inputs
from spark_elastic.training.keras.callback_list import KerasCallbackList
from spark_elastic.training.keras.compiled import CompiledLosses, CompiledMetrics
from spark_elastic.training.keras.devices import let_gpu_memory_grow
from spark_elastic.training.keras.state import KerasTrainingState
from spark_elastic.training.keras.step import StepLossStep, Structure, TrainStep, describe_world_dependence
from spark_elastic.training.loop import TrainingLoop
from spark_elastic.training.progress import TrainingProgress
from spark_elastic.training.spec import TrainSpec
from spark_elastic.training.trainer import ModelTrainer, StepCall, take_validation_step
from spark_elastic.worker.context import get_process_context


@dataclass(frozen=True)
class KerasUserObjects:
    model: Archive  # compiled
    callbacks: tuple[Any, ...] = ()  # Keras's own, or of their kind
    class_weight: Mapping[int, float] | None = None  # by class of the one label
    # Applied to the columns of each step; None: they stay as they are.
    transformation: Transformation | None = None
    # Names of each epoch's losses and metrics; None: they are not known before the model is called.
    numbers: Sequence[str] | None = None
    activation: str | None = (
        None  # what makes probabilities of the outputs, by the loss; None: it does not say
    )

    def identity(self) -> dict[str, str]:
        """What a run is bound to (R19, resuming a run), by the words that an error has for it."""
        return {
            "model, optimizer or loss": digest(self.model.identity()),
            "class_weight": digest(self.class_weight),
            "transformation_fn": digest(self.transformation),
        }


@dataclass(frozen=True)
class ConnectedModel:
    """How a model and its losses take the columns, which a call of the model with some rows has shown."""

    inputs: Inputs  # how feature columns become inputs
    label_cols: Sequence[str]  # in the order of the outputs
    batches: BatchBuilder  # without class weights, as Keras validates
    structure: Structure  # how inputs and outputs are nested
    losses: CompiledLosses  # those that the model was compiled with, one for each output that has one
    labels: Any  # of those rows, in the structure of the outputs
    outputs: Any  # of those rows

    @classmethod
    def of(cls, model: Any, spec: TrainSpec, rows: StepRows, *, transformed: bool) -> ConnectedModel:
        """Call the model. rows: as it takes them; transformed: a function of the user's made them."""
        config = spec.config
        inputs = Inputs.of(model, spec.features, free=transformed)
        features = BatchBuilder(config, inputs, config.data.label_cols, None).build(rows).features
        pack = partial(pack_inputs, model)
        outputs = model(pack([np.asarray(array) for array in features]), training=False)
        structure = Structure(pack, lambda values: keras.tree.pack_sequence_as(outputs, list(values)))
        label_cols = order_labels(model, outputs, config.data.label_cols)
        batches = BatchBuilder(config, inputs, label_cols, None)
        labels = structure.outputs(list(batches.build(rows).labels))
        losses = CompiledLosses(model, labels, outputs, label_cols)
        return cls(inputs, label_cols, batches, structure, losses, labels, outputs)


class KerasTrainProgram(TrainingLoop):
    """The program of a worker of `ElasticKerasEstimator`: the training loop over a Keras model."""

    def __init__(self, spec: TrainSpec, objects: KerasUserObjects) -> None:
        super().__init__(spec, KerasTrainer(spec, objects), objects.transformation)


def prepare_gpus(device: str) -> None:
    """Before TensorFlow uses a GPU. Raises InvalidInput: it finds none, and the slot was given one."""
    gpus = tf.config.list_physical_devices("GPU")
    if device == "cuda" and not gpus:
        raise InvalidInput(
            f"this worker is to train on a GPU, and TensorFlow {tf.__version__} finds none: install "
            "tensorflow[and-cuda] on the executors, look at nvidia-smi there for the driver, or set device='cpu'."
        )
    if device == "cpu":  # GPUs of the machine that Spark did not give to this slot
        tf.config.set_visible_devices([], "GPU")
    else:
        let_gpu_memory_grow()


class KerasTrainer(ModelTrainer):
    """Model, losses and metrics of one worker. See `training.trainer.ModelTrainer`."""

    state: KerasTrainingState
    callbacks: KerasCallbackList
    _train_step: TrainStep

    def __init__(self, spec: TrainSpec, objects: KerasUserObjects) -> None:
        self._spec, self._objects = spec, objects

    def prepare(self, progress: TrainingProgress, ledger: Ledger) -> None:
        spec, config, objects = self._spec, self._spec.config, self._objects
        prepare_gpus(get_process_context().device)
        keras.utils.set_random_seed(config.data.seed)
        keras.config.set_floatx(objects.model.floatx)
        self.model = model = objects.model.load()
        if config.optimizer.learning_rate is not None:
            model.optimizer.learning_rate = config.optimizer.learning_rate
        if spec.lr_scale != 1:
            model.optimizer.learning_rate = float(np.asarray(model.optimizer.learning_rate)) * spec.lr_scale
        model.optimizer.build(model.trainable_variables)
        transformed = objects.transformation is not None
        found = ConnectedModel.of(model, spec, self._row(), transformed=transformed)
        self._batches = BatchBuilder(config, found.inputs, found.label_cols, objects.class_weight)
        self._validation_batches = found.batches
        losses, structure = found.losses, found.structure
        self._loss_names = losses.names
        self._metrics = CompiledMetrics(model, losses.names, structure.outputs, bool(model.run_eagerly))
        self._metrics.build(found.labels, found.outputs)
        params = {"epochs": config.data.epochs, "steps": spec.plan.steps, "verbose": 0}
        self.callbacks = KerasCallbackList(objects.callbacks, model, params)
        replicas = [*model.weights, *model.optimizer.variables]
        self.state = KerasTrainingState(replicas, self._metrics.variables, self.callbacks, progress)
        kind = StepLossStep if config.loss.loss_scope == "step" else TrainStep
        self._train_step = kind(config, model, self.state, losses, structure, self._metrics, ledger)

    def train_step(self, rows: StepRows, call: StepCall) -> StepDecision:
        self._metrics.sums = self.state.progress.metric_sums

        def record_step_and_metrics(decision: StepDecision) -> Position:
            position, progress = call.record_step(decision), self.state.progress
            progress.metric_sums = self._metrics.sums
            if position.phase is not Phase.TRAIN:  # the accumulators are validation's from here on
                progress.train_metrics = self._metrics.results()
                self._metrics.reset()
                progress.metric_sums = {}
            return position

        batch, call_of_step = self._batches.build(rows), call._replace(record_step=record_step_and_metrics)
        return self._train_step.run(batch, call_of_step, wants_stop=self.callbacks.wants_stop())

    def validation_mode(self) -> AbstractContextManager[None]:
        self.callbacks.on_validation_begin()
        return nullcontext()

    def validation_step(self, rows: StepRows, call: StepCall) -> StepDecision:
        self._metrics.sums = self.state.progress.metric_sums
        batch = self._validation_batches.build(rows)
        compute = partial(self._train_step.compute_loss, call.group, batch)
        decision = take_validation_step(self.state, batch, self._metrics, call, compute)
        self.state.progress.metric_sums = self._metrics.sums
        return decision

    def epoch_metrics(self) -> dict[str, Any]:
        rate = getattr(self.model.optimizer, "learning_rate", None)  # a MultiOptimizer has none of its own
        found = {} if rate is None else {"learning_rate": float(np.asarray(rate))}
        progress, losses = self.state.progress, self._loss_names
        found.update(progress.epoch.correct_losses(progress.train_metrics, losses))
        if self._spec.validation is not None:
            self._metrics.sums = progress.metric_sums  # this worker may have joined since the last step
            validated = progress.validation.correct_losses(self._metrics.results(), losses)
            found.update({f"val_{name}": value for name, value in validated.items()})
        return found

    def reset_metrics(self) -> None:
        self._metrics.reset()
        self.state.progress.metric_sums, self.state.progress.train_metrics = {}, {}

    def describe_world_dependence(self) -> str | None:
        return describe_world_dependence(self.model)

    def export_weights(self) -> bytes:
        return save_model(self.model)

    def close(self) -> None:
        self._train_step.close()

    def _row(self) -> StepRows:
        """Of zeros, or one of the table's for a function of the user's, which may take nothing but pictures."""
        data, manifest = self._spec.rows.data, self._spec.rows.manifest
        transformation, used = self._objects.transformation, self._spec.config.data.used_cols
        if transformation is None:
            stored = {column.name: np.zeros((1, *column.shape), column.dtype) for column in manifest.columns}
        else:
            rows = read_sample_rows(data, manifest, used)
            first = {name: values[:1] for name, values in rows.items()}
            stored = transform_columns(first, 1, used, transformation)
        return StepRows(0, 0, 1, np.zeros(1, np.int64), stored)
