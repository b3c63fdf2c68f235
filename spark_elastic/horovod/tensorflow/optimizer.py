"""`DistributedOptimizer` and `DistributedGradientTape`: exchange gradients before they are applied or returned.

The dense gradients of a group are copied into one buffer and reduced there as one operation; TensorFlow takes over the
results without a copy. Gradients with missing rows (IndexedSlices) are gathered. A gradient that is None stays None: in
a graph all ranks have the same ones. The training thread traces, threads of TensorFlow run the graphs.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from elastic_collectives.operands import Array
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.process_sets import ALL, ProcessSet, is_single_process
from spark_elastic.gradients.reduction import Adasum, Average, Compression, ReduceOp, ReduceOptions
from spark_elastic.horovod.ops.distributed_optimizer import (
    GradientAccumulator,
    GradientOptions,
    OptimizerExchange,
    WrappedOptimizer,
    register_local_layers,
    wrap_optimizer,
)
from spark_elastic.horovod.ops.operations import allreduce_arrays, compress_tensors
from spark_elastic.horovod.tensorflow.arrays import (
    Tensor,
    Tensors,
    append_to_graph,
    call,
    copy_arrays,
    no_autograph,
    view_of,
)
from spark_elastic.horovod.tensorflow.operations import allreduce_slices, are_float32, size_op
from spark_elastic.runs.handlers import list_trainable_weights, unwrap_variable

Plain = TypeVar("Plain")


def exchange_gradients(
    gradients: Tensors, sources: Sequence[Any], options: GradientOptions, local: Sequence[Any]
) -> list[Tensor]:
    """Return the gradients of all ranks, in the order of `sources`, the variables. local: variables whose gradients are
    not exchanged."""
    results = list(gradients)
    if options.sparse_as_dense or options.reduce.op is Adasum:
        results = [_to_dense(gradient) for gradient in results]
    own = {_key_of(variable) for variable in local}
    present = [i for i, gradient in enumerate(results) if gradient is not None]
    shared = [i for i in present if _key_of(sources[i]) not in own]
    if options.scale_local:
        for i in set(present) - set(shared):
            results[i] = _divide_by_size(results[i], options.reduce.process_set)
    for i in shared:
        if isinstance(results[i], tf.IndexedSlices):
            # Its number of rows differs, so that the name cannot follow from its shape.
            results[i] = allreduce_slices(results[i], f"gradient.{i}", options.reduce, allow_single=True)
    dense = [i for i in shared if not isinstance(results[i], tf.IndexedSlices)]
    for group in _make_groups(dense, results, sources, options):
        reduced = _allreduce_group([results[i] for i in group], options.reduce)
        for i, result in zip(group, reduced, strict=True):
            results[i] = result
    return results


def _to_dense(gradient: Tensor) -> Tensor:
    return tf.convert_to_tensor(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient


def _make_groups(
    indices: list[int], gradients: Tensors, sources: Sequence[Any], options: GradientOptions
) -> list[list[int]]:
    """The indices of gradients that travel together: of one dtype, later layers first, as they are computed."""
    group_of: dict[Any, int] = {}  # by key of the variable
    if isinstance(options.groups, int):
        count = max(options.groups, 1)
        group_of = {_key_of(sources[i]): at * count // len(indices) for at, i in enumerate(indices)}
    else:
        for number, variables in enumerate(options.groups):
            group_of.update({_key_of(variable): number for variable in variables})
    groups: dict[tuple[int, Any], list[int]] = {}
    for i in indices:
        groups.setdefault((group_of.get(_key_of(sources[i]), -1), gradients[i].dtype), []).append(i)
    return list(groups.values())[::-1]


def _allreduce_group(gradients: list[Tensor], options: ReduceOptions) -> list[Tensor]:
    wire, tensors, decompress = compress_tensors(gradients, options, are_float32(gradients))
    name = f"gradients.{_make_label(tensors)}"

    def body(arrays: list[Array]) -> list[Array]:
        # Copied even without peers: TensorFlow may write into what a call returns.
        buffer = copy_arrays(arrays)
        if is_single_process(options.process_set):
            return buffer.views
        # Adasum combines each gradient by itself.
        operands = buffer.views if options.op is Adasum else buffer.flat
        allreduce_arrays(operands, name, options, wire)
        return buffer.views

    return decompress(call(body, tensors, [t.dtype for t in tensors], [t.shape for t in tensors]))


def _make_label(gradients: Tensors) -> str:
    """Return the same name on all ranks, whatever each has traced before: a hash of dtypes and shapes."""
    text = repr([(g.dtype.name, g.shape.as_list() if g.shape.rank is not None else None) for g in gradients])
    return f"{zlib.crc32(text.encode()):08x}"


def _divide_by_size(gradient: Tensor, process_set: ProcessSet) -> Tensor:
    if isinstance(gradient, tf.IndexedSlices):
        values = _divide_by_size(gradient.values, process_set)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient / tf.cast(size_op(process_set), gradient.dtype)


def _key_of(variable: Any) -> Any:
    """Return what identifies a variable; of a Keras variable, the key of its tf.Variable."""
    inner = unwrap_variable(variable)
    return inner.ref() if hasattr(inner, "ref") else id(inner)


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
    process_set: ProcessSet = ALL,
    scale_local_gradients: bool = True,
) -> Plain:
    """`optimizer` with exchanged gradients: of the same class, with the same variables and settings.

    Args:
        backward_passes_per_step: the gradients of so many calls of `apply` are summed before they are exchanged and
            applied; the calls before change nothing.
        average_aggregated_gradients: average these gradients instead.
        name, use_locking: not used.
        For the other arguments see `DistributedGradientTape`.

    Raises:
        InvalidInput: an argument is wrong.
    """
    reduce = ReduceOptions.from_gradient_args(op, gradient_predivide_factor, process_set, compression)
    wanted = num_groups if groups is None else groups
    options = GradientOptions(reduce, sparse_as_dense, wanted, scale_local_gradients)
    passes, average = backward_passes_per_step, average_aggregated_gradients
    return wrap_optimizer(optimizer, lambda: TensorFlowExchange(options, passes, average), tf.keras.utils)


def PartialDistributedOptimizer(
    optimizer: Plain, *args: Any, local_layers: Any = None, **kwargs: Any
) -> Plain:
    """As `DistributedOptimizer`, without an exchange for the variables of `local_layers`, Keras layers."""
    return register_local_layers(DistributedOptimizer(optimizer, *args, **kwargs), local_layers)


class _WrappedOptimizer(WrappedOptimizer):
    apply = no_autograph(WrappedOptimizer.apply)


class TensorFlowExchange(OptimizerExchange[Array]):
    kind = _WrappedOptimizer

    @staticmethod
    def copy(gradients: Sequence[Array]) -> list[Array]:
        return copy_arrays(gradients).views

    def exchange(self, gradients: list[Tensor], variables: Sequence[Any]) -> list[Tensor]:
        return exchange_gradients(gradients, variables, self.options, self.local)

    def add_pass(self, gradients: list[Tensor], step: Callable[[list[Tensor]], None]) -> None:
        dense = [_to_dense(gradient) for gradient in gradients]
        # Without a graph, whose gradients are the same ones each time, each pass may have others.
        if tf.executing_eagerly():
            totals = self.accumulator.add([None if g is None else view_of(g) for g in dense])
            if totals is not None:
                step([None if t is None else tf.convert_to_tensor(t) for t in totals])
            return
        complete, sums = _accumulate_in_graph(self.accumulator, dense)

        def step_in_branch() -> Tensor:
            step(sums)
            return tf.constant(True)

        # Another optimizer's exchange must wait until this one's is over.
        append_to_graph(lambda: [tf.cond(complete, step_in_branch, lambda: tf.constant(False))])


def _accumulate_in_graph(
    accumulator: GradientAccumulator[Array], gradients: Tensors
) -> tuple[Tensor, list[Tensor]]:
    """Add one backward pass. Returns (whether the step is complete, the sums if it is)."""
    present = [i for i, gradient in enumerate(gradients) if gradient is not None]
    tensors = [gradients[i] for i in present]

    def body(arrays: list[Array]) -> list[Array]:
        totals = accumulator.add(arrays)
        sums = arrays if totals is None else [total for total in totals if total is not None]
        return [np.array(totals is not None), *sums]

    results = call(body, tensors, [tf.bool, *(t.dtype for t in tensors)], [[], *(t.shape for t in tensors)])
    sums = list(gradients)
    for i, result in zip(present, results[1:], strict=True):
        sums[i] = result
    return results[0], sums


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
    process_set: ProcessSet = ALL,
    scale_local_gradients: bool = True,
) -> Any:
    """Return `gradtape` with a `gradient` that exchanges. It may be wrapped inside or after its `with`.

    Args:
        compression: how float32 travels.
        gradient_predivide_factor: f divides by f before the sum and by size / f after it.
        groups: variables that travel together, as lists or as a number of groups to make; None: all of one dtype.
        num_groups: the same, as a number.
        sparse_as_dense: IndexedSlices become dense.
        process_set: the ranks that exchange; other ranks train alone.
        scale_local_gradients: divide the gradients of `register_local_source` by the size of the process set.
        device_dense, device_sparse: not used.

    Raises:
        InvalidInput: an argument is wrong.
    """
    if isinstance(gradtape, _DistributedTape) or not isinstance(gradtape, tf.GradientTape):
        raise InvalidInput(
            f"DistributedGradientTape wraps a tf.GradientTape once; got a {type(gradtape).__name__}."
        )
    reduce = ReduceOptions.from_gradient_args(op, gradient_predivide_factor, process_set, compression)
    wanted = num_groups if groups is None else groups
    options = GradientOptions(reduce, sparse_as_dense, wanted, scale_local_gradients)
    kind = type(type(gradtape).__name__, (_DistributedTape, type(gradtape)), {})
    distributed: Any = object.__new__(kind)
    distributed.__dict__ = gradtape.__dict__
    distributed._options, distributed._local = options, []
    return distributed


def PartialDistributedGradientTape(gradtape: Any, *args: Any, local_layers: Any = None, **kwargs: Any) -> Any:
    """As `DistributedGradientTape`, without an exchange for the variables of `local_layers`, Keras layers."""
    distributed = DistributedGradientTape(gradtape, *args, **kwargs)
    for variable in list_trainable_weights(local_layers):
        distributed.register_local_source(variable)
    return distributed


class _DistributedTape:
    """The methods that `DistributedGradientTape` puts before those of the tape's own class."""

    _options: GradientOptions
    _local: list[Any]  # variables whose gradients are not exchanged

    def register_local_source(self, source: Any) -> None:
        """Do not exchange the gradient of that variable."""
        self._local.append(source)

    @no_autograph
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        use_generic_names: bool = False,
        **how: Any,
    ) -> Any:
        """As the tape's own method, averaged or summed over all ranks. use_generic_names: not used. Raises
        CollectiveError if the exchange, or an operation inside the recorded computation, broke."""
        own = super().gradient(target, sources, output_gradients, **how)  # type: ignore[misc]
        # IndexedSlices are one gradient, not three tensors.
        flat = tf.nest.flatten(own, expand_composites=False)
        shared = exchange_gradients(flat, tf.nest.flatten(sources), self._options, self._local)
        return tf.nest.pack_sequence_as(own, shared, expand_composites=False)

    @no_autograph
    def get_local_and_global_gradients(
        self, target: Any, sources: Any, output_gradients: Any = None, use_generic_names: bool = False
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Return pairs (source, gradient): those of `register_local_source`, and those that were exchanged."""
        gradients = self.gradient(target, sources, output_gradients, use_generic_names)
        own = {_key_of(variable) for variable in self._local}
        pairs = list(zip(sources, gradients, strict=True))
        local = [pair for pair in pairs if _key_of(pair[0]) in own]
        return local, [pair for pair in pairs if _key_of(pair[0]) not in own]
