"""What a state does with one of its values: Horovod's `StateHandler`, and the kind that takes part in one snapshot.

A handler registry is a list of (type, handler class) pairs; the first that fits a value handles it.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeAlias

from spark_elastic.data.sampler import ElasticSampler
from spark_elastic.state.commit import Bytes, SnapshotBuffer, SnapshotBuilder


class StateHandler(ABC):
    """A value that is saved, restored and handed to other workers by methods of its own.

    `source_rank` is the rank whose value the others take in `sync`, which all ranks call; it need not be 0.
    """

    source_rank = 0

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
        """Take over the value of `source_rank`. Collective."""

    def set_value(self, value: Any) -> None:
        """Handle another value from now on."""
        self.value = value
        self.save()

    def reset(self) -> None:  # noqa: B027 - most values do not depend on the world
        """The world changed."""


class SnapshotHandler(StateHandler):
    """A handler whose value is part of the state's one snapshot: complete together with all others, or not at all.

    By itself, `save` and `restore` work as Horovod's do; `sync` is the state's.
    """

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._commits = SnapshotBuffer()

    @abstractmethod
    def capture(self, tray: SnapshotBuilder) -> Any:
        """A small picklable picture that shares nothing with the value; what is large goes on the tray."""

    @abstractmethod
    def load(self, picture: Any, memory: Bytes) -> None:
        """Make the value what it was, in place."""

    def save(self) -> None:
        self._commits.take(0, self.capture)
        self._commits.wait()

    def restore(self) -> None:
        kept = self._commits.newest()
        if kept is not None:
            self.load(kept.picture, kept.memory)

    def sync(self) -> None:
        """Does nothing: the state hands over its snapshot, of which this value is a part."""

    def set_value(self, value: Any) -> None:
        self.value = value


class StateDictHandler(SnapshotHandler):
    """Anything small with `state_dict` and `load_state_dict`: learning-rate schedulers and their like."""

    def capture(self, tray: SnapshotBuilder) -> Any:
        return copy.deepcopy(self.value.state_dict())

    def load(self, picture: Any, memory: Bytes) -> None:
        self.value.load_state_dict(copy.deepcopy(picture))


class SamplerStateHandler(StateDictHandler):
    """An `ElasticSampler`; divides what is left of the epoch anew in every world, synced or not, and in each `sync`."""

    def sync(self) -> None:
        self.value.reset()

    def reset(self) -> None:
        self.value.reset()


Registry: TypeAlias = Sequence[tuple[type, type[StateHandler]]]

REGISTRY: Registry = ((ElasticSampler, SamplerStateHandler),)


def handler_for(value: object, registry: Registry) -> StateHandler | None:
    """A handler by the registry, or for any object with a state dict; None: a plain value."""
    for kind, handler in registry:
        if isinstance(value, kind):
            return handler(value)
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        return StateDictHandler(value)
    return None
