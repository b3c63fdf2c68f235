"""`DistributedOptimizer`: a Keras optimizer that exchanges gradients before it applies them. Training thread only."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from elastic_collectives.group import Array
from spark_elastic.errors import InvalidInput
from spark_elastic.ops.distributed_optimizer import (
    PassCounter,
    WrappedOptimizer,
    get_exchange,
    wrap_optimizer,
)
from spark_elastic.ops.negotiation import ALLREDUCE, Request
from spark_elastic.ops.operations import as_engine_array, get_queue
from spark_elastic.ops.process_sets import ProcessSet, global_process_set, is_single_process
from spark_elastic.ops.reduction import Adasum, Average, ReduceOp, ReduceOptions
from spark_elastic.state.variables import plain, weights_of
from spark_elastic.tensorflow.allreduce import allreduce_slices, on_the_wire
from spark_elastic.tensorflow.arrays import Tensor, call, copy_arrays, name_of, no_autograph
from spark_elastic.tensorflow.compression import Compression
from spark_elastic.tensorflow.topology_ops import size_op

# Gradients of several backward passes, summed in this process until there are as many as make a step.
#
# Written by whoever runs the optimizer's graph, one at a time. What a world that is over left unfinished is dropped.


class Passes:
    """count: of passes in a step. average: divide their sum by it."""

    def __init__(self, count: int, average: bool) -> None:
        self._passes = PassCounter(count)
        self._average = average
        self._sums: list[Array] = []

    @property
    def count(self) -> int:
        return self._passes.count

    def add(self, gradients: Sequence[Tensor], process_set: ProcessSet) -> tuple[Tensor, list[Tensor]]:
        """(whether the step is complete, then the sums; before, of no use)"""
        there = [i for i, gradient in enumerate(gradients) if gradient is not None]
        given = [gradients[i] for i in there]
        results = call(
            self._added, given, [tf.bool, *(g.dtype for g in given)], [[], *(g.shape for g in given)]
        )
        summed = list(gradients)
        for i, result in zip(there, results[1:], strict=True):
            summed[i] = result
        return results[0], summed

    def _added(self, arrays: list[Array]) -> list[Array]:
        if self._passes.begin_pass():
            self._sums, _ = copy_arrays(arrays)
        else:
            for whole, part in zip(self._sums, arrays, strict=True):
                whole += part
        if not self._passes.complete_pass():
            return [np.array(False), *arrays]  # which nobody looks at
        results, self._sums = self._sums, []
        if self._average:
            for whole in results:
                whole /= self.count
        return [np.array(True), *results]


Plain = TypeVar("Plain")


def DistributedOptimizer(  # noqa: PLR0913 - name and arguments are Horovod's
    optimizer: Plain,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Plain:
    """`optimizer` with exchanged gradients: of the same class, with the same variables and settings.

    backward_passes_per_step: gradients of so many calls of `apply` are summed (average_aggregated_gradients: averaged)
    before they are exchanged and applied; the others change nothing. The rest as in `DistributedGradientTape`. name,
    use_locking: of no use here.

    Raises:
        InvalidInput: an argument is wrong.
    """
    if isinstance(optimizer, _Distributed) or not all(
        callable(getattr(optimizer, method, None)) for method in ("apply", "apply_gradients", "build")
    ):
        raise InvalidInput(
            f"DistributedOptimizer wraps an optimizer of Keras 3 once; got a {type(optimizer).__name__}."
        )
    how = ReduceOptions.from_gradient_args(op, gradient_predivide_factor, process_set, compression)

    def made() -> tuple[ExchangeOptions, Passes]:
        terms = ExchangeOptions(
            how, sparse_as_dense, num_groups if groups is None else groups, scale_local_gradients
        )
        return terms, Passes(backward_passes_per_step, average_aggregated_gradients)

    distributed: Plain = wrap_optimizer(optimizer, _Distributed, made, tf.keras.utils)
    return distributed


def PartialDistributedOptimizer(
    optimizer: Plain, *args: Any, local_layers: Any = None, **kwargs: Any
) -> Plain:
    """As `DistributedOptimizer`; the variables of `local_layers`, a Keras layer or several, are each rank's own."""
    distributed: Any = DistributedOptimizer(optimizer, *args, **kwargs)
    for variable in weights_of(local_layers):
        distributed.register_local_var(variable)
    partly: Plain = distributed
    return partly


