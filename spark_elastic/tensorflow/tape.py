"""`DistributedGradientTape`: a tf.GradientTape whose gradients are those of all ranks. Training thread only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from spark_elastic.errors import InvalidInput
from spark_elastic.ops.process_sets import ProcessSet, global_process_set
from spark_elastic.ops.reduce_op import Average, ReduceOp
from spark_elastic.ops.reduction import How
from spark_elastic.state.variables import weights_of
from spark_elastic.tensorflow.calls import unconverted
from spark_elastic.tensorflow.compression import Compression
from spark_elastic.tensorflow.gradients import Terms, exchanged


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
    if isinstance(gradtape, _Distributed) or not isinstance(gradtape, tf.GradientTape):
        raise InvalidInput(
            f"DistributedGradientTape wraps a tf.GradientTape once; got a {type(gradtape).__name__}."
        )
    how = How.asked_of_gradients(op, gradient_predivide_factor, process_set, compression)
    terms = Terms(how, sparse_as_dense, num_groups if groups is None else groups, scale_local_gradients)
    kind = type(type(gradtape).__name__, (_Distributed, type(gradtape)), {})
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


class _Distributed:
    """What is added to the tape's own class."""

    _terms: Terms

    def register_local_source(self, source: Any) -> None:
        """The gradient of that variable is not exchanged."""
        self._terms.local.append(source)

    @unconverted
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
        shared = exchanged(flat, tf.nest.flatten(sources), self._terms)
        return tf.nest.pack_sequence_as(own, shared, expand_composites=False)
