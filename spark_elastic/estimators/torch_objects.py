"""Checks the user's objects of a fit with torch: model, optimizer, losses, metrics, callbacks, functions.

Factories are called on copies; the user's objects are not changed. Knows torch, not Spark.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import io
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import cloudpickle
import torch
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from spark_elastic.checks import FUNCTION, Check, describe, make_number
from spark_elastic.clusters.run import user_code
from spark_elastic.data.loader import StepRows
from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.validation import (
    MAX_BYTES,
    MODEL_FACTORY_LOCK,
    MORE_ROWS,
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
    name_failing,
    transform_rows,
)
from spark_elastic.gradients.determinism import check_layers, draw_rows
from spark_elastic.gradients.generators import seeded_rng
from spark_elastic.gradients.layout import find_trainable
from spark_elastic.training.batch import LocalBatch
from spark_elastic.training.spec import TrainSpec
from spark_elastic.training.torch.buffers import BufferSnapshot, depends_on_batch
from spark_elastic.training.torch.callbacks import Callback, LearningRateSchedule
from spark_elastic.training.torch.lightning import check_lightning, is_lightning
from spark_elastic.training.torch.loss import HALVES, LossFn, LossResult, autocast
from spark_elastic.training.torch.metrics import Metrics, is_accumulator, name_metrics
from spark_elastic.training.torch.spec import (
    TorchUserObjects,
    build_optimizer,
    check_steps_alone,
    make_batch_builder,
)
from spark_elastic.training.torch.state import check_storable
from spark_elastic.training.torch.step import check_outputs

log = logging.getLogger("spark_elastic")


_MODULES_OWN = vars(torch.nn.Module()).keys()  # attributes that torch gives each module


def check_serializable(model: torch.nn.Module) -> None:
    """Raise InvalidInput with the first layer that cannot be copied and pickled for the workers."""
    for name, part in model.named_modules():
        layer = f"layer {name!r} of the model" if name else "the model"
        if any(is_lazy(tensor) for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False))):
            raise InvalidInput(
                f"{layer} is lazy, without weights yet: call the model once, or give its sizes."
            )
        for parameter, tensor in part.named_parameters(recurse=False):
            if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
                raise InvalidInput(
                    f"{layer} has a hook on the gradient of {parameter}, which torch leaves out of the workers' copy: "
                    "register it in a callback's on_fit_begin (training.model)."
                )
    try:
        _WithoutTensors(io.BytesIO()).dump(model)
    except Exception:  # of locks, open files, clients
        for name, part in model.named_modules():
            for key, value in vars(part).items():
                if key not in _MODULES_OWN:
                    user_code.dumps(value, f"{key!r} of layer {name!r} of the model")


class _WithoutTensors(cloudpickle.Pickler):  # type: ignore[misc,unused-ignore]
    def persistent_id(self, thing: Any) -> str | None:
        return "tensor" if isinstance(thing, torch.Tensor) else None


OptimizerTrial = tuple[torch.optim.Optimizer, tuple[Callback, ...]]  # over a copy of the model

ACTIVATIONS: dict[Any, str] = {
    torch.nn.CrossEntropyLoss: "softmax",
    torch.nn.functional.cross_entropy: "softmax",
    torch.nn.BCEWithLogitsLoss: "sigmoid",
    torch.nn.functional.binary_cross_entropy_with_logits: "sigmoid",
    torch.nn.NLLLoss: "exp",
    torch.nn.functional.nll_loss: "exp",
    torch.nn.BCELoss: "probability",
    torch.nn.functional.binary_cross_entropy: "probability",
    torch.nn.MultiMarginLoss: "softmax",  # its margins are no logits, but they order classes and rows alike
    torch.nn.functional.multi_margin_loss: "softmax",
}


def check_torch_objects(values: Mapping[str, Any]) -> TorchUserObjects:
    """Check the user's objects among an estimator's parameters. Raises InvalidInput with the first mistake."""
    model = _check_model(values["model"], values["seed"])
    own_step = values["train_minibatch_fn"] is not None or is_lightning(model)
    if own_step and values["metrics"]:
        raise InvalidInput(
            "metrics are of the model's outputs, which train_minibatch_fn and a LightningModule's training_step keep "
            "to themselves: leave metrics out (a LightningModule has self.log)."
        )
    if values.get("determinism") == "bitwise":
        check_layers(model, keeps_buffers=True)
    losses = _check_losses(values["loss"], len(values["label_cols"] or ()), own_step)
    if own_step and values.get("loss_scope") == "step":
        raise InvalidInput(
            "loss_scope='step' gathers the outputs of the model for its loss, and train_minibatch_fn and a "
            "LightningModule's training_step keep them to themselves: have the model return what is compared, and give "
            "the comparison as loss."
        )
    learning_rate = values["learning_rate"]
    callbacks = _check_callbacks(values["callbacks"])
    optimizer, trial = _check_optimizer(values["optimizer"], model, values["model"], learning_rate)
    watched = _find_watched_metrics(*trial, callbacks)
    return TorchUserObjects(
        model=model,
        optimizer=optimizer,
        losses=losses,
        loss_weights=_check_loss_weights(values["loss_weights"], len(losses)),
        metrics=name_metrics(values["metrics"] or ()),
        callbacks=callbacks,
        train_minibatch_fn=FUNCTION.or_none()("train_minibatch_fn", values["train_minibatch_fn"]),
        transformation=FUNCTION.or_none()("transformation_fn", values["transformation_fn"]),
        watched=() if is_lightning(model) else watched,  # its steps may log any number
        activation=find_activation(values["loss"]),
    )


def find_activation(loss: Any) -> str | None:
    """What turns the inputs of the loss into probabilities; None: unknown, or no loss of classes."""
    if isinstance(loss, list | tuple) and len(loss) == 1:
        (loss,) = loss
    if isinstance(loss, functools.partial):
        loss = loss.func
    kinds = [loss] if inspect.isroutine(loss) else type(loss).__mro__
    return next((ACTIVATIONS[kind] for kind in kinds if kind in ACTIVATIONS), None)


def _check_model(given: Any, seed: Any) -> torch.nn.Module:
    with MODEL_FACTORY_LOCK, torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(seed))
        model = build_model(given, torch.nn.Module, "a torch.nn.Module")
    check_serializable(model)
    if is_lightning(model):
        check_lightning(model)
    find_trainable(model.named_parameters())
    _check_dense(model)
    check_storable(model.state_dict(), "the model")
    return model


_FIRST_HOOKS = ("on_fit_begin", "on_epoch_begin", "on_step_begin")  # before the first forward pass


def check_on_two_rows(objects: TorchUserObjects, spec: TrainSpec) -> None:
    """Run copies of model, losses and metrics on two rows. InvalidInput: they fail, or the loss compares rows."""
    model = objects.model
    is_large = sum(each.nbytes for each in model.parameters()) > MAX_BYTES
    is_compiled = any(hasattr(part, "_orig_mod") for part in model.modules())  # which takes long, also here
    if is_large or is_compiled:
        return
    if not (is_lightning(model) or has_hook(objects.callbacks, _FIRST_HOOKS, ("spark_elastic.",))):
        what = "the model, the loss or a metric" if objects.metrics else "the model or the loss"
        run = partial(_run_on_rows, objects, spec)
        find_cause, take = partial(_find_scalar_columns, objects, spec), partial(_take_columns, objects, spec)
        check_runs(spec, run, what, find_cause, take)
    own = "the training_step of the model" if objects.train_minibatch_fn is None else "train_minibatch_fn"
    what, advice = "loss", STEP_ADVICE
    if not objects.losses:
        what, advice = own, f"give it as loss, of the model's outputs, and {advice}"
    with MODEL_FACTORY_LOCK:
        check_loss_scope(spec, what, advice, partial(prepare_trial, objects, spec))


def _run_on_rows(objects: TorchUserObjects, spec: TrainSpec, rows: StepRows) -> None:
    tried = objects.model, objects.losses, objects.metrics, objects.train_minibatch_fn, objects.transformation
    with MODEL_FACTORY_LOCK, seeded_rng(spec.config.data.seed):
        model, losses, metrics, minibatch_fn, transformation = copy_objects(tried)
        changes = {"train_minibatch_fn": minibatch_fn, "transformation": transformation}
        objects = replace(objects, losses=losses, **changes)
        if not model.training:  # single parts may be in evaluation mode, as in training
            model.train()
        part = make_batch_builder(spec, objects, model).build(transform_rows(spec, transformation, rows))
        draw_rows(model, part.row_ids, spec.config.data.seed)
        modules = [each for each in losses if isinstance(each, torch.nn.Module)]
        held = {each: {name: b.clone() for name, b in each.named_buffers()} for each in modules}
        result = objects.loss_fn(spec)(model, part)
        for name, loss, label in zip(spec.config.data.label_cols, losses, part.labels, strict=False):
            wrong = label[(label < 0) | (label > 1)]  # on which torch would train in silence
            if len(wrong) and find_activation(loss) in ("sigmoid", "probability"):
                rule = f"{float(wrong[0]):g}, and a loss of two classes takes labels from 0 to 1"
                raise InvalidInput(f"column {name!r} has {rule}: number the classes 0 and 1.")
        if spec.config.world.max_workers != 1 and spec.config.loss.loss_scope != "worker":
            for loss, before in held.items():
                _check_buffers_of_loss(loss, before)
        _try_metrics(metrics, result, part.labels, spec)


def _check_buffers_of_loss(loss: torch.nn.Module, before: Mapping[str, torch.Tensor]) -> None:
    """Refuse a loss that writes to its buffers: each worker would keep those of its own rows, a newcomer new ones."""
    for name, buffer in loss.named_buffers():
        if name not in before or not torch.equal(before[name], buffer):
            raise InvalidInput(
                f"loss {type(loss).__name__} writes to its buffer {name!r}, and buffers of losses are no part of the "
                "training's state: make the loss a part of the model and return its value (train_minibatch_fn), or set "
                "loss_scope='worker' to let each worker keep its own."
            )


def _try_metrics(
    metrics: Mapping[str, Any], result: LossResult, labels: Sequence[torch.Tensor], spec: TrainSpec
) -> None:
    rows = min(MORE_ROWS, spec.config.global_batch)
    for name, metric in metrics.items():
        try:
            Metrics({name: metric}, spec.config.data.label_cols, logs=False).try_rows(result, labels, rows)
        except Exception as error:
            if isinstance(error, InvalidInput) or is_accumulator(metric):
                raise
            # It may fail on these rows alone, which are two, such as a score where all are of one class.
            log.debug("the metric %r was not tried: %r", name, error)


def _take_columns(objects: TorchUserObjects, spec: TrainSpec, rows: StepRows) -> Mapping[str, Any]:
    """The columns as the model takes them, or as they are stored if that fails."""
    with contextlib.suppress(Exception):  # what fails may be the rows themselves
        if objects.transformation is None:
            part = make_batch_builder(spec, objects, objects.model).build(rows)
            names = [*(column.name for column in spec.features), *spec.config.data.label_cols]
            return dict(zip(names, (*part.features, *part.labels), strict=True))
    return rows.columns


def _find_scalar_columns(objects: TorchUserObjects, spec: TrainSpec, rows: StepRows) -> str | None:
    """The sentence if the model takes columns of single numbers as a matrix alone."""
    scalar = [column.name for column in spec.features if column.shape == ()]
    if not scalar or objects.transformation is not None:
        return None
    features = tuple(replace(column, shape=column.shape or (1,)) for column in spec.features)
    try:
        _run_on_rows(objects, replace(spec, features=features), rows)
    except Exception:  # that is not the cause
        return None
    return (
        f"the model does not take feature columns of single numbers ({', '.join(scalar)}) as tensors of shape "
        f"(rows,), but takes (rows, 1): set input_shapes={[list(column.shape) for column in features]}."
    )


def _check_dense(model: torch.nn.Module) -> None:
    """Refuse sparse gradients and buffers, which are not exchanged."""
    for name, part in model.named_modules():
        looks_up = isinstance(part, torch.nn.Embedding | torch.nn.EmbeddingBag)
        if looks_up and part.sparse and part.weight.requires_grad:
            raise InvalidInput(f"layer {name!r} of the model has sparse gradients: use sparse=False.")
    for name, buffer in model.named_buffers():
        if buffer.layout is not torch.strided or buffer.is_quantized:
            kind = "quantized" if buffer.is_quantized else f"sparse ({buffer.layout})"
            raise InvalidInput(f"buffer {name!r} of the model is {kind}: make it dense, or in forward.")


def _check_losses(loss: Any, labels: int, own_step: bool) -> tuple[Callable[..., Any], ...]:
    if own_step:
        if loss is not None:
            raise InvalidInput("the model or train_minibatch_fn computes the loss itself: leave loss out.")
        return ()
    several = isinstance(loss, list | tuple)
    losses = tuple(loss) if several else (loss,)
    for one in losses:
        if isinstance(one, type):
            raise InvalidInput(f"loss is the class {one.__name__}; pass an instance: loss={one.__name__}().")
        if not callable(one):
            raise InvalidInput(f"loss must be a function or module of (output, label); got {describe(one)}.")
        if isinstance(one, torch.nn.Module) and any(each.requires_grad for each in one.parameters()):
            raise InvalidInput(
                f"loss {type(one).__name__} has parameters that require a gradient, which nothing would train: make "
                "it a part of the model and return its value (train_minibatch_fn, or a LightningModule), or set "
                "requires_grad=False on them."
            )
    if several and len(losses) != labels:
        raise InvalidInput(f"loss has {len(losses)} losses for {labels} label columns: give one for each.")
    return losses


_WEIGHTS = Check(
    "a list of numbers", lambda weights: tuple(map(make_number("", math.isfinite).convert, weights))
)


def _check_loss_weights(weights: Any, losses: int) -> tuple[float, ...]:
    if weights is None:
        return (1.0 / losses,) * losses if losses > 1 else ()
    factors: tuple[float, ...] = _WEIGHTS("loss_weights", weights)
    if len(factors) != losses:
        raise InvalidInput(f"loss_weights has {len(factors)} weights for {losses} losses: give one for each.")
    if losses == 1:
        raise InvalidInput("loss_weights needs several losses: pass loss as a list.")
    return factors


def _check_optimizer(
    optimizer: Any, model: torch.nn.Module, given: Any, learning_rate: float | None
) -> tuple[Any, OptimizerTrial]:
    """The optimizer as the user gave it, and one over a copy of the model."""
    if isinstance(optimizer, torch.optim.Optimizer):
        if given is not model:
            raise InvalidInput(
                "optimizer belongs to parameters that there are not yet, since model is a function: pass a function "
                "such as lambda params: SGD(params, lr=0.1)."
            )
        _check_parameters(optimizer, model)
        trial = _copy((model, optimizer))
        return optimizer, build_optimizer(trial[0], trial[1], learning_rate)
    if not callable(optimizer) and not (optimizer is None and is_lightning(model)):
        raise InvalidInput(
            f"optimizer must be a torch optimizer over model.parameters() or a function such as "
            f"lambda params: SGD(params, lr=0.1); got {describe(optimizer)}."
        )
    trial = _copy(model)
    with name_failing("optimizer"):
        tried = build_optimizer(trial, optimizer, learning_rate)
    _check_parameters(tried[0], trial)
    return optimizer, tried


def _copy(things: Any) -> Any:
    try:
        return copy.deepcopy(things)
    except Exception as error:  # such as of tensors that were computed
        raise InvalidInput(f"the model cannot be copied ({error}): make what it holds in forward.") from error


def _find_watched_metrics(
    optimizer: torch.optim.Optimizer, schedules: Sequence[Callback], callbacks: Sequence[Callback]
) -> tuple[str, ...]:
    """The numbers that callbacks watch. Also checks that checkpoints can hold the state of all arguments."""
    watched = []
    check_storable(optimizer.state_dict(), type(optimizer).__name__)
    check_steps_alone(optimizer)
    for callback in (*schedules, *callbacks):
        tried = callback
        if isinstance(callback, LearningRateSchedule):
            tried = copy.copy(callback)  # a user's own is bound to nothing
            tried.bind(optimizer)
        check_storable(tried.state_dict(), f"callback {type(callback).__name__}")
        watched.append(tried.watches)
    return tuple(name for name in watched if name is not None)


def _check_parameters(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
    """Check that the optimizer has all trainable parameters of the model, and no others."""
    given = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    own = dict(model.named_parameters())
    foreign = len(given - {id(parameter) for parameter in own.values()})
    if foreign:
        raise InvalidInput(
            f"the optimizer holds {foreign} of {len(given)} parameters that are not the model's: make it from the "
            "parameters of the model that is passed (of this very object, not of a copy)."
        )
    trainable = [name for name, parameter in own.items() if parameter.requires_grad]
    missing = [name for name in trainable if id(own[name]) not in given]
    if missing:
        shown = ", ".join(missing[:3]) + (" ..." if len(missing) > 3 else "")
        raise InvalidInput(
            f"the optimizer lacks {len(missing)} of the model's {len(trainable)} trainable parameters ({shown}): add "
            "them, or set requires_grad=False on what is to stay as it is."
        )


_HOOKS = [name for name in vars(Callback) if name.startswith("on_")]


def _check_callbacks(callbacks: Any) -> tuple[Callback, ...]:
    found = list_callbacks(callbacks, Callback, "spark_elastic.torch.callbacks.Callback")
    for callback in found:
        unknown = [name for name in dir(type(callback)) if name.startswith("on_") and name not in _HOOKS]
        if unknown:
            raise InvalidInput(
                f"callback {type(callback).__name__} has {unknown[0]}, which nothing calls: the hooks are "
                f"{', '.join(_HOOKS)}; rename it if it is none."
            )
    return found


Batch = LocalBatch[torch.Tensor]
Output = tuple[str, Any]  # of a layer, with its name


def prepare_trial(objects: TorchUserObjects, spec: TrainSpec, rows: StepRows) -> LossTrial:
    """The trial of the loss, of train_minibatch_fn or of a LightningModule, on these rows."""
    with seeded_rng(spec.config.data.seed):
        tried = objects.model, objects.losses, objects.train_minibatch_fn, objects.transformation
        model, losses, minibatch_fn, transformation = copy_objects(tried)
        objects = replace(objects, losses=losses, train_minibatch_fn=minibatch_fn)
        if not model.training:
            model.train()
        for part in model.modules():
            if depends_on_batch(part):  # the job warns of it (R9, scope of P2)
                part.training = False
        batch = make_batch_builder(spec, objects, model).build(transform_rows(spec, transformation, rows))
        tries = _Tries(objects.loss_fn(spec), model, spec, batch)
        outputs = tries.compute_outputs() if objects.losses else None
        if outputs is not None and spec.config.optimizer.precision is not None:
            # Slopes of 16 bits are too rough. The loss alone can be tried in the precision of its rows' columns.
            config = replace(spec.config, optimizer=replace(spec.config.optimizer, precision=None))
            plain = replace(spec, config=config)
            tries = _Tries(objects.loss_fn(plain), model, plain, batch)
            outputs = tree_map(lambda each: each.float() if is_half(each) else each, outputs)
    measure = tries.measure_step if outputs is None else partial(tries.measure_loss, outputs)
    first, again = (measure(slice(0, len(batch)), 0, False).total for _ in range(2))
    if not math.isclose(first, again, rel_tol=1e-6) and first == first:
        log.warning(
            "the loss is another one when the same rows are given again: what it counts, or draws from a generator of "
            "its own, is no part of the training's state, so that a worker that joins and a resumed run begin it anew"
        )
    halves = spec.config.optimizer.precision is not None or any(map(is_half, model.parameters()))
    rounding = TOLERANCE_16 if halves else TOLERANCE
    if outputs is None:
        return LossTrial(measure, lambda: tries.find_layer(tries.run_step, rounding), False, rounding)
    tolerance = TOLERANCE_16 if any(map(is_half, tree_leaves(outputs))) else TOLERANCE
    return LossTrial(measure, lambda: tries.find_layer(tries.run_model, rounding), True, tolerance)


def is_half(value: Any) -> bool:
    return torch.is_tensor(value) and value.dtype in HALVES


class _Tries:
    """Copies of the user's objects, and the rows that they are tried on."""

    def __init__(self, loss_fn: LossFn, model: torch.nn.Module, spec: TrainSpec, batch: Batch) -> None:
        self._loss_fn, self._model, self._config, self._batch = loss_fn, model, spec.config, batch
        self._directions: list[torch.Tensor] = []  # in which slopes are taken

    def compute_outputs(self) -> Any:
        """The model's outputs of all rows; None if their first dimension is not the rows, as of a time series."""
        whole, two = self.run_model(self._batch), self.run_model(self._batch.cut(slice(0, 2)))
        if self._config.loss.loss_scope == "step":
            check_outputs([(len(self._batch), whole), (2, two)])
        pairs = zip(tree_leaves(whole), tree_leaves(two), strict=True)
        size = len(self._batch)
        by_row = [a.ndim and (len(a), len(b)) == (size, 2) for a, b in pairs if torch.is_tensor(a)]
        return whole if all(by_row) else None

    def run_model(self, batch: Batch) -> Any:
        draw_rows(self._model, batch.row_ids, self._config.data.seed)
        with torch.no_grad(), autocast(self._config.optimizer.precision):
            return self._model(*batch.features)

    def run_step(self, batch: Batch) -> Any:
        draw_rows(self._model, batch.row_ids, self._config.data.seed)
        return self._loss_fn(self._model, batch)

    def measure_loss(self, outputs: Any, part: slice, seed: int, moved: bool) -> PartLoss:
        """Of these outputs, without the model: what it draws, and what it mixes, is no matter of the loss."""
        leaves, structure = tree_flatten(outputs)
        factor, far = torch.zeros((), requires_grad=True), float(moved)

        def move(leaf: Any, way: torch.Tensor) -> Any:
            if not torch.is_tensor(leaf):
                return leaf
            if leaf.is_floating_point():
                leaf = leaf + far * way.roll(1) + factor.to(leaf.dtype) * way
            return leaf[part]

        def cut_outputs(*_: Any) -> Any:
            return tree_unflatten(list(map(move, leaves, self._choose_directions(leaves))), structure)

        stub: Any = cut_outputs
        with seeded_rng(self._config.data.seed, seed):
            return self._measure(lambda batch: self._loss_fn(stub, batch), part, [factor], [torch.ones(())])

    def measure_step(self, part: slice, seed: int, moved: bool) -> PartLoss:
        """Of the model's own step, with its buffers as they were."""
        trained = [each for each in self._model.parameters() if each.requires_grad]
        ways = self._choose_directions(trained)
        before = BufferSnapshot(self._model, tuple(self._model.modules()))
        weights = [each.detach().clone() for each in trained]
        try:
            with torch.no_grad():
                for each, way in zip(trained if moved else (), ways, strict=False):
                    each.add_(way.roll(1) / max(1.0, way[:1].numel() ** 0.5) if way.ndim else way)
            with seeded_rng(self._config.data.seed, seed):
                return self._measure(self.run_step, part, trained, ways)
        finally:
            before.restore()
            with torch.no_grad():
                for each, weight in zip(trained, weights, strict=True):
                    each.copy_(weight)

    def _measure(
        self,
        run: Callable[[Batch], Any],
        part: slice,
        moved: Sequence[torch.Tensor],
        ways: list[torch.Tensor],
    ) -> PartLoss:
        result = run(self._batch.cut(part))
        found: Any = torch.autograd.grad(result.total, moved, allow_unused=True)
        slopes = [float((g * way).sum()) for g, way in zip(found, ways, strict=True) if g is not None]
        return PartLoss(result.total.item(), result.denominator, sum(slopes))

    def _choose_directions(self, tensors: list[Any]) -> list[torch.Tensor]:
        """One of each tensor, the same in every call."""
        if not self._directions:
            drawn = torch.Generator().manual_seed(0)
            shapes = [each.shape if torch.is_tensor(each) else () for each in tensors]
            self._directions = [torch.randn(shape, generator=drawn) for shape in shapes]
        return self._directions

    def find_layer(self, run: Callable[[Batch], Any], tolerance: float) -> str | None:
        """The first layer, in the order in which they end, whose outputs for two rows depend on the others."""
        whole = self._record(run, self._batch, 0)
        mixing = _find_difference(whole, self._record(run, self._batch.cut(slice(0, 2)), 0), 2, tolerance)
        if mixing is None or _find_difference(whole, self._record(run, self._batch, 1), 2, tolerance):
            return None  # the second: layers draw random numbers
        return mixing

    def _record(self, run: Callable[[Batch], Any], batch: Batch, seed: int) -> list[Output]:
        found: list[Output] = []
        hooks = [
            part.register_forward_hook(lambda _, __, out, name=name: found.append((name, out)))
            for name, part in self._model.named_modules()
        ]
        before = BufferSnapshot(self._model, tuple(self._model.modules()))
        try:
            with seeded_rng(self._config.data.seed, seed):
                run(batch)
        finally:
            before.restore()
            for hook in hooks:
                hook.remove()
        return found


def _find_difference(whole: list[Output], part: list[Output], rows: int, tolerance: float) -> str | None:
    """The first layer whose outputs for the first rows differ between two passes that called the same layers."""
    if [name for name, _ in whole] != [name for name, _ in part]:
        return None
    for (name, one), (_, other) in zip(whole, part, strict=True):
        for a, b in zip(tree_leaves(one), tree_leaves(other), strict=False):
            if not (torch.is_tensor(a) and torch.is_tensor(b) and a.ndim and b.ndim):
                continue
            a, b = a[:rows].detach().double(), b[:rows].detach().double()
            limit = tolerance * max(float(a.abs().max()), 1e-6) if a.numel() else 0.0
            if a.shape == b.shape and not torch.allclose(a, b, rtol=0, atol=limit, equal_nan=True):
                return name or "the model"
    return None
