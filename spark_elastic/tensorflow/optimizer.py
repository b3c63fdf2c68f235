"""`DistributedOptimizer`: a Keras optimizer that exchanges gradients before it applies them. Training thread only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import tensorflow as tf

from spark_elastic.errors import InvalidInput
from spark_elastic.ops.process_sets import ProcessSet, global_process_set
from spark_elastic.ops.reduce_op import Average, ReduceOp
from spark_elastic.ops.reduction import How
from spark_elastic.ops.wrapped_optimizer import WrappedOptimizer, exchange_of, wrapped
from spark_elastic.state.variables import weights_of
from spark_elastic.tensorflow.calls import unconverted
from spark_elastic.tensorflow.compression import Compression
from spark_elastic.tensorflow.gradients import Terms, dense, exchanged
from spark_elastic.tensorflow.passes import Passes

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
    how = How.asked_of_gradients(op, gradient_predivide_factor, process_set, compression)

    def made() -> tuple[Terms, Passes]:
        terms = Terms(how, sparse_as_dense, num_groups if groups is None else groups, scale_local_gradients)
        return terms, Passes(backward_passes_per_step, average_aggregated_gradients)

    distributed: Plain = wrapped(optimizer, _Distributed, made, tf.keras.utils)
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
        exchange_of(self)[0].local.append(var)

    @unconverted
    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Exchange, and apply.

        Raises:
            CollectiveError: the exchange broke; no variable was changed. In a graph: see `elastic.run`.
        """
        own: Any = super()
        this: Any = self
        terms, passes = exchange_of(self)
        variables = list(this._trainable_variables if trainable_variables is None else trainable_variables)
        given = list(grads)
        if passes.count == 1:
            own.apply(exchanged(given, variables, terms), trainable_variables)
            return
        if not this.built:  # not inside of the branch below
            this.build(variables)
        complete, summed = passes.add([dense(gradient) for gradient in given], terms.how.process_set)

        def step() -> Any:
            own.apply(exchanged(summed, variables, terms), trainable_variables)
            return tf.constant(True)

        tf.cond(complete, step, lambda: tf.constant(False))
