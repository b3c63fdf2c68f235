"""Variables of TensorFlow and Keras as part of a state's snapshot: whatever has a value and `assign()`.

They are matched by their order, since their names depend on what else a process has made. Training thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from spark_elastic.errors import InvalidInput
from spark_elastic.state.commit import Bytes, Place, SnapshotBuilder
from spark_elastic.state.handlers import SnapshotHandler


class _Frozen(NamedTuple):
    """A variable in a snapshot."""

    place: Place
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


@runtime_checkable
class LikeKerasModel(Protocol):
    """What tells a Keras model from other values."""

    @property
    def metrics_variables(self) -> Any: ...

    @property
    def trainable_variables(self) -> Any: ...


@runtime_checkable
class LikeKerasOptimizer(Protocol):
    """What tells an optimizer of Keras 3 from other values."""

    @property
    def iterations(self) -> Any: ...

    def apply_gradients(self, grads_and_vars: Any) -> Any: ...


class VariablesHandler(SnapshotHandler):
    """A list of variables."""

    def variables(self) -> Sequence[Any]:
        """Those there are now, in an order that is the same on all workers."""
        return list(self.value)

    def capture(self, tray: SnapshotBuilder) -> Any:
        return [_freeze(array_of(variable), tray) for variable in self.variables()]

    def load(self, picture: Any, memory: Bytes) -> None:
        live = self.variables()
        mine = [tuple(variable.shape) for variable in live]
        theirs = [frozen.shape for frozen in picture]
        if mine != theirs:
            odd = next(
                (i for i, pair in enumerate(zip(mine, theirs, strict=False)) if pair[0] != pair[1]), None
            )
            said = (
                f"{len(mine)} here and {len(theirs)} there"
                if odd is None
                else f"number {odd} is of another shape"
            )
            raise InvalidInput(
                f"the workers' variables differ ({said}): build the same model and optimizer on each, before the state."
            )
        for variable, frozen in zip(live, picture, strict=True):
            variable.assign(_array(frozen, memory))


class KerasModelHandler(VariablesHandler):
    """Weights and states of random generators of a Keras model; not its metrics, which are of an epoch under way."""

    def variables(self) -> Sequence[Any]:
        metrics = {id(variable) for variable in self.value.metrics_variables}
        return [variable for variable in self.value.variables if id(variable) not in metrics]


class KerasOptimizerHandler(VariablesHandler):
    """Slots, learning rate and count of steps of a Keras optimizer, which must be built."""

    def variables(self) -> Sequence[Any]:
        return list(self.value.variables)


def plain(variable: Any) -> Any:
    """The tf.Variable or torch tensor that a Keras variable stands for; any other variable itself."""
    inner = getattr(variable, "value", None)
    return variable if inner is None or callable(inner) else inner  # a tf.Variable has a method of that name


def weights_of(layers: Any) -> list[Any]:
    """The trainable variables of one Keras layer, of several, or of None."""
    given = list(layers) if isinstance(layers, list | tuple | set) else [layers]
    return [variable for layer in given if layer is not None for variable in layer.trainable_weights]


def array_of(variable: Any) -> npt.NDArray[Any]:
    """Its value, not to be written to; float32 for torch's bfloat16, which numpy does not know."""
    inner = plain(variable)
    if hasattr(inner, "detach"):
        inner = inner.detach().cpu()
        inner = inner.float() if str(inner.dtype) == "torch.bfloat16" else inner
    return np.asarray(inner.numpy())


def _freeze(array: npt.NDArray[Any], tray: SnapshotBuilder) -> _Frozen:
    flat = np.ascontiguousarray(array).reshape(-1)
    return _Frozen(tray.put(flat.view(np.uint8)), array.dtype, array.shape)


def _array(frozen: _Frozen, memory: Bytes) -> npt.NDArray[Any]:
    offset, nbytes = frozen.place
    return memory[offset : offset + nbytes].view(frozen.dtype).reshape(frozen.shape)
