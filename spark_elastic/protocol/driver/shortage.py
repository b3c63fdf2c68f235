"""Whether a job has enough workers, and when it gives up waiting for them. Part of the driver machine; pure."""

from __future__ import annotations

from spark_elastic.protocol.commands import Outcome
from spark_elastic.protocol.driver.driver_state import Turn
from spark_elastic.protocol.driver.ending import end
from spark_elastic.protocol.driver.jobs import all_blacklisted
from spark_elastic.protocol.driver.membership import names
from spark_elastic.protocol.types import WorkerStatus


def enough(turn: Turn, count: int) -> bool:
    """Whether `count` workers are at least `min_workers`. Ends the job if there were too few for `start_timeout`."""
    state = turn.state
    if count >= state.limits.min_workers:
        state.short_since = None
        return True
    state.recall |= state.withheld > 0  # what was given back is needed now
    if state.short_since is None:
        state.short_since = turn.now
    elif turn.now - state.short_since >= state.limits.start_timeout:
        end(turn, Outcome.NOT_ENOUGH_WORKERS, _shortage(turn, count))
    else:
        _give_up_on_the_blacklisted(turn, state.short_since + state.limits.start_timeout)
    return False


def _give_up_on_the_blacklisted(turn: Turn, deadline: float) -> None:
    """Ends the job early if no host that is left could bring a worker before the deadline."""
    found = all_blacklisted(turn) if turn.state.blacklist else None
    if found is None or found[1] <= deadline:
        return
    hosts, first = found
    when = "never" if first == float("inf") else f"in {first - turn.now:.0f} s"
    end(
        turn,
        Outcome.NOT_ENOUGH_WORKERS,
        f"all hosts are blacklisted since their workers failed: {names(hosts)}; the first returns {when} "
        f"(cooldown_range), and the job waits for workers for {turn.state.limits.start_timeout:g} s (start_timeout)",
    )


def _shortage(turn: Turn, count: int) -> str:
    """The sentence with which such a job ends: who came, and what was still waited for."""
    state = turn.state
    hosts = sorted({slot.host for slot in state.slots.values()})
    silent = [str(job.job) for job in state.jobs.values() if job.slots == 0 and job.job not in state.put_off]
    starting = [turn.title(w) for w in state.workers.values() if w.status is WorkerStatus.STARTING]
    parts = [
        f"{count} workers came within {state.limits.start_timeout:g} s and {state.limits.min_workers} are needed "
        "(min_workers)",
        f"hosts: {names(hosts) or 'none'}",
    ]
    if silent:
        parts.append(f"waited for slot jobs that the cluster did not start: {names(silent)}")
    if starting:
        parts.append(f"waited for {names(starting)} to get warm")
    cooling = [
        f"{worker.worker} (its slot failed, for {until - turn.now:.0f} s)"
        for worker in state.workers.values()
        if (until := state.blacklist.slot_until(worker.slot, worker.host, turn.now)) is not None
    ]
    if cooling:
        parts.append(f"cooling down: {names(cooling)}")
    if state.yielded:
        parts.append(f"its slots were given back in between: {state.yielded}")
    if state.fruitless_end:
        parts.append(f"the last slot that ended before its worker was warm said: {state.fruitless_end}")
    return "; ".join(parts)
