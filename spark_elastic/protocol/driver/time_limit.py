"""`max_runtime`: a job that has had its time is stopped at the next step boundary. Pure."""

from __future__ import annotations

from spark_elastic.protocol.driver.driver_state import Stage, Turn
from spark_elastic.protocol.types import LAST_CHANGE

GRACE = 60.0  # seconds for the way to the next boundary; some functions have none


def time_is_up(turn: Turn) -> str:
    """Why the job shall stop at its next boundary; "" while it has time."""
    state, limit = turn.state, turn.state.limits.max_runtime
    if state.began is None:
        state.began = turn.now
    if limit is None or turn.now - state.began < limit:
        return ""
    return f"the job has had its {limit:g} s (max_runtime)"


def is_told(turn: Turn) -> bool:
    """Whether the world's members were told that their next boundary is the job's last."""
    state = turn.state
    return state.world is not None and state.version >= state.world.version + LAST_CHANGE


def may_end(turn: Turn) -> bool:
    """Once its time is up: whether everybody has passed the last boundary, nobody is left to save anything, or the
    grace is over, too. A world that broke, or may have stopped for another change, is followed by one that is told.
    """
    state = turn.state
    assert state.began is not None
    assert state.limits.max_runtime is not None
    if turn.now - state.began >= state.limits.max_runtime + GRACE:
        return True
    if state.stage is Stage.RUNNING:
        return False
    told_only_that = state.world is not None and state.version == state.world.version + LAST_CHANGE
    return not turn.anybody_survives() or (told_only_that and not state.because)
