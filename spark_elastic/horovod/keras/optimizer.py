"""`DistributedOptimizer` and `load_model` for Keras 3 on TensorFlow or torch. Training thread only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import keras

from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.process_sets import ProcessSet, global_process_set
from spark_elastic.gradients.reduction import Average, ReduceOp
from spark_elastic.horovod.ops.distributed_optimizer import WrappedOptimizer
from spark_elastic.runs.handlers import list_trainable_weights

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
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Plain:
    """Return `optimizer` with exchanged gradients: of the same class, with the same variables and settings.

    For the arguments see `spark_elastic.tensorflow.DistributedOptimizer`, which has them in another order. name,
    device_dense, device_sparse: not used. On the torch backend sparse_as_dense, num_groups and groups have no effect
    either, since gradients are dense and travel as one operation per dtype; op is Average or Sum.

    Raises:
        InvalidInput: an argument is wrong, or Keras runs on another backend.
    """
    arguments: dict[str, Any] = {
        "compression": compression,
        "backward_passes_per_step": backward_passes_per_step,
        "op": op,
        "gradient_predivide_factor": gradient_predivide_factor,
        "average_aggregated_gradients": average_aggregated_gradients,
        "process_set": process_set,
        "scale_local_gradients": scale_local_gradients,
    }
    if keras.backend.backend() == "tensorflow":
        arguments.update(sparse_as_dense=sparse_as_dense, num_groups=num_groups, groups=groups)
    return _import_for_backend("DistributedOptimizer")(optimizer, **arguments)  # type: ignore[no-any-return]


def PartialDistributedOptimizer(
    optimizer: Plain, *args: Any, local_layers: Any = None, **kwargs: Any
) -> Plain:
    """As `DistributedOptimizer`, without an exchange for the variables of `local_layers`, Keras layers."""
    distributed: Any = DistributedOptimizer(optimizer, *args, **kwargs)
    for variable in list_trainable_weights(local_layers):
        distributed.register_local_var(variable)
    wrapped: Plain = distributed
    return wrapped


def load_model(
    filepath: Any,
    custom_optimizers: list[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = None,
    legacy_opts: bool = False,
) -> Any:
    """Load a model as `keras.models.load_model` does, with its optimizer in its saved state and distributed again.

    custom_optimizers: classes of optimizers that Keras does not know. legacy_opts: not used. An optimizer that
    `custom_objects` makes a distributed one stays as it is.
    """
    known = {kind.__name__: kind for kind in custom_optimizers or []}
    model = keras.models.load_model(filepath, custom_objects={**known, **(custom_objects or {})})
    if model.optimizer is not None and not isinstance(model.optimizer, WrappedOptimizer):
        model.optimizer = DistributedOptimizer(model.optimizer, compression=compression)
    return model


def _import_for_backend(name: str) -> Callable[..., Any]:
    backend = keras.backend.backend()
    if backend == "tensorflow":
        from spark_elastic.horovod.tensorflow import optimizer as of_tensorflow

        return getattr(of_tensorflow, name)  # type: ignore[no-any-return]
    if backend == "torch":
        from spark_elastic.horovod.keras import torch_optimizer

        return getattr(torch_optimizer, name)  # type: ignore[no-any-return]
    raise InvalidInput(
        f"Keras runs on {backend} here: set KERAS_BACKEND to tensorflow or torch before importing it."
    )
