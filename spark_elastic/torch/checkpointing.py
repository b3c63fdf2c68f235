"""When a training makes its state durable, and how the state becomes bytes and comes back.

Rank 0 copies its state behind a step that is due, and hands the copy to the writer once the next exchange of the same
world is complete, or the epoch's barrier: only then the step is sealed (R1), that is part of the history of every
survivor. The copying is the training thread's, everything else the writer's. Bytes are torch's own format, which is
read without unpickling anything but tensors and plain values.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from spark_elastic.clock import Clock
from spark_elastic.data.store import Store
from spark_elastic.protocol.types import Checkpoint, Fence, Phase, Position
from spark_elastic.state.checkpoint import Checkpoints
from spark_elastic.state.checkpoint_writer import CheckpointWriter
from spark_elastic.state.schedule import CheckpointPolicy, Schedule
from spark_elastic.torch.torch_state import TorchState

PART = "state.pt"


class Checkpointing:
    """Of one training process. tell: hands what was written to the driver."""

    def __init__(
        self, store: Store, policy: CheckpointPolicy, clock: Clock, tell: Callable[[Checkpoint], object]
    ) -> None:
        self._schedule = Schedule(policy, clock)
        self._clock = clock
        self.seconds = 0.0  # for which copying held up the training thread
        self._writer = CheckpointWriter(Checkpoints(store, policy.run_id), tell)
        self._copied: tuple[Position, dict[str, Any]] | None = None

    def applied(self, state: TorchState) -> None:
        """A step was applied; copies the state where a checkpoint is due."""
        if self._schedule.step():
            began = self._clock.now()
            self._copied = state.position, copy.deepcopy(state.capture())
            self.seconds += self._clock.now() - began

    def sealed(self, fence: Fence) -> None:
        """What was copied is history."""
        copied, self._copied = self._copied, None
        if copied is not None:
            position, captured = copied
            self._writer.offer(fence, position, lambda: {PART: dumps(captured)})

    def finish(self, fence: Fence, state: TorchState) -> None:
        """All ranks stop here for good: the state is durable when this returns."""
        self._copied = state.position, copy.deepcopy(state.capture())
        self.sealed(fence)
        self._writer.flush()

    def unsealed(self) -> None:
        """The world broke before anybody could know."""
        self._copied = None

    def close(self) -> None:
        self._writer.close()


def restore(store: Store, run_id: str, candidates: tuple[Checkpoint, ...], state: TorchState) -> Position:
    """Take over the first of the candidates that is whole.

    Raises:
        StoreError: none of them is.
    """
    _, parts = Checkpoints(store, run_id).read_newest(candidates)
    state.load(loads(parts[PART]))
    return state.position


def dumps(captured: Mapping[str, Any]) -> bytes:
    """What `TorchState.capture` gives, as bytes."""
    position, rng = captured["position"], captured["rng"]
    kind, words, *rest = rng["numpy"]
    plain = {
        **captured,
        "position": [position.epoch, position.phase.value, position.step],
        "rng": {**rng, "numpy": [kind, torch.from_numpy(words.astype(np.int64)), *rest]},
    }
    buffer = io.BytesIO()
    torch.save(plain, buffer)
    return buffer.getvalue()


def loads(data: bytes) -> dict[str, Any]:
    """What `TorchState.load` takes."""
    plain: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    epoch, phase, step = plain["position"]
    kind, words, *rest = plain["rng"]["numpy"]
    rng = {**plain["rng"], "numpy": (kind, words.numpy().astype(np.uint32), *rest)}
    return {**plain, "position": Position(epoch, Phase(phase), step), "rng": rng}
