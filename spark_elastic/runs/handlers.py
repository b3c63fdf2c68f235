"""What a state does with one of its values: Horovod's `StateHandler`, and the handlers that take part in a snapshot.

A handler registry is a list of (type, handler class) pairs; the first pair whose type fits a value handles it. Training
thread only; imports no framework.
"""

from __future__ import annotations

import copy
import pickle
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from spark_elastic.data.horovod_data import ElasticSampler
from spark_elastic.errors import InvalidInput
from spark_elastic.protocol.types import START
from spark_elastic.runs.snapshot import Bytes, SnapshotBuffer, SnapshotBuilder


class StateHandler(ABC):
    """A value that is saved, restored and handed to other workers by methods of its own."""

    source_rank = 0  # whose value the others receive in `sync`, which all ranks call

    def __init__(self, value: Any) -> None:
        self.value = value

    @abstractmethod
    def save(self) -> None:
        """Keep the value as it is now."""

    @abstractmethod
    def restore(self) -> None:
        """Put the value back as it was at the last `save`."""

    @abstractmethod
    def sync(self) -> None:
        """Receive the value of `source_rank`. Collective."""

    def set_value(self, value: Any) -> None:
        """Handle another value from now on."""
        self.value = value
        self.save()

    def reset(self) -> None:  # noqa: B027 - most values do not depend on the world
        """The world changed."""


class SnapshotHandler(StateHandler):
    """A handler whose value is part of the state's one snapshot: complete together with all others, or not at all. Used
    alone, `save` and `restore` work as Horovod's do; `sync` is the state's."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._snapshots = SnapshotBuffer()

    @abstractmethod
    def capture(self, builder: SnapshotBuilder) -> Any:
        """Add large memory to the builder, and return a small picklable tree that shares nothing with the value."""

    @abstractmethod
    def load(self, values: Any, memory: Bytes) -> None:
        """Set the value in place. values: what `capture` returned. memory: later snapshots write over it."""

    def save(self) -> None:
        self._snapshots.begin(START, self.capture)
        self._snapshots.wait()

    def restore(self) -> None:
        snapshot = self._snapshots.wait_for_newest()
        if snapshot is not None:
            self.load(snapshot.values, snapshot.memory)

    def sync(self) -> None:
        """Does nothing: the state hands over its snapshot, which includes this value."""

    def set_value(self, value: Any) -> None:
        self.value = value


class StateDictHandler(SnapshotHandler):
    """Anything small with `state_dict` and `load_state_dict`, such as learning-rate schedulers."""

    def capture(self, builder: SnapshotBuilder) -> Any:
        return copy.deepcopy(self.value.state_dict())

    def load(self, values: Any, memory: Bytes) -> None:
        self.value.load_state_dict(copy.deepcopy(values))


class SamplerStateHandler(StateDictHandler):
    """An `ElasticSampler`. It divides the rest of the epoch anew in every world and in each `sync`."""

    def pack_progress(self) -> bytes:
        """What this rank knows to be processed; b"" if no rank can know of other rows."""
        return pickle.dumps(self.value.state_dict()) if self.value.has_own_progress else b""

    def merge_progress(self, packed: Iterable[bytes]) -> None:
        """Count the rows as processed that any rank knows of. packed: the ranks' progress, from before the state was
        handed over; that of another epoch does not count."""
        known = [pickle.loads(each) for each in packed if each]
        self.value.record_indices(
            row for each in known if each["epoch"] == self.value.epoch for row in each["processed_indices"]
        )
        self.value.reset()

    def sync(self) -> None:
        self.value.reset()

    def reset(self) -> None:
        self.value.reset()


Registry: TypeAlias = Sequence[tuple[type, type[StateHandler]]]

REGISTRY: Registry = ((ElasticSampler, SamplerStateHandler),)


def find_handler(value: object, registry: Registry) -> StateHandler | None:
    """A handler by the registry, or for any object with a state dict; None: the value is a plain one."""
    for kind, handler in registry:
        if isinstance(value, kind):
            return handler(value)
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        return StateDictHandler(value)
    return None


# ---- variables of TensorFlow and Keras: anything with a value and `assign()`


@runtime_checkable
class LikeKerasModel(Protocol):
    """Tells a Keras model from other values."""

    @property
    def metrics_variables(self) -> Any: ...

    @property
    def trainable_variables(self) -> Any: ...


@runtime_checkable
class LikeKerasOptimizer(Protocol):
    """Tells an optimizer of Keras 3 from other values."""

    @property
    def iterations(self) -> Any: ...

    def apply_gradients(self, grads_and_vars: Any) -> Any: ...


class VariablesHandler(SnapshotHandler):
    """A list of variables. They are matched by order, since their names depend on what else a process has made."""

    def variables(self) -> Sequence[Any]:
        """The variables as they are now, in an order that is the same on all workers."""
        return list(self.value)

    def capture(self, builder: SnapshotBuilder) -> Any:
        return [builder.add_array(to_array(variable)) for variable in self.variables()]

    def load(self, values: Any, memory: Bytes) -> None:
        live = self.variables()
        mine = [tuple(variable.shape) for variable in live]
        theirs = [ref.shape for ref in values]
        if mine != theirs:
            pairs = enumerate(zip(mine, theirs, strict=False))
            odd = [f"number {number} is of another shape" for number, (own, other) in pairs if own != other]
            difference = odd[0] if odd else f"{len(mine)} here and {len(theirs)} there"
            raise InvalidInput(
                f"the workers' variables differ ({difference}): build the same model and optimizer on each, before the "
                "state."
            )
        for variable, ref in zip(live, values, strict=True):
            variable.assign(ref.of(memory))


class KerasModelHandler(VariablesHandler):
    """Weights and random generators of a Keras model, without its metrics, which belong to the epoch under way."""

    def variables(self) -> Sequence[Any]:
        metrics = {id(variable) for variable in self.value.metrics_variables}
        return [variable for variable in self.value.variables if id(variable) not in metrics]


class KerasOptimizerHandler(VariablesHandler):
    """Slot variables, learning rate and step count of a Keras optimizer, which must be built."""

    def variables(self) -> Sequence[Any]:
        return list(self.value.variables)


def unwrap_variable(variable: Any) -> Any:
    """The tf.Variable or torch tensor that a Keras variable stands for; any other variable itself."""
    inner = getattr(variable, "value", None)
    return variable if inner is None or callable(inner) else inner  # a tf.Variable has a method of that name


def list_trainable_weights(layers: Any) -> list[Any]:
    """The trainable variables of one Keras layer, of several, or of None."""
    given = list(layers) if isinstance(layers, list | tuple | set) else [layers]
    return [variable for layer in given if layer is not None for variable in layer.trainable_weights]


def to_array(variable: Any) -> npt.NDArray[Any]:
    """The value of a variable, not to be written to; torch's bfloat16, which numpy does not know, as float32."""
    inner = unwrap_variable(variable)
    if hasattr(inner, "detach"):
        inner = inner.detach().cpu()
        inner = inner.float() if str(inner.dtype) == "torch.bfloat16" else inner
    return np.asarray(inner.numpy())
