"""Operations on values and variables of Keras, whatever its backend, for example for metrics. Training thread only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt

from spark_elastic.gradients.process_sets import ALL, ProcessSet
from spark_elastic.gradients.reduction import Average, ReduceOp, ReduceOptions
from spark_elastic.horovod.ops import operations
from spark_elastic.runs.handlers import to_array


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ReduceOp | None = None,
    compression: Any = None,
) -> npt.NDArray[Any]:
    """Return the average (default) or another reduction of all ranks' values: numbers, arrays or tensors. compression:
    not used; values travel as they are."""
    mine = _copy(value)
    scale = prescale_factor, postscale_factor
    operations.allreduce_arrays([mine], name, ReduceOptions.from_args(average, op, scale, ALL))
    return mine


def allgather(value: Any, name: str | None = None) -> npt.NDArray[Any]:
    """Concatenate all ranks' values along dimension 0, in which they may differ."""
    mine = _copy(value)
    return operations.allgather_arrays([np.atleast_1d(mine)], name)[0]


def broadcast(value: Any, root_rank: int, name: str | None = None) -> npt.NDArray[Any]:
    """Return the value of rank `root_rank`."""
    mine = _copy(value)
    operations.broadcast_arrays([mine], root_rank, name)
    return mine


def reducescatter(value: Any, name: str | None = None, op: ReduceOp = Average) -> npt.NDArray[Any]:
    """Return this rank's part of the reduced value, cut along dimension 0."""
    return operations.reducescatter_arrays([_copy(value)], name, ReduceOptions(op))[0]


def broadcast_variables(variables: Sequence[Any], root_rank: int, process_set: ProcessSet = ALL) -> None:
    """Overwrite variables with those of `root_rank`."""
    values = [np.array(to_array(variable), order="C") for variable in variables]
    if values:
        operations.broadcast_arrays(values, root_rank, "variables", process_set)
    for variable, array in zip(variables, values, strict=True):
        variable.assign(array)


def broadcast_global_variables(root_rank: int) -> None:
    """Refuse: global variables belong to graphs of TensorFlow 1, which Keras 3 does not have.

    Raises:
        RuntimeError: always, as in Horovod's eager mode; it says what to use instead.
    """
    raise RuntimeError(
        "Keras 3 has no global variables: give broadcast_variables the model's and the optimizer's variables, or use "
        "callbacks.BroadcastGlobalVariablesCallback."
    )


def _copy(value: Any) -> npt.NDArray[Any]:
    return np.array(keras.ops.convert_to_numpy(value) if keras.ops.is_tensor(value) else value, order="C")
