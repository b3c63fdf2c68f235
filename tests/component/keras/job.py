"""Small Keras trainings on the rows of the torch jobs, and the plain one-process loop that they must agree with."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np

from spark_elastic.clock import SystemClock
from spark_elastic.config import ElasticConfig
from spark_elastic.data.manifest import Column, Manifest
from spark_elastic.data.plan import DataPlan
from spark_elastic.data.store import Store
from spark_elastic.data.transformation import RowRandom
from spark_elastic.driver.discovery import CombinedDiscovery
from spark_elastic.driver.job import DriverOptions, LaunchResult, supervise
from spark_elastic.protocol.types import Limits
from spark_elastic.runs.checkpoint import CheckpointPolicy, OwnedRun
from spark_elastic.training.keras.archive import Archive
from spark_elastic.training.keras.trainer import KerasTrainProgram, KerasUserObjects
from spark_elastic.training.spec import Rows, TrainSpec
from tests.component.column_kinds import CLASSES as KINDS
from tests.component.column_kinds import FEATURES
from tests.component.injected_faults import await_fault, inject_faults
from tests.component.torch.job import CLASSES, RUN, SEED, WIDTH, Follower
from tests.component.warm_slots import WarmLauncher
from tests.fit_configs import make_config
from tests.planned_rows import list_row_ids, read_columns


def build_dense() -> Any:
    """One input, one output, row weights or class weights as the job says; penalties of weights, clipped gradients."""
    x = keras.Input((WIDTH,), name="x")
    hidden = keras.layers.Dense(20, activation="tanh", kernel_regularizer=keras.regularizers.L2(1e-3))(x)
    model = keras.Model(x, keras.layers.Dense(CLASSES)(hidden))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.Adam(0.01, global_clipnorm=0.05)
    model.compile(optimizer, loss, metrics=["accuracy"], weighted_metrics=["accuracy"])
    return model


def compute_squared_error(label: Any, output: Any) -> Any:
    """A loss that Keras knows nothing of."""
    return keras.ops.mean(keras.ops.square(label - output), axis=-1)


def build_two_heads() -> Any:
    """An embedding of whole numbers, two outputs, weighted losses, one the user's own; a schedule of rates."""
    x, kind = keras.Input((WIDTH,), name="x"), keras.Input((1,), dtype="int32", name="y")
    coded = keras.layers.Flatten()(keras.layers.Embedding(CLASSES, 4)(kind))
    hidden = keras.layers.Dense(16, activation="tanh")(keras.layers.Concatenate()([x, coded]))
    heads = [keras.layers.Dense(1, name="w")(hidden), keras.layers.Dense(1, name="id")(hidden)]
    model = keras.Model([x, kind], heads)
    rate = keras.optimizers.schedules.ExponentialDecay(0.05, 10, 0.9)
    optimizer = keras.optimizers.SGD(rate, momentum=0.9)
    model.compile(optimizer, [compute_squared_error, "mae"], loss_weights=[0.7, 0.002])
    return model


def compare_pairs(label: Any, output: Any) -> Any:
    """InfoNCE: each row is to be nearest to itself, and far from those of other classes; a number for each row."""
    left, right = keras.ops.split(keras.ops.normalize(output), 2, axis=-1)
    near = keras.ops.matmul(left, keras.ops.transpose(right)) / 0.1
    kind = keras.ops.reshape(label, (-1,))
    own = keras.ops.eye(keras.ops.shape(near)[0], dtype="bool")
    same = keras.ops.logical_and(kind[:, None] == kind, keras.ops.logical_not(own))
    near = keras.ops.where(same, -1e9, near)
    return -keras.ops.diagonal(keras.ops.log_softmax(near, axis=-1))


def build_pairs() -> Any:
    """Two embeddings of each row, whose loss compares all of them."""
    x = keras.Input((WIDTH,), name="x")
    hidden = keras.layers.Dense(20, activation="tanh", kernel_regularizer=keras.regularizers.L2(1e-3))(x)
    model = keras.Model(x, keras.layers.Dense(16)(hidden))
    model.compile(keras.optimizers.Adam(0.01), compare_pairs)
    return model


