"""The loss of all rows of a step, whatever the world: `loss_scope="step"` (R8, weighting; R9, scope of P2).

The ranks gather the outputs of their models, with labels and weights, in the order of the step's rows. Each of them
computes the same loss of all rows, and its gradient by the outputs of its own rows, which their backward passes carry
on to the weights (GradCache). One rank reports the loss: that with the step's first row. Training thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from elastic_collectives import Group
from spark_elastic.gradients.devices import CPU, HostCopy, HostSum
from spark_elastic.gradients.generators import seeded_rng
from spark_elastic.training.batch import LocalBatch
from spark_elastic.training.step_columns import Chunk, gather_columns, join_chunks
from spark_elastic.training.torch.loss import LossFn, to_float32
from spark_elastic.training.torch.metrics import Metrics
from spark_elastic.training.trainer import WorkClock

Batch = LocalBatch[torch.Tensor]


class _Column(NamedTuple):
    """A tensor of the output, of all rows of the step. See `step_columns.Column`."""

    tensor: torch.Tensor
    by_row: bool


class StepLoss:
    """A step: `add` for each chunk of this rank's rows, then `compute`, then `seek`, and `backward` for each chunk."""

    def __init__(self, loss_fn: LossFn) -> None:
        self._loss_fn = loss_fn
        self.begin()

    def begin(self) -> None:
        """Begin a step, also after one that was given up."""
        self._chunks: list[tuple[int, HostCopy]] = []
        self._output: Any = None  # of the newest chunk, detached
        self._outputs: list[_Column] = []  # of all rows, after `compute`
        self.first = 0  # after `compute`: where the rows of this rank begin among those of the step
        # Whether `backward` compares outputs with those that were gathered; whether it found other bits.
        self.compares, self.differs = False, False

    def add(self, output: Any, part: Batch) -> None:
        """Add the model's output for a chunk. Its graph is not kept."""
        self._output = tree_map_only(torch.Tensor, torch.Tensor.detach, output)
        self._device = next((tensor.device for tensor in list_tensors(output)), CPU)
        labels, weights = part.on_host or (part.labels, part.weights)
        columns = [*list_tensors(self._output), *labels, *([] if weights is None else [weights])]
        self._is_weighted = weights is not None
        self._chunks.append((len(part), HostCopy([to_float32(column) for column in columns])))

    def compute(
        self,
        group: Group,
        batch: Batch,
        key: Sequence[int],
        metrics: Metrics,
        backward: Callable[[torch.Tensor, int], None] | None = None,
        work: WorkClock | None = None,
    ) -> tuple[HostSum, float]:
        """The loss of all rows and its denominator, on the rank that reports them; else zeros. Collective.

        Args:
            batch: this rank's.
            key: what the loss's random numbers are drawn by, on all ranks alike.
            metrics: gets outputs and labels, on the rank that reports them.
            backward: makes the backward pass of a sum of losses, divided by a number; None: no gradient is wanted.
            work: measures the step.

        Raises:
            InvalidInput: the outputs of the chunks do not make one output of all rows; on all ranks alike.
        """
        chunks = [Chunk(rows, [column.numpy() for column in copies.wait()]) for rows, copies in self._chunks]
        self._chunks, loss = [], HostSum()
        columns, self.first, reports = gather_columns(group, chunks, work)
        if not chunks:
            return loss, 0.0
        count = len(list_tensors(self._output))
        # Copies: torch's memory begins at the same alignment on every rank.
        tensors = [(torch.from_numpy(values).clone(), by_row) for values, by_row in columns]
        self._outputs = [_Column(each.to(self._device), by_row) for each, by_row in tensors[:count]]
        for each, _ in self._outputs:
            each.requires_grad_(backward is not None and (each.is_floating_point() or each.is_complex()))
        outputs = iter(self._outputs)
        output = tree_map_only(torch.Tensor, lambda _: next(outputs).tensor, self._output)
        whole = self._make_batch(batch, [each for each, _ in tensors[count:]])
        with seeded_rng(*key):
            result = self._loss_fn(lambda *_: output, whole)  # type: ignore[arg-type] # in place of the model
            if backward is not None:
                backward(result.total, batch.planned)
        if not reports:
            return loss, 0.0
        loss.add(result.total)
        metrics.add(result, whole.labels)
        return loss, result.denominator

    def _make_batch(self, own: Batch, given: list[torch.Tensor]) -> Batch:
        """A batch of all rows with these labels and weights; its features, of which errors name types, are some."""
        rows, weights = len(given[0]), given.pop() if self._is_weighted else None
        return replace(
            own,
            row_ids=np.arange(rows),
            features=next((share.features for share in own.shares), own.features),
            labels=tuple(label.to(self._device) for label in given),
            weights=None if weights is None else weights.to(self._device),
            shares=(),
            on_host=None if self._device == CPU else (tuple(given), weights),
        )

    def seek(self, place: int) -> None:
        """Go to where the rows of the next chunk begin among those of the step."""
        self._place = place

    def backward(self, output: Any, part: Batch) -> None:
        """The backward pass of a chunk. output: of the model, with its graph."""
        rows, pairs = slice(self._place, self._place + len(part)), []
        has_shared = self._place == 0 and len(part) > 0  # what all rows share has its gradient once
        for tensor, (whole, by_row) in zip(list_tensors(output), self._outputs, strict=True):
            if self.compares and by_row:
                own, gathered = (to_float32(each.detach()) for each in (tensor, whole[rows]))
                self.differs |= not torch.equal(_to_bytes(own), _to_bytes(gathered))
            if whole.grad is not None and tensor.requires_grad and (by_row or has_shared):
                gradient = whole.grad[rows] if by_row else whole.grad
                pairs.append((tensor, gradient.to(tensor.dtype)))
        if pairs:
            torch.autograd.backward(*map(list, zip(*pairs, strict=True)))  # type: ignore[arg-type]
        self._place += len(part)


def list_tensors(output: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(output) if torch.is_tensor(leaf)]


def check_outputs(outputs: Sequence[tuple[int, Any]]) -> None:
    """
    Args:
        outputs: of the model, each of so many rows.

    Raises:
        InvalidInput: they do not make one output of all rows.
    """
    join_chunks(
        [Chunk(rows, [to_float32(each).numpy() for each in list_tensors(one)]) for rows, one in outputs]
    )


def _to_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
