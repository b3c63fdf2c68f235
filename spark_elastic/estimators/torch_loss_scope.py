"""Tries a loss of torch on parts of a batch, with copies of the user's objects. See `loss_scope`."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from spark_elastic.data.loader import StepRows
from spark_elastic.estimators.loss_scope import TOLERANCE, TOLERANCE_16, PartLoss, Trial
from spark_elastic.estimators.two_rows import copy_objects, transform_rows
from spark_elastic.gradients.generators import seeded_rng
from spark_elastic.training.batch import LocalBatch
from spark_elastic.training.spec import TrainSpec
from spark_elastic.training.torch.buffers import BufferSnapshot, depends_on_batch
from spark_elastic.training.torch.determinism import draw_rows
from spark_elastic.training.torch.loss import HALVES, LossFn, autocast
from spark_elastic.training.torch.spec import TorchUserObjects, make_batch_builder
from spark_elastic.training.torch.step import check_outputs

log = logging.getLogger("spark_elastic")

Batch = LocalBatch[torch.Tensor]
Output = tuple[str, Any]  # of a layer, with its name


def prepare_trial(objects: TorchUserObjects, spec: TrainSpec, rows: StepRows) -> Trial:
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
        return Trial(measure, lambda: tries.find_layer(tries.run_step, rounding), False, rounding)
    tolerance = TOLERANCE_16 if any(map(is_half, tree_leaves(outputs))) else TOLERANCE
    return Trial(measure, lambda: tries.find_layer(tries.run_model, rounding), True, tolerance)


def is_half(value: Any) -> bool:
    """Whether it is a tensor of 16-bit floats."""
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
        by_row = [
            a.ndim and (len(a), len(b)) == (len(self._batch), 2) for a, b in pairs if torch.is_tensor(a)
        ]
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

        def cut_outputs(*_: Any) -> Any:
            found = [
                leaf[part] if torch.is_tensor(leaf) and not leaf.is_floating_point()
                else (leaf + far * way.roll(1) + factor.to(leaf.dtype) * way)[part] if torch.is_tensor(leaf)
                else leaf
                for leaf, way in zip(leaves, self._choose_directions(leaves), strict=True)
            ]  # fmt: skip
            return tree_unflatten(found, structure)

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
        slopes = [
            float((each * way).sum()) for each, way in zip(found, ways, strict=True) if each is not None
        ]
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
        """The outputs of all layers."""
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
            if not (
                torch.is_tensor(a) and torch.is_tensor(b) and a.ndim and b.ndim and a.shape[1:] == b.shape[1:]
            ):
                continue
            a, b = a[:rows].detach().double(), b[:rows].detach().double()
            if a.shape == b.shape and not torch.allclose(
                a,
                b,
                rtol=0,
                atol=tolerance * max(float(a.abs().max()), 1e-6) if a.numel() else 0,
                equal_nan=True,
            ):
                return name or "the model"
    return None
