"""When a checkpoint is due: by steps, by seconds, or by whichever comes first. One thread."""

from __future__ import annotations

from dataclasses import dataclass

from spark_elastic.clock import Clock


@dataclass(frozen=True)
class CheckpointPolicy:
    """Of run `run_id`: every `steps` steps, or `seconds` after the last one, whichever comes first; None: not by it."""

    run_id: str
    steps: int | None = None
    seconds: float | None = 60.0


class Schedule:
    """Counts steps and seconds since the last checkpoint."""

    def __init__(self, policy: CheckpointPolicy, clock: Clock) -> None:
        self._policy = policy
        self._clock = clock
        self._last = clock.now()
        self._steps = 0

    def step(self) -> bool:
        """A step was taken; whether a checkpoint is due, from which the next one counts."""
        self._steps += 1
        steps, seconds = self._policy.steps, self._policy.seconds
        by_steps = steps is not None and self._steps >= steps
        by_time = seconds is not None and self._clock.now() - self._last >= seconds
        if by_steps or by_time:
            self._last, self._steps = self._clock.now(), 0
        return by_steps or by_time
