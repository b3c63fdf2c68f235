"""When a training makes its state durable, and how the state becomes bytes and comes back.

Rank 0 copies its state after a step that is due, and hands the copy to the writer once the next exchange of the same
world is complete, or the epoch's barrier: only then the step is sealed (R1), that is part of the history of every
survivor. The copying is the training thread's, everything else the writer's.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping
from types import CodeType, FunctionType
from typing import Any

from spark_elastic.clock import Clock
from spark_elastic.data.store import Store
from spark_elastic.protocol.types import Checkpoint, Fence, Position
from spark_elastic.state.checkpoint import CheckpointPolicy, CheckpointStore, CheckpointWriter, Schedule
from spark_elastic.training.trainer import Objects, TrainingState


class Checkpointing:
    """The checkpoints of one training process. tell: tells the driver which were written."""

    def __init__(
        self, store: Store, policy: CheckpointPolicy, clock: Clock, tell: Callable[[Checkpoint], object]
    ) -> None:
        self._schedule = Schedule(policy, clock)
        self._clock = clock
        self.seconds = 0.0  # for which copying held up the training thread
        self._writer = CheckpointWriter(CheckpointStore(store, policy.run_id), tell)
        self._copied: tuple[Position, Callable[[], Objects]] | None = None

    def applied(self, state: TrainingState) -> None:
        """A step was applied; copies the state where a checkpoint is due."""
        if self._schedule.step():
            began = self._clock.now()
            self._copied = state.position, state.copied()
            self.seconds += self._clock.now() - began

    def sealed(self, fence: Fence) -> None:
        """The step that was copied is part of the history: hand the copy to the writer."""
        copied, self._copied = self._copied, None
        if copied is not None:
            self._writer.offer(fence, *copied)

    def finish(self, fence: Fence, state: TrainingState) -> None:
        """All ranks stop here for good: the state is durable when this returns."""
        self._copied = state.position, state.copied()
        self.sealed(fence)
        self._writer.flush()

    def unsealed(self) -> None:
        """The world broke before the step was surely history: drop the copy."""
        self._copied = None

    def close(self) -> None:
        self._writer.close()


def restore(store: Store, run_id: str, candidates: tuple[Checkpoint, ...], state: TrainingState) -> None:
    """Take over the first of the candidates that is whole.

    Raises:
        StoreError: none of them is.
    """
    _, objects = CheckpointStore(store, run_id).read_newest(candidates)
    state.restore(objects)


# What a thing of the user's is, as text that is the same in every process: what a run is bound to (R19).
#
# Plain values, functions by their code, what they close over and the numbers of their module that they name, other
# objects by class. Neither addresses, names of modules (a script is `__main__` in one process and not in another) nor
# line numbers. Values; any thread.


WEIGHTS = "initial weights"  # the entry of an identity that may differ: a model need not be seeded
PLAIN = (bool, int, float, complex, str, bytes, type(None))


def digest(thing: Any) -> str:
    """16 hex digits of `text`, for equality."""
    return hashlib.sha256(text(thing).encode()).hexdigest()[:16]


def text(thing: Any) -> str:
    """Equal for things that do the same; of an object without plain form, its class and its numbers."""
    if isinstance(thing, PLAIN):
        return repr(thing)
    if isinstance(thing, Mapping):
        return f"{{{', '.join(f'{key}: {text(thing[key])}' for key in sorted(thing, key=str))}}}"
    if isinstance(thing, list | tuple):
        return f"[{', '.join(map(text, thing))}]"
    if isinstance(thing, CodeType):
        return f"code {thing.co_code.hex()} {thing.co_names} {text(thing.co_consts)}"
    if isinstance(thing, FunctionType):
        held = [_content(cell) for cell in thing.__closure__ or ()]
        numbers = _globals(thing.__code__, thing.__globals__)
        also = f" {text(numbers)}" if numbers else ""
        return f"function {text(thing.__code__)} {text(thing.__defaults__)} {text(held)}{also}"
    if isinstance(thing, functools.partial):
        return f"partial {text(thing.func)} {text(thing.args)} {text(thing.keywords)}"
    if callable(thing) and hasattr(thing, "__name__"):
        return f"named {thing.__name__}"
    numbers = {name: value for name, value in getattr(thing, "__dict__", {}).items() if _is_number(value)}
    return f"{type(thing).__name__} {text(numbers)}"


def _globals(code: CodeType, known: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers of its module that a function, or one within it, speaks of; a string may be a folder's name."""
    found = {name: known[name] for name in code.co_names if _is_number(known.get(name))}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found |= _globals(inner, known)
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float)


def _content(cell: Any) -> Any:
    """What a closure holds; a function that holds itself would have no end."""
    try:
        held = cell.cell_contents
    except ValueError:  # not filled yet
        return None
    return held if isinstance(held, PLAIN) else type(held).__name__