@keras.saving.register_keras_serializable("tests")
class Written(keras.layers.Layer):
    """Counts its training passes, and has a loss for each row."""

    def build(self, shape: Any) -> None:
        kind: Any = {"dtype": "int32", "initializer": "zeros", "trainable": False}
        self.passes = self.add_weight(name="passes", shape=(), **kind)

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.passes.assign_add(1)
        self.add_loss(0.01 * keras.ops.mean(keras.ops.square(x), axis=-1))
        return x


def build_written() -> Any:
    """Layers that write their weights in training; losses that layers add; a scaled loss."""
    x = keras.Input((WIDTH,), name="x")
    coded = keras.layers.SpectralNormalization(keras.layers.Dense(8, activity_regularizer="l2"))(x)
    model = keras.Model(x, keras.layers.Dense(1)(Written()(coded)))
    model.compile(keras.optimizers.Adam(0.01, loss_scale_factor=1e6), "mse")
    return model


def six_inputs() -> Any:
    """A model of vectors, arrays, whole numbers, pictures, days and tokens."""
    shapes = dict(zip(FEATURES, [(4,), (3,), (), (5,), (1,), (4,)], strict=True))
    kinds = {name: "int32" if name == "n" else "float64" for name in FEATURES}
    inputs = {name: keras.Input(shapes[name], dtype=kinds[name], name=name) for name in FEATURES}
    parts = [keras.layers.Embedding(7, 2)(x) if name == "n" else x for name, x in inputs.items()]
    output = keras.layers.Dense(KINDS)(keras.ops.tanh(keras.layers.Concatenate()(parts)))
    model = keras.Model(list(inputs.values()), output)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
    return model


@dataclass(frozen=True)
class Job:
    """What is trained; everything float64."""

    make: Callable[[], Any]
    features: tuple[str, ...] = ("x",)
    labels: tuple[str, ...] = ("y",)
    weight: str | None = None
    class_weight: dict[int, float] | None = None
    callbacks: tuple[Any, ...] = ()
    validates: bool = False
    epochs: int = 2
    batch_size: int = 8
    workers: int = 3
    checkpoint_steps: int | None = None
    transformation: Callable[..., dict[str, Any]] | None = None
    transformation_workers: int = 0
    loss_scope: str | None = None

    def plan(self, manifest: Manifest) -> DataPlan:
        batch = self.batch_size * self.workers
        return DataPlan.for_run(manifest.group_rows, batch, 5, self.workers, 10_000, 1 << 20)

    def archive(self) -> Archive:
        # A thread's layers have the policy of its first one, whatever floatx says later.
        policy = keras.config.dtype_policy()
        keras.config.set_floatx("float64")
        keras.config.set_dtype_policy("float64")
        try:
            keras.utils.set_random_seed(1)
            return Archive.of(self.make())
        finally:
            keras.config.set_floatx("float32")
            keras.config.set_dtype_policy(policy)

    def columns(self, manifest: Manifest) -> tuple[Column, ...]:
        """Of the features."""
        return tuple(manifest.column(name) for name in self.features)

    def task(self, store: Store, manifest: Manifest, ledger: str | None = None) -> KerasTrainProgram:
        plan = self.plan(manifest)
        seen = DataPlan.for_run(manifest.group_rows, 100, 5, self.workers, 10_000, 1 << 20, shuffle=False)
        spec = TrainSpec(
            config=make_config(
                feature_cols=tuple(self.features),
                label_cols=self.labels,
                sample_weight_col=self.weight,
                batch_size=self.batch_size,
                epochs=self.epochs,
                seed=SEED,
                transformation_workers=self.transformation_workers,
                loss_scope=self.loss_scope,
            ),
            rows=Rows(store, manifest, plan),
            validation=Rows(store, manifest, seen) if self.validates else None,
            store=store,
            result="final.keras",
            features=self.columns(manifest),
            ledger=ledger,
            checkpoints=CheckpointPolicy(RUN, self.checkpoint_steps, None),
        )
        objects = KerasUserObjects(self.archive(), self.callbacks, self.class_weight, self.transformation)
        return KerasTrainProgram(spec, objects)


