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
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from elastic_collectives import Group
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.devices import HostCopy
from spark_elastic.training.batch import Arrays, LocalBatch, pack_metric_rows, unpack_metric_rows
from spark_elastic.training.torch.loss import LossFn, LossResult, to_float32
from spark_elastic.training.trainer import WorkClock

Batch = LocalBatch[torch.Tensor]


class _Chunk(NamedTuple):
    """Rows that a rank computed at once."""

    rows: int  # their number
    columns: Arrays  # by tensor of the output, by label, and the weights


class _Column(NamedTuple):
    """One of them, of all rows of the step."""

    tensor: torch.Tensor
    by_row: bool  # whether it has an entry for each row; else it is one value, which all rows share


class StepLoss:
    """A step: `add` for each chunk of this rank's rows, then `compute`, then `backward` for each chunk."""

    def __init__(self, loss_fn: LossFn) -> None:
        self._loss_fn = loss_fn
        self.begin()

    def begin(self) -> None:
        """Begin a step, also after one that was given up."""
        self._chunks: list[tuple[int, HostCopy]] = []
        self._output: Any = None  # of the newest chunk, detached
        self._outputs: list[_Column] = []  # of all rows, after `compute`
        self.first = 0  # after `compute`: where the rows of this rank begin among those of the step
        self.seconds = 0.0  # likewise: that this rank worked before the ranks exchanged; 0.0: not measured
        # Whether `backward` compares outputs with those that were gathered; whether it found other bits.
        self.compares, self.differs = False, False

    def add(self, output: Any, part: Batch) -> None:
        """Add the model's output for a chunk. Its graph is not kept."""
        labels, weights = part.on_host or (part.labels, part.weights)
        self._output = _put_tensors(output, [tensor.detach() for tensor in list_tensors(output)])
        columns = [*list_tensors(self._output), *labels, *([] if weights is None else [weights])]
        self._chunks.append((len(part), HostCopy([to_float32(column) for column in columns])))

    def compute(
        self,
        group: Group,
        batch: Batch,
        backward: Callable[[torch.Tensor, int], None] | None = None,
        work: WorkClock | None = None,
    ) -> tuple[LossResult, tuple[torch.Tensor, ...]] | None:
        """Compute the loss of all rows. Collective.

        Args:
            batch: this rank's.
            backward: makes the backward pass of a sum of losses, divided by a number; None: no gradient is wanted.
            work: measures the step.

        Returns:
            The loss and the labels of all rows; None if another rank reports them.

        Raises:
            InvalidInput: the outputs of the chunks do not make one output of all rows; on all ranks alike.
        """
        columns = [column.numpy() for _, copies in self._chunks for column in copies.wait()]
        packed = pack_metric_rows([{"": (rows, 0.0)} for rows, _ in self._chunks], columns)
        self.seconds = 0.0 if work is None else work.take()
        ranks = [_split(*unpack_metric_rows(blob)) for blob in group.allgather_bytes(packed)]
        if work is not None:
            work.begin()
        own, self._chunks = ranks[group.rank], []
        self.first = sum(chunk.rows for chunks in ranks[: group.rank] for chunk in chunks)
        whole = _join([chunk for chunks in ranks for chunk in chunks])
        if not own:
            return None
        count = len(list_tensors(self._output))
        self._outputs = [
            _Column(column.tensor.to(like.device), column.by_row)
            for column, like in zip(whole, list_tensors(self._output), strict=False)
        ]
        if backward is not None:
            for column in self._outputs:
                column.tensor.requires_grad_(column.tensor.is_floating_point() or column.tensor.is_complex())
        output = _put_tensors(self._output, [column.tensor for column in self._outputs])
        rows = sum(chunk.rows for chunks in ranks for chunk in chunks)
        all_rows = _make_batch(batch, rows, [column.tensor for column in whole[count:]])
        result = self._loss_fn(lambda *_: output, all_rows)  # type: ignore[arg-type] # in place of the model
        if backward is not None:
            backward(result.total, batch.planned)
        reports = self.first == 0 and any(chunk.rows for chunk in own)
        return (result, all_rows.labels) if reports else None

    def backward(self, output: Any, first: int, rows: int) -> None:
        """The backward pass of a chunk.

        Args:
            output: of the model, with its graph.
            first: where the chunk's rows begin among those of the step.
        """
        pairs = []
        for tensor, (whole, by_row) in zip(list_tensors(output), self._outputs, strict=True):
            if self.compares and by_row:
                own, gathered = (to_float32(each.detach()) for each in (tensor, whole[first : first + rows]))
                self.differs |= not torch.equal(_to_bytes(own), _to_bytes(gathered))
            counts = tensor.requires_grad and (by_row or (first == 0 and rows > 0))  # a shared value: once
            if whole.grad is not None and counts:
                gradient = whole.grad[first : first + rows] if by_row else whole.grad
                pairs.append((tensor, gradient.to(tensor.dtype)))
        if pairs:
            torch.autograd.backward(*map(list, zip(*pairs, strict=True)))  # type: ignore[arg-type]


