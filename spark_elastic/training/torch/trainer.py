"""The torch implementation of `training.trainer.ModelTrainer`, and the program that a worker of the estimator runs.

Both are shipped by cloudpickle with the user's model, optimizer and loss inside. Main thread only, except for
`check_watched`, which the driver calls before the first job.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, NamedTuple

import torch

from elastic_collectives import Group
from spark_elastic.data.loader import StepRows
from spark_elastic.gradients.determinism import (
    align_tensors,
    describe_arithmetic,
    exchanges_statistics,
    use_deterministic_arithmetic,
)
from spark_elastic.gradients.devices import (
    CPU,
    Arrival,
    DeviceCopier,
    ExhaustedMemoryAdvice,
    HostSum,
    initialize_device,
    select_device,
)
from spark_elastic.gradients.exchange import GradientExchange
from spark_elastic.gradients.generators import give_back_generators, seeded_rng
from spark_elastic.gradients.reduction import options_from_env
from spark_elastic.gradients.step_summary import StepDecision, count_summary_bytes
from spark_elastic.runs.ledger import Ledger
from spark_elastic.training.loop import TrainingLoop
from spark_elastic.training.progress import TrainingProgress, check_watched_names
from spark_elastic.training.spec import TrainSpec
from spark_elastic.training.torch.buffers import describe_world_dependence
from spark_elastic.training.torch.callbacks import TorchCallbackList
from spark_elastic.training.torch.loss import Batch, autocast
from spark_elastic.training.torch.metrics import Metrics, is_accumulator
from spark_elastic.training.torch.share_step import ShareChecker, ShareStep, build_shares, sum_over_shares
from spark_elastic.training.torch.spec import (
    TorchUserObjects,
    build_optimizer,
    build_trainer_plan,
    make_batch_builder,
)
from spark_elastic.training.torch.state import TorchTrainingState, dump_values, move_to_device
from spark_elastic.training.torch.step import GradientScaling, StepLoss, TrainStep, is_plain_optimizer
from spark_elastic.training.trainer import ModelTrainer, StepCall, take_validation_step
from spark_elastic.training.transformation_pool import bind_transformation
from spark_elastic.worker.session import get_collective_thread


class TorchTrainProgram(TrainingLoop):
    """The program of a worker of `ElasticTorchEstimator`: the training loop over a torch model."""

    def __init__(self, spec: TrainSpec, objects: TorchUserObjects) -> None:
        shapes_nothing = any(map(exchanges_statistics, objects.model.modules()))
        super().__init__(spec, TorchTrainer(spec, objects), objects.transformation, shapes_nothing)


class ArrivingBatch(NamedTuple):
    rows: StepRows  # what it is made of
    batch: Batch  # on the device; complete once `arrival` is
    arrival: Arrival | None  # None: the device is the CPU, and everything is there

    def wait(self) -> Batch:
        if self.arrival is not None:
            parts = [(*one.features, *one.labels, one.weights) for one in self.batch.shares or (self.batch,)]
            self.arrival.wait([tensor for tensors in parts for tensor in tensors if tensor is not None])
        return self.batch


class TorchTrainer(ModelTrainer):
    """Model, optimizer, loss and metrics of one worker. See `training.trainer.ModelTrainer`."""

    state: TorchTrainingState
    callbacks: TorchCallbackList
    _train_step: TrainStep

    def __init__(self, spec: TrainSpec, objects: TorchUserObjects) -> None:
        self._spec = spec
        self._objects = objects
        self._exchange: GradientExchange | None = None  # None until `move_to_device`
        self._coming: ArrivingBatch | None = None  # None: it is built when its step begins

    def prepare(self, progress: TrainingProgress, ledger: Ledger) -> None:
        spec, config, objects = self._spec, self._spec.config, self._objects
        if config.exchange.shares:
            use_deterministic_arithmetic()
        self._device = select_device()
        initialize_device(self._device)
        self._copier = None if self._device == CPU else DeviceCopier(self._device)
        torch.manual_seed(config.data.seed)
        model = objects.model
        if not model.training:  # a fitted model; single parts are the user's choice
            model.train()
        if config.exchange.shares:
            align_tensors((*model.parameters(), *model.buffers()))
        rate, plan = config.optimizer.learning_rate, build_trainer_plan(spec)
        optimizer, schedules = build_optimizer(model, objects.optimizer, rate, spec.lr_scale, plan)
        self._loss_fn = objects.loss_fn(spec)
        self._scaling = GradientScaling(config.optimizer.precision, self._device)
        given = objects.metrics, config.data.label_cols, self._loss_fn.logs
        self._metrics = metrics = [Metrics(*given, prefix) for prefix in ("", "val_")]
        self.callbacks = TorchCallbackList((*schedules, *objects.callbacks), model, optimizer)
        others = [self._scaling, *metrics, self.callbacks, *self.callbacks.callbacks]
        self.state = TorchTrainingState(model, optimizer, others, progress)
        self._ledger = ledger
        self._batches = make_batch_builder(spec, objects, model, self._copier)

    def move_to_device(self) -> None:
        if self._exchange is not None:
            return
        config, model = self._spec.config, self.state.model
        self._memory_advice = ExhaustedMemoryAdvice(
            f"lower batch_size={config.data.batch_size} and raise backward_passes_per_step by as much, set "
            "precision='bf16', or see that no other process uses this GPU"
        )
        with self._memory_advice:
            move_to_device(model, self.state.optimizer, self._device)
        if config.optimizer.compile_model:
            model.compile()
        shares, wire = config.exchange.shares, config.exchange.gradient_compression
        arithmetic = describe_arithmetic() if shares else ""
        options = options_from_env(wire=wire, shares=shares, arithmetic=arithmetic)
        thread, count = get_collective_thread, count_summary_bytes
        self._exchange = exchange = GradientExchange(
            model.named_parameters(), options, get_thread=thread, count_message_bytes=count
        )
        others = self._ledger, self._metrics[0], self._scaling
        kind = ShareStep if shares else TrainStep
        self._train_step = kind(self.state, self._loss_fn, exchange, config, *others)
        shows_model = any(not _is_own(callback.on_step_end) for callback in self.callbacks.callbacks)
        self._train_step.shows_buffers = not shares and shows_model
        self._train_step.generators.keeps = not self._draws_between_steps()
        every = config.exchange.verify_steps
        if every and isinstance(self._train_step, ShareStep):
            bound = bind_transformation(config, self._objects.transformation)

            def build(rows: StepRows, rank: int) -> Batch:
                return self._start_build(rows, rank).wait()

            self._train_step.checker = ShareChecker(self._spec, every, bound, build)

    def _draws_between_steps(self) -> bool:
        """Whether code of the user's, or of another library, runs between two steps, which may draw random numbers."""
        objects = self._objects
        called = self.callbacks.callbacks or objects.metrics or objects.transformation
        return bool(called) or not is_plain_optimizer(self.state.optimizer)

    @property
    def bulk_seconds(self) -> float | None:
        return None if self._exchange is None else self._exchange.mode.bulk_seconds

    def train_step(self, rows: StepRows, call: StepCall) -> StepDecision:
        with self._memory_advice:
            batch = self._build(rows, call.group)
            if self._copier is not None:
                self._train_step.on_launched = lambda: self._build_ahead(call)
            return self._train_step.run(batch, call, wants_stop=self.callbacks.wants_stop())

    def validation_mode(self) -> AbstractContextManager[None]:
        return self.state.module.evaluate()

    def validation_step(self, rows: StepRows, call: StepCall) -> StepDecision:
        config, position, group = self._spec.config, self.state.position, call.group
        batch = self._build(rows, group)
        first = batch.first_share if config.exchange.shares else group.rank

        def compute() -> tuple[float, float]:
            self._loss_fn.begin(group, batch, position)
            step_loss = StepLoss(self._loss_fn) if config.loss.loss_scope == "step" else None
            parts = enumerate(batch.shares or [batch], first)
            losses = [self._validate(part, number, step_loss) for number, part in parts]
            self._build_ahead(call)
            sums = [(total.compute(), denominator) for total, denominator in losses]
            if step_loss is not None:
                key = self._train_step.key
                with torch.no_grad():
                    of_all, denominator = step_loss.compute(group, batch, key, self._metrics[1])
                return of_all.compute(), denominator
            if config.exchange.shares:  # all ranks have the same sums, so the step summary has them once
                loss, denominator = sum_over_shares(group, sums)
                return (loss, denominator) if group.rank == 0 else (0.0, 0.0)
            return sums[0]

        return take_validation_step(self.state, batch, self._metrics[1], call, compute)

    def _build(self, rows: StepRows, group: Group) -> Batch:
        coming, self._coming = self._coming, None
        if coming is None or coming.rows.row_ids is not rows.row_ids:
            coming = self._start_build(rows, group.rank)
        return coming.wait()

    def _build_ahead(self, call: StepCall) -> None:
        """Start to copy the next step's batch to the device, which computes meanwhile."""
        if self._copier is None or self._coming is not None:
            return
        with suppress(Exception):  # what the user's function raises is raised again when its step begins
            rows = call.get_next_rows()
            self._coming = None if rows is None else self._start_build(rows, call.group.rank)

    def _start_build(self, rows: StepRows, rank: int) -> ArrivingBatch:
        shared = self._spec.config.exchange.shares
        batch = build_shares(self._batches, rows, rank) if shared else self._batches.build(rows)
        return ArrivingBatch(rows, batch, None if self._copier is None else self._copier.record())

    def _validate(self, batch: Batch, part_number: int, step_loss: StepLoss | None) -> tuple[HostSum, float]:
        """The loss and its denominator; or outputs go to `step_loss`. part_number: of the rank or virtual share."""
        config, loss, denominator = self._spec.config, HostSum(), 0.0
        with torch.no_grad(), seeded_rng(*self._train_step.key, part_number):
            for part in batch.micro_batches(config.data.validation_batch):
                if step_loss is not None:
                    with autocast(config.optimizer.precision):
                        step_loss.add(self.state.model(*part.features), part)
                    continue
                result = self._loss_fn(self.state.model, part)
                self._metrics[1].add(result, part.labels)
                loss.add(result.total)
                denominator += result.denominator
        return loss, denominator

    def epoch_metrics(self) -> dict[str, Any]:
        found: dict[str, Any] = {"learning_rate": float(self.state.optimizer.param_groups[0]["lr"])}
        losses = _list_losses(self._objects, self._spec.config.data.label_cols)
        sums_of_both = self.state.progress.epoch, self.state.progress.validation
        for metrics, prefix, sums in zip(self._metrics, ("", "val_"), sums_of_both, strict=True):
            found.update(sums.correct_losses(metrics.results(), [prefix + name for name in losses]))
            if losses and prefix + losses[0] in found:
                parts = zip(self._objects.loss_weights, losses, strict=True)
                found[prefix + "loss"] = sum(weight * found[prefix + name] for weight, name in parts)
        if self._spec.config.optimizer.precision == "fp16":
            found["skipped_steps"] = self._scaling.skipped
        return found

    def reset_metrics(self) -> None:
        for metrics in self._metrics:
            metrics.reset()

    def describe_world_dependence(self) -> str | None:
        return None if self._spec.config.exchange.shares else describe_world_dependence(self.state.model)

    def export_weights(self) -> bytes:
        return dump_values(self.state.module.export())

    def close(self) -> None:
        give_back_generators()
        if self._exchange is not None:
            self._exchange.close()
            if isinstance(self._train_step, ShareStep) and self._train_step.checker is not None:
                self._train_step.checker.close()


