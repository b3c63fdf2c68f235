"""The exchange of a step's gradients: each group of dense ones as one operation in one piece of memory.

The dense gradients of a group are copied into one piece of memory and reduced there; TensorFlow takes the results over
without a copy. Gradients with rows missing (IndexedSlices) are gathered. What is None stays None: a graph's gradients
are there or not on all ranks alike.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from elastic_collectives.group import Array
from spark_elastic.errors import InvalidInput
from spark_elastic.ops.arrays import as_engine_array
from spark_elastic.ops.channels import get_queue
from spark_elastic.ops.process_sets import ProcessSet, is_single_process
from spark_elastic.ops.reduction import Adasum, ReduceOptions
from spark_elastic.ops.rounds import negotiation as kinds
from spark_elastic.ops.rounds.negotiation import Request
from spark_elastic.state.variables import plain
from spark_elastic.tensorflow.allreduce import on_the_wire
from spark_elastic.tensorflow.arrays import Tensor, call, copy_arrays, name_of
from spark_elastic.tensorflow.sparse import allreduce_slices
from spark_elastic.tensorflow.topology_ops import size_op


@dataclass(frozen=True)
class ExchangeOptions:
    """How gradients are exchanged.

    groups: a number of groups to make, or lists of variables. local: variables whose gradients are this rank's own;
    scale_local: they are divided by the size, as an average's share is.
    """

    how: ReduceOptions
    sparse_as_dense: bool
    groups: int | Sequence[Sequence[Any]]
    scale_local: bool
    local: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        if isinstance(self.groups, int) and self.groups < 0:
            raise InvalidInput(f"groups must be lists of variables, or a number; got {self.groups}.")


def exchange_gradients(
    gradients: Sequence[Tensor], sources: Sequence[Any], terms: ExchangeOptions
) -> list[Tensor]:
    """The gradients that all ranks share, in the same places."""
    results = list(gradients)
    if terms.sparse_as_dense or terms.how.op is Adasum:
        results = [dense(gradient) for gradient in results]
    local = {key_of(variable) for variable in terms.local}
    places = [i for i, g in enumerate(results) if g is not None]
    shared = [i for i in places if key_of(sources[i]) not in local]
    if terms.scale_local:
        for i in set(places) - set(shared):
            results[i] = _over_size(results[i], terms.how.process_set)
    for i in shared:
        if isinstance(results[i], tf.IndexedSlices):
            # Its rows differ in number, so its shape is no name for it.
            results[i] = allreduce_slices(results[i], f"gradient.{i}", terms.how, alone=True)
    whole = [i for i in shared if not isinstance(results[i], tf.IndexedSlices)]
    for group in _groups(whole, results, sources, terms):
        for i, result in zip(group, _exchange_group([results[i] for i in group], terms.how), strict=True):
            results[i] = result
    return results


def dense(gradient: Tensor) -> Tensor:
    """The gradient as a dense tensor."""
    return tf.convert_to_tensor(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient


def _groups(
    places: list[int], gradients: Sequence[Tensor], sources: Sequence[Any], terms: ExchangeOptions
) -> list[list[int]]:
    """What travels together: of one dtype, the later layers first, as their gradients are there first."""
    group_of: dict[Any, int] = {}
    if isinstance(terms.groups, int):
        count = max(terms.groups, 1)
        group_of = {key_of(sources[i]): at * count // len(places) for at, i in enumerate(places)}
    else:
        for number, variables in enumerate(terms.groups):
            group_of.update({key_of(variable): number for variable in variables})
    made: dict[tuple[int, Any], list[int]] = {}
    for i in places:
        made.setdefault((group_of.get(key_of(sources[i]), -1), gradients[i].dtype), []).append(i)
    return list(made.values())[::-1]


def _exchange_group(gradients: list[Tensor], how: ReduceOptions) -> list[Tensor]:
    wire, squeezed = on_the_wire(gradients, how)
    given = [tensor for tensor, _ in squeezed]
    dtype = name_of(given[0].dtype)
    body = _body(dtype, f"allreduce.gradients.{_label(given)}", wire, how)
    results = call(body, given, [g.dtype for g in given], [g.shape for g in given])
    return [how.compression.decompress(r, ctx) for r, (_, ctx) in zip(results, squeezed, strict=True)]


def _body(
    dtype: str, name: str, wire: str | None, how: ReduceOptions
) -> Callable[[list[Array]], list[Array]]:
    def body(arrays: list[Array]) -> list[Array]:
        # Copied even for nobody: TensorFlow may write into what a call returns.
        results, memory = copy_arrays(arrays)
        if is_single_process(how.process_set):
            return results
        if how.op is Adasum:  # which combines each by itself
            operands = [as_engine_array(array) for array in results]
        else:
            kind = np.uint16 if dtype == "bfloat16" else np.dtype(dtype)
            operands = [memory.view(kind)]
        shapes = tuple(array.shape for array in operands)
        dtypes = (dtype,) * len(operands)
        request = Request(kinds.ALLREDUCE, name, dtypes, shapes, how.op.value, how.scale, wire)
        get_queue(how.process_set).submit(request, operands, awaited=True).wait()
        return results

    return body


def _label(gradients: Sequence[Tensor]) -> str:
    """The operation's name: the same on all ranks, whatever each has traced before."""
    said = repr([(g.dtype.name, g.shape.as_list() if g.shape.rank is not None else None) for g in gradients])
    return f"{zlib.crc32(said.encode()):08x}"


def _over_size(gradient: Tensor, process_set: ProcessSet) -> Tensor:
    if isinstance(gradient, tf.IndexedSlices):
        values = _over_size(gradient.values, process_set)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient / tf.cast(size_op(process_set), gradient.dtype)


def key_of(variable: Any) -> Any:
    """What tells a variable from others: of a Keras variable, its tf.Variable's."""
    inner = plain(variable)
    return inner.ref() if hasattr(inner, "ref") else id(inner)
