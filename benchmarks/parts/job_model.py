"""A discrete-event model of a training job that loses workers and gets them back: nothing here is measured.

Between two events a job takes steps at a pace that depends on how many its members are and on how long ago it was
held up last, and is drawn anew each `window`. A fault holds the job up, takes workers away and, where the job goes back
to a checkpoint, undoes steps; capacity that is there again comes in after a delay and holds the job up once more. A
fault during such a pause begins another.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

Draw = Callable[[], float]  # a number of a distribution


@dataclass(frozen=True)
class Fault:
    """What happens to the job from outside."""

    at: float  # seconds after the first step
    pause: Draw  # seconds in which no step is taken
    lost: int = 0  # workers
    away: float = 0.0  # seconds until there is capacity for them again


@dataclass(frozen=True)
class Job:
    """One peer's job. A job that keeps no checkpoint loses no step."""

    workers: int  # at full size
    # Steps a second, by members and seconds since the start or the last pause.
    pace: Callable[[int, float], float]
    delay: Draw = lambda: 0.0  # seconds from capacity to a newcomer that is ready
    join: Draw = lambda: 0.0  # seconds without a step when it comes in
    window: float = 1.0  # seconds for which a drawn pace stays
    checkpoint: int = 0  # steps between two checkpoints; 0: none
    lag: int = 0  # newest checkpoints that a fault finds unfinished
    fewest: int = 1  # members below which no step is taken


@dataclass(frozen=True)
class Outcome:
    """What became of a job."""

    seconds: float
    steps: float
    repeated: float  # steps undone


def simulate(
    job: Job, faults: Iterable[Fault], steps: float = math.inf, seconds: float = math.inf
) -> Outcome:
    """Until so many steps are done or so much time has passed. faults: in the order of time, maybe without end."""
    coming, order = iter(faults), itertools.count()
    queue: list[tuple[float, int, Fault | int]] = []  # time, tie-breaker, a fault or how many come back

    def await_next_fault() -> None:
        fault = next(coming, None)
        if fault is not None:
            heapq.heappush(queue, (fault.at, next(order), fault))

    await_next_fault()
    now, paused_until, done, repeated, members = 0.0, 0.0, 0.0, 0.0, job.workers
    while done < steps and now < seconds:
        until = min(queue[0][0] if queue else math.inf, seconds)
        begin = max(now, paused_until)
        if begin < until and members >= job.fewest:
            pace = job.pace(members, begin - paused_until)
            now = min(until, begin + job.window, begin + (steps - done) / pace)
            done = steps if now < until and now < begin + job.window else done + pace * (now - begin)
            continue
        now = until
        if now >= seconds:
            break
        _, _, event = heapq.heappop(queue)
        if isinstance(event, int):
            members += event
            paused_until = max(paused_until, now) + job.join()
            continue
        await_next_fault()
        paused_until = max(paused_until, now + event.pause())
        members -= event.lost
        if event.lost:
            heapq.heappush(queue, (now + event.away + job.delay(), next(order), event.lost))
        if job.checkpoint:
            kept = max(0.0, (done // job.checkpoint - job.lag) * job.checkpoint)
            repeated += done - kept
            done = kept
    return Outcome(now, done, repeated)