class CallbackCheck(keras.callbacks.Callback):
    """Slows training down, so that a quick machine, too, is met in mid-epoch, and asserts that it is told all once."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.steps = 0, 0
        self.epochs: list[int] = []
        self.ended: list[int] = []

    def on_train_begin(self, logs: Any = None) -> None:
        self.begun += 1

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epochs.append(epoch)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        time.sleep(0.01)
        await_fault(self.epochs[-1], batch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        assert logs["loss"] > 0
        self.steps += 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.ended.append(epoch)
        assert self.begun == 1
        assert self.ended == self.epochs == list(range(epoch + 1)), "each epoch is told once (W6)"
        assert self.steps == len(self.epochs) * self.params["steps"], "each step is told once (R1)"


def train_elastic(
    job: Job, store: Store, manifest: Manifest, folder: Path, acts: Mapping[str, Callable[..., object]]
) -> LaunchResult:
    """What the launch returned; the ledger is in the folder. acts: what befalls the launcher, by place."""
    launcher = WarmLauncher(
        job.task(store, manifest, str(folder / "ledger")),
        SystemClock(),
        preload=("keras",),
        room=job.workers,
        spare_after=3600.0,  # whole slots are killed, and a process that imports TensorFlow takes seconds
    )
    batch = job.batch_size * job.workers
    limits = Limits(job.workers, 1, job.workers, gather_timeout=60.0, lease=5.0, max_global_batch=batch)
    driver, planned = DriverOptions(run=OwnedRun.acquire(store, RUN)), {}
    for place, act in acts.items():
        planned[place] = partial(act, launcher)
    with inject_faults(folder / "faults", planned):
        result = supervise(launcher, CombinedDiscovery(), driver, limits, ElasticConfig(), "test", Follower())
    assert len({json.loads(text)["digest"] for text in result.results}) == 1, "replicas differ (P4)"
    assert len(result.worlds) > 1, "nobody was lost"
    return result


JOBS = {
    "row weights": Job(build_dense, weight="w", class_weight={1: 3.0, 2: 0.5}, validates=True),
    "two outputs": Job(build_two_heads, features=("x", "y"), labels=("w", "id")),
    "weights written in training": Job(build_written, labels=("w",)),
    "rows of a step compared": Job(build_pairs, weight="w", validates=True, loss_scope="step"),
}


def train_plain(
    job: Job, store: Store, manifest: Manifest, numbers: Mapping[str, Any] | None = None
) -> tuple[list[Any], list[float]]:
    """(weights, the epochs' losses) of Keras's own steps, in one process, on the same plan. numbers: the whole table as
    the transformation makes it; None: that is applied to the rows of each step."""
    columns = numbers or read_columns(store, manifest)
    try:
        model, plan = job.archive().load(), job.plan(manifest)
        keras.config.set_floatx("float64")  # what train_on_batch makes of labels
        losses = []
        for epoch in range(job.epochs):
            seen = 0.0
            for step in range(plan.steps):
                rows = list_row_ids(plan, epoch, step)
                weights = None if job.weight is None else columns[job.weight][rows]
                if job.class_weight is not None:
                    by_class = np.array([job.class_weight.get(int(y), 1.0) for y in columns["y"][rows]])
                    weights = by_class if weights is None else weights * by_class
                used = {name: columns[name][rows] for name in (*job.features, *job.labels)}
                if job.transformation is not None and numbers is None:
                    used = job.transformation(used, rng=RowRandom(SEED, epoch, rows))
                model.reset_metrics()
                logs = model.train_on_batch(
                    _unwrap([used[name] for name in job.features]),
                    _unwrap([used[name] for name in job.labels]),
                    sample_weight=weights,
                    return_dict=True,
                )
                seen += float(logs["loss"]) * len(rows)
            losses.append(seen / manifest.rows)
        return model.get_weights(), losses
    finally:
        keras.config.set_floatx("float32")


def weights_of(store: Store) -> list[Any]:
    """Of the model that a training left."""
    try:
        final: list[Any] = keras.saving.load_model(store.path("final.keras"), compile=False).get_weights()
    finally:
        keras.config.set_floatx("float32")
    return final


def difference(ours: Sequence[Any], theirs: Sequence[Any]) -> float:
    """R9's metric: the largest over all weights of max|difference| / max|weight|."""
    assert len(ours) == len(theirs)
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(ours, theirs, strict=True))


def _unwrap(arrays: list[Any]) -> Any:
    return arrays[0] if len(arrays) == 1 else arrays
