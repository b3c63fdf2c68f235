"""What a program does outside of its elastic loop, while others are inside of theirs: R21 (outside of the loop).

It runs alone there, in a world of one worker, so that no exchange of its own meets those of the others. A mark in the
driver's key-value store says that a worker of the job has begun its loop: a newcomer that finds it runs its program up
to the loop first, and asks for a world then. Main thread only.
"""

from __future__ import annotations

from spark_elastic.protocol.types import Fence, Member, WorkerIdentity, WorldView
from spark_elastic.rendezvous.messages import DriverClient, GetValues, SetValues

ALONE = Fence(0, 0)  # of each world that a worker has for itself; the driver's worlds begin at 1
SCOPE, KEY = "loop", "begun"  # of the mark
# Keys of the process's values.
ENTERED = "entered"  # whether this call of the user's function has reached its elastic loop
STATE = "state"  # the state of the newest elastic loop of this process


def mark_loop_begun(driver: DriverClient) -> None:
    """Say that a worker of this job is about to enter its loop. One short request."""
    driver.ask(SetValues(SCOPE, (KEY,), (b"1",)))


def has_loop_begun(driver: DriverClient) -> bool:
    """Whether a worker of this job has ever entered its loop. One short request."""
    return driver.ask(GetValues(SCOPE, (KEY,))).values != (None,)


def make_world_alone(me: WorkerIdentity) -> WorldView:
    """The world of this worker alone."""
    member = Member(me.worker, me.slot, me.host, 0, 0, 1, 0, 1, None)
    reason = "outside of the loop, in which the others are"
    return WorldView(ALONE, 1, member, (0,), None, None, False, False, reason)