# ---- the numbers that callbacks watch

# Numbers of an epoch that do not measure the model.
NOT_METRICS = ("learning_rate", "skipped_steps", "epoch", "rows", "planned", "steps", "seconds")


def check_watched(objects: TorchUserObjects, labels: Sequence[str], validates: bool) -> None:
    """Raises InvalidInput: a callback watches a number that no epoch will have. validates: there is a validation."""
    known = list_epoch_numbers(objects, labels)
    # A metric object may report further numbers whose names begin with its own.
    prefixes = tuple(f"{name}_" for name, metric in objects.metrics.items() if is_accumulator(metric))
    # The user's own callbacks may add any number in `on_epoch_end`.
    may_add = any(not _is_own(callback.on_epoch_end) for callback in objects.callbacks)

    def may_exist(name: str) -> bool:
        return may_add or name in NOT_METRICS or name.startswith(prefixes)

    check_watched_names(objects.watched, known, validates, may_exist)


def list_epoch_numbers(objects: TorchUserObjects, labels: Sequence[str]) -> list[str]:
    """Names of the losses and metrics of each epoch. Those of its validation have the prefix `val_`."""
    outputs = [f"{name}_{label}" for name in objects.metrics for label in labels if len(labels) > 1]
    return ["loss", *_list_losses(objects, labels), *objects.metrics, *outputs]


def _list_losses(objects: TorchUserObjects, labels: Sequence[str]) -> list[str]:
    return [f"loss_{label}" for label in labels] if len(objects.losses) > 1 else []


def _is_own(hook: object) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("spark_elastic.")
