"""A state of named values with one atomic snapshot over all of them: Horovod's `ObjectState`, without its rollbacks.

What is restored, and what is handed over, is always one version of everything. Training thread only.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from elastic_collectives import Group
from spark_elastic.errors import InvalidInput
from spark_elastic.protocol.types import Checkpoint
from spark_elastic.state.commit import Snapshot, SnapshotBuffer, SnapshotBuilder
from spark_elastic.state.durable_commits import DurableCommits
from spark_elastic.state.handlers import REGISTRY, Registry, SnapshotHandler, StateHandler, handler_for
from spark_elastic.state.handover import hand_over, pickled
from spark_elastic.state.state import State, WorkerSession
from spark_elastic.state.variables import (
    KerasModelHandler,
    KerasOptimizerHandler,
    LikeKerasModel,
    LikeKerasOptimizer,
)


class ObjectState(State):
    """Values by name, as attributes: `state = ObjectState(epoch=0, sampler=sampler)`, then `state.epoch += 1`.

    Values that no handler knows must pickle. Setting the attribute of a handled value has it handle the new one.
    """

    registry: Registry = REGISTRY
    # For a `sync` outside of the run loop.
    get_group: Callable[[], Group | None] = staticmethod(lambda: None)

    def __init__(self, bcast_object: object = None, get_rank: object = None, **values: Any) -> None:
        self._handlers: dict[str, StateHandler] = {}
        self._plain: list[str] = []
        super().__init__()
        self._commits = SnapshotBuffer()
        for name, value in values.items():
            self._add(name, value)
        self.save_again()
        self._commits.wait()  # a checkpoint may be loaded next, and there is no version to fall back to yet

    def _add(self, name: str, value: Any) -> None:
        if name.startswith("_") or hasattr(type(self), name):
            raise InvalidInput(f"a state cannot hold a value named {name!r}: choose another name.")
        handler = handler_for(value, self.registry)
        if handler is None:
            self._plain.append(name)
        else:
            self._handlers[name] = handler
        object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        handler = (
            None if name.startswith("_") else self._handlers.get(name)
        )  # private ones come before handlers
        if handler is not None and value is not handler.value:
            handler.set_value(value)
        object.__setattr__(self, name, value)

    def save(self) -> None:
        """Keep one version of everything; large values are copied in the background. Counts as a commit."""
        self._number += 1
        self.save_again()
        self._tell()

    def count_save(self) -> None:
        session = self._session
        if session is not None and session.durable is not None:
            session.durable.begun()
            if session.group.rank == 0:
                session.durable.committed(session.world.fence, self._commits.newest())
        self.save()

    def save_again(self) -> None:
        for handler in self._custom():
            handler.save()
        self._commits.take(self._number, self._capture)

    def restore(self) -> None:
        """Put everything back to the newest complete version."""
        kept = self._commits.newest()
        assert kept is not None
        self._load(kept)
        for handler in self._custom():
            handler.restore()
        self._number = kept.version
        self._tell()

    def sync(self) -> None:
        """Take over the live state of `source_rank`, verified before anything changes (R5), and save it."""
        group = self.get_group() if self._session is None else self._session.group
        # Those come first: who breaks there has not taken over the rest, and claims nothing.
        self._sync_each(self._custom())
        # Elsewhere it would pass for the state that is to come.
        if group is None or group.rank == self.source_rank:
            self._commits.take(self._number, self._capture)
        arrived = None if group is None else hand_over(group, self._commits, self.source_rank)
        if arrived is not None:
            self._commits.adopt(arrived)
            self._load(arrived)
            self._number = arrived.version
        self._sync_each(self._pictured().values())

    def _sync_each(self, handlers: Iterable[StateHandler]) -> None:
        for handler in handlers:
            handler.source_rank = self.source_rank
            handler.sync()

    def attach(self, session: WorkerSession | None) -> None:
        own = [name for name, h in self._handlers.items() if not isinstance(h, SnapshotHandler)]
        if session is not None and session.durable is not None and own:
            raise InvalidInput(
                f"run_id= makes a state durable as one picture, and the handler of {own[0]!r} takes no part in it: "
                "have it be a SnapshotHandler, or leave run_id out."
            )
        super().attach(session)

    def resume(self, durable: DurableCommits, candidates: Sequence[Checkpoint]) -> None:
        kept = durable.restore(candidates)
        if not self._is_mine(kept):
            raise InvalidInput(
                "the run's checkpoints are of a state of other names: make the same one, or use another run_id."
            )
        self._commits.wait()
        self._load(kept)
        self._number = kept.version

    def make_durable(self, durable: DurableCommits) -> None:
        assert self._session is not None
        durable.finish(self._session.world.fence, self._commits.newest())

    def reset(self) -> None:
        for handler in self._handlers.values():
            handler.reset()

    def take_from(self, other: State) -> None:
        kept = other._commits.newest() if isinstance(other, ObjectState) else None
        if kept is None or not self._is_mine(kept):
            raise InvalidInput(
                "the function made a state of other names than when it was called before: make the same one each time."
            )
        self._commits.adopt(kept)
        self.restore()

    def _is_mine(self, kept: Snapshot) -> bool:
        return set(kept.picture) == {"", *self._pictured()}

    def _custom(self) -> list[StateHandler]:
        return [handler for handler in self._handlers.values() if not isinstance(handler, SnapshotHandler)]

    def _pictured(self) -> dict[str, SnapshotHandler]:
        return {name: h for name, h in self._handlers.items() if isinstance(h, SnapshotHandler)}

    def _capture(self, tray: SnapshotBuilder) -> dict[str, Any]:
        picture: dict[str, Any] = {name: h.capture(tray) for name, h in self._pictured().items()}
        picture[""] = self._pickled()
        return picture

    def _pickled(self) -> bytes:
        values = {name: getattr(self, name) for name in self._plain}
        try:
            return pickled(values)
        except Exception as error:  # objects raise anything when they are asked for their state
            raise InvalidInput(
                f"a value of the state cannot be pickled ({error}): keep it outside."
            ) from error

    def _load(self, kept: Snapshot) -> None:
        for name, handler in self._pictured().items():
            handler.load(kept.picture[name], kept.memory)
        for name, value in pickle.loads(kept.picture[""]).items():
            object.__setattr__(self, name, value)


# The state of a Keras model and its optimizer, of whatever backend. Training thread only; imports no framework.


class KerasState(ObjectState):
    """A Keras model, its optimizer and plain values by name, all parts of one snapshot.

    model: built. optimizer: None takes the one that the model was compiled with. Further models and built optimizers
    may be among the values.

    Raises:
        InvalidInput: there is no optimizer, or the model is not built.
    """

    registry: Registry = (
        (LikeKerasModel, KerasModelHandler),
        (LikeKerasOptimizer, KerasOptimizerHandler),
        *REGISTRY,
    )

    def __init__(self, model: Any, optimizer: Any = None, **values: Any) -> None:
        optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
        if optimizer is None:
            raise InvalidInput(f"{type(self).__name__} needs an optimizer: pass one, or compile the model.")
        if not model.built:
            raise InvalidInput(
                "the model is not built: call it on a batch, or model.build(input_shape), before its state is made."
            )
        if not optimizer.built:  # a newcomer must have its slots before it takes those of others
            optimizer.build(model.trainable_variables)
        super().__init__(model=model, optimizer=optimizer, **values)
