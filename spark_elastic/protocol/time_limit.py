"""`max_runtime`: a job that has had its time is stopped at the next step boundary. Pure."""

from __future__ import annotations

from spark_elastic.protocol.driver_state import Stage, Turn

GRACE = 60.0  # seconds for the way to the next boundary; some functions have none


def time_is_up(turn: Turn) -> str:
    """Why the job shall stop at its next boundary; "" while it has time."""
    state, limit = turn.state, turn.state.limits.max_runtime
    if state.began is None:
        state.began = turn.now
    if limit is None or turn.now - state.began < limit:
        return ""
    return f"the job has had its {limit:g} s (max_runtime)"


def may_end(turn: Turn) -> bool:
    """Once its time is up: whether nobody is in the middle of a step, or the grace is over, too."""
    state = turn.state
    assert state.began is not None
    assert state.limits.max_runtime is not None
    return state.stage is not Stage.RUNNING or turn.now - state.began >= state.limits.max_runtime + GRACE