def _to_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def list_tensors(output: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(output) if torch.is_tensor(leaf)]


def _put_tensors(output: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """The structure of an output with other tensors."""
    leaves, structure = tree_flatten(output)
    given = iter(tensors)
    return tree_unflatten([next(given) if torch.is_tensor(leaf) else leaf for leaf in leaves], structure)


def _make_batch(own: Batch, rows: int, given: Sequence[torch.Tensor]) -> Batch:
    """A batch of all rows of the step with these labels and weights. Its features are those of this rank."""
    weighted = own.weights is not None or any(share.weights is not None for share in own.shares)
    labels, weights = (tuple(given[:-1]), given[-1]) if weighted else (tuple(given), None)
    batch = replace(own, row_ids=np.arange(rows), shares=(), labels=labels, weights=weights, on_host=None)
    like = next((part for part in (own, *own.shares) if part.on_host is not None), None)
    if like is None:
        return batch
    device = like.labels[0].device
    moved = tuple(label.to(device) for label in labels)
    return replace(
        batch,
        labels=moved,
        weights=None if weights is None else weights.to(device),
        on_host=(labels, weights),
    )


def _split(counts: Any, columns: Arrays) -> list[_Chunk]:
    """The chunks of a rank."""
    each = len(columns) // max(len(counts), 1)
    return [
        _Chunk(int(count[""][0]), columns[number * each : (number + 1) * each])
        for number, count in enumerate(counts)
    ]


def _join(chunks: Sequence[_Chunk]) -> list[_Column]:
    found = []
    for arrays in zip(*(chunk.columns for chunk in chunks), strict=True):
        by_row = all(
            each.ndim and len(each) == chunk.rows for each, chunk in zip(arrays, chunks, strict=True)
        )
        if by_row and all(each.shape[1:] == arrays[0].shape[1:] for each in arrays):
            found.append(_Column(torch.cat([torch.from_numpy(each) for each in arrays]), True))
        elif not by_row and all(_are_equal(each, arrays[0]) for each in arrays):
            found.append(_Column(torch.from_numpy(arrays[0]), False))
        else:
            pairs = zip(arrays, chunks, strict=True)
            shapes = sorted({f"{each.shape} for {chunk.rows} rows" for each, chunk in pairs})
            raise InvalidInput(
                "loss_scope='step' joins what the model returns for the rows of a step, and one of its tensors has "
                f"shape {' and '.join(shapes[:2])}: return one entry for each row, of one shape, or a value that does "
                "not depend on the rows."
            )
    return found


def check_outputs(outputs: Sequence[tuple[int, Any]]) -> None:
    """
    Args:
        outputs: of the model, each of so many rows.

    Raises:
        InvalidInput: they do not make one output of all rows.
    """
    _join(
        [
            _Chunk(rows, [to_float32(each).numpy() for each in list_tensors(output)])
            for rows, output in outputs
        ]
    )


def _are_equal(one: Any, other: Any) -> bool:
    """Up to rounding, by which machines may differ."""
    return one.shape == other.shape and bool(np.allclose(one, other, rtol=1e-5, atol=0.0, equal_nan=True))