class _Distributed(WrappedOptimizer):
    """What is added to the optimizer's own class."""

    def register_local_var(self, var: Any) -> None:
        """The gradient of that variable is not exchanged."""
        get_exchange(self)[0].local.append(var)

    @no_autograph
    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Exchange, and apply.

        Raises:
            CollectiveError: the exchange broke; no variable was changed. In a graph: see `elastic.run`.
        """
        own: Any = super()
        this: Any = self
        terms, passes = get_exchange(self)
        variables = list(this._trainable_variables if trainable_variables is None else trainable_variables)
        given = list(grads)
        if passes.count == 1:
            own.apply(exchange_gradients(given, variables, terms), trainable_variables)
            return
        if not this.built:  # not inside of the branch below
            this.build(variables)
        complete, summed = passes.add([dense(gradient) for gradient in given], terms.how.process_set)

        def step() -> Any:
            own.apply(exchange_gradients(summed, variables, terms), trainable_variables)
            return tf.constant(True)

        tf.cond(complete, step, lambda: tf.constant(False))


# `DistributedGradientTape`: a tf.GradientTape whose gradients are those of all ranks. Training thread only.


def DistributedGradientTape(  # noqa: PLR0913 - name and arguments are Horovod's
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """`gradtape`, recording what it records, whose `gradient` exchanges. It is usable inside and after its `with`.

    compression: how float32 travels. gradient_predivide_factor: f divides by f before and by size / f after. groups:
    variables that travel together, as lists or as a number of groups to make (num_groups: the same); None: all that are
    of one dtype. sparse_as_dense: IndexedSlices become dense. process_set: who exchanges; other ranks train alone.
    scale_local_gradients: those of `register_local_source` are divided by the size. device_dense, device_sparse: of no
    use here.

    Raises:
        InvalidInput: an argument is wrong.
    """
    if isinstance(gradtape, _DistributedTape) or not isinstance(gradtape, tf.GradientTape):
        raise InvalidInput(
            f"DistributedGradientTape wraps a tf.GradientTape once; got a {type(gradtape).__name__}."
        )
    how = ReduceOptions.from_gradient_args(op, gradient_predivide_factor, process_set, compression)
    terms = ExchangeOptions(
        how, sparse_as_dense, num_groups if groups is None else groups, scale_local_gradients
    )
    kind = type(type(gradtape).__name__, (_DistributedTape, type(gradtape)), {})
    distributed: Any = object.__new__(kind)
    distributed.__dict__ = gradtape.__dict__
    distributed._terms = terms
    return distributed


def PartialDistributedGradientTape(gradtape: Any, *args: Any, local_layers: Any = None, **kwargs: Any) -> Any:
    """As `DistributedGradientTape`; the variables of `local_layers`, a Keras layer or several, are each rank's own."""
    distributed = DistributedGradientTape(gradtape, *args, **kwargs)
    for variable in weights_of(local_layers):
        distributed.register_local_source(variable)
    return distributed


class _DistributedTape:
    """What is added to the tape's own class."""

    _terms: ExchangeOptions

    def register_local_source(self, source: Any) -> None:
        """The gradient of that variable is not exchanged."""
        self._terms.local.append(source)

    @no_autograph
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        **how: Any,
    ) -> Any:
        """As the tape's own, of the average or sum over all ranks. use_generic_names: of no use here.

        Raises:
            CollectiveError: the exchange, or an operation inside of what was recorded, broke.
        """
        own = super().gradient(target, sources, output_gradients, **how)  # type: ignore[misc]
        # IndexedSlices are one gradient, not three tensors.
        flat = tf.nest.flatten(own, expand_composites=False)
        shared = exchange_gradients(flat, tf.nest.flatten(sources), self._terms)
        return tf.nest.pack_sequence_as(own, shared, expand_composites=False)


# The exchange of a step's gradients: each group of dense ones as one operation in one piece of memory.
#
# The dense gradients of a group are copied into one piece of memory and reduced there; TensorFlow takes the results
# over
# without a copy. Gradients with rows missing (IndexedSlices) are gathered. What is None stays None: a graph's gradients
# are there or not on all ranks alike.


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
        request = Request(ALLREDUCE, name, dtypes, shapes, how.op.value, how.scale, wire)
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
