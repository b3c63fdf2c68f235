"""`DistributedOptimizer` and `load_model` for Keras 3 on TensorFlow or torch. Training thread only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import keras

from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.process_sets import ALL, ProcessSet, is_single_process
from spark_elastic.gradients.reduction import Adasum, Average, ReduceOp, ReduceOptions
from spark_elastic.horovod.ops.distributed_optimizer import (
    GradientOptions,
    OptimizerExchange,
    WrappedOptimizer,
    register_local_layers,
    wrap_optimizer,
)

Plain = TypeVar("Plain")


def DistributedOptimizer(  # noqa: PLR0913 - name and arguments are those of horovod.keras
    optimizer: Plain,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = ALL,
    scale_local_gradients: bool = True,
) -> Plain:
    """Return `optimizer` with exchanged gradients: of the same class, with the same variables and settings.

    For the arguments see `spark_elastic.tensorflow.DistributedOptimizer`, which has them in another order. name,
    device_dense, device_sparse: not used. On the torch backend sparse_as_dense, num_groups and groups have no effect
    either, since gradients are dense and travel as one operation per dtype; op is Average or Sum.

    Raises:
        InvalidInput: an argument is wrong, or Keras runs on another backend.
    """
    reduce = ReduceOptions.from_gradient_args(op, gradient_predivide_factor, process_set, compression)
    wanted = num_groups if groups is None else groups
    options = GradientOptions(reduce, sparse_as_dense, wanted, scale_local_gradients)
    passes, average, backend = backward_passes_per_step, average_aggregated_gradients, keras.backend.backend()
    kind: type[OptimizerExchange[Any]] = TorchExchange
    if backend == "tensorflow":
        from spark_elastic.horovod.tensorflow.optimizer import TensorFlowExchange

        kind = TensorFlowExchange
    elif backend != "torch":
        raise InvalidInput(
            f"Keras runs on {backend} here: set KERAS_BACKEND to tensorflow or torch before importing it."
        )
    return wrap_optimizer(optimizer, lambda: kind(options, passes, average), keras.utils)


def PartialDistributedOptimizer(
    optimizer: Plain, *args: Any, local_layers: Any = None, **kwargs: Any
) -> Plain:
    """As `DistributedOptimizer`, without an exchange for the variables of `local_layers`, Keras layers."""
    return register_local_layers(DistributedOptimizer(optimizer, *args, **kwargs), local_layers)


def load_model(
    filepath: Any,
    custom_optimizers: list[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = None,
    legacy_opts: bool = False,
) -> Any:
    """Load a model as `keras.models.load_model` does, with its optimizer in its saved state and distributed again.
    custom_optimizers: classes of optimizers that Keras does not know. legacy_opts: not used. An optimizer that
    `custom_objects` makes a distributed one stays as it is."""
    known = {kind.__name__: kind for kind in custom_optimizers or []}
    model = keras.models.load_model(filepath, custom_objects={**known, **(custom_objects or {})})
    if model.optimizer is not None and not isinstance(model.optimizer, WrappedOptimizer):
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression)
    return model


class TorchExchange(OptimizerExchange[Any]):
    """Of the torch backend: one operation per dtype."""

    kind = WrappedOptimizer

    def __init__(self, options: GradientOptions, passes: int, average: bool) -> None:
        from spark_elastic.horovod.torch.operations import start

        if options.reduce.op is Adasum:
            raise InvalidInput(f"on the torch backend of Keras op must be Average or Sum; got {Adasum!r}.")
        super().__init__(options, passes, average)
        self._start = start

    @staticmethod
    def copy(gradients: Sequence[Any]) -> list[Any]:
        return [gradient.clone() for gradient in gradients]

    def exchange(self, gradients: list[Any], variables: Sequence[Any]) -> list[Any]:
        results, reduce = list(gradients), self.options.reduce
        if is_single_process(reduce.process_set):
            return results
        local = {id(variable) for variable in self.local}
        by_dtype: dict[Any, list[int]] = {}
        for i, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            if gradient is None:
                continue
            if id(variable) not in local:
                by_dtype.setdefault(gradient.dtype, []).append(i)
            elif self.options.scale_local:
                results[i] = gradient / reduce.process_set.size()
        for indices in by_dtype.values():
            dense = [gradients[i].detach() for i in indices]
            reduced = self._start(dense, None, reduce, in_place=False, awaited=True)()
            for i, result in zip(indices, reduced, strict=True):
                results[i] = result
        return results

    def add_pass(self, gradients: list[Any], step: Callable[[list[Any]], None]) -> None:
        sums = self.accumulator.add([None if g is None else g.detach() for g in gradients])
        if sums is not None:
            step(sums)
