"""What code in a worker asks of it: the world's group, numbers for people, to be told of changes, and whether others
are in their loop. Training thread only.

R21 (outside of the loop): outside of its elastic loop, while others are inside of theirs, a program runs alone in a
world of one worker. A mark in the driver's key-value store says that a worker has begun its loop: a newcomer that finds
it runs its program up to the loop first, and asks for a world then.
"""

from __future__ import annotations

import logging
import math
import threading
from typing import Any, Protocol

from elastic_collectives import Group
from spark_elastic.errors import InvalidInput
from spark_elastic.protocol.types import Fence, HostUpdateResult, Member, WorkerIdentity, WorldView
from spark_elastic.rendezvous.messages import DriverClient, GetValues, SetValues
from spark_elastic.worker.context import CollectiveThread, get_call_context, get_context
from spark_elastic.worker.program import WorkerHandle

log = logging.getLogger(__name__)

ALONE = Fence(0, 0)  # of each world that a worker has for itself; the driver's worlds begin at 1
SCOPE, KEY = "loop", "begun"  # of the mark
# Keys of the process's values.
ENTERED = "entered"  # whether this call of the user's function has reached its elastic loop
STATE = "state"  # the state of the newest elastic loop of this process
METRICS = "metrics"  # all numbers reported so far
RESERVED = ("step", "steps", "rows", "world", "checkpoint_seconds")  # numbers that the job counts itself


def get_group() -> Group | None:
    """The current world's group; None in a process that is no worker. Raises `CollectiveError` between two worlds."""
    worker = get_context()
    return None if worker is None else worker.require_group()


def get_collective_thread() -> CollectiveThread | None:
    """The thread that calls the current world's collectives; None in a process that is not a worker."""
    worker = get_context()
    return None if worker is None else worker.group_context.collective_thread


def report(**numbers: Any) -> None:
    """Show these numbers of a training, as `report(loss=0.3, accuracy=0.9)`; each stays until it is reported anew.

    Cheap enough for every step: four times a second the newest numbers go to the driver, which shows those of rank 0.
    Takes any value that `float` takes. Does nothing in a process that is no worker.

    Raises:
        InvalidInput: a value is not a number, the job counts a number of that name itself, or `epoch` is not finite.
    """
    metrics: dict[str, Any] = {}
    for name, value in numbers.items():
        if name in RESERVED:
            raise InvalidInput(f"report() counts {name} itself: give yours under another name.")
        try:
            is_whole = isinstance(value, int) and not isinstance(value, bool)
            if hasattr(value, "detach"):  # a tensor of torch, which warns where a gradient would be lost
                value = value.detach()
            metrics[name] = value if is_whole else float(value)
        except (TypeError, ValueError) as error:
            kind = type(value).__name__
            raise InvalidInput(
                f"report() takes numbers; {name} is a {kind} and no number: {error}."
            ) from error
    if not -math.inf < metrics.get("epoch", 0) < math.inf:
        raise InvalidInput(f"report() takes a finite epoch, not {metrics['epoch']}.")
    worker = get_context()
    if worker is not None and worker.handle is not None:
        size = {} if worker.world is None else {"world": worker.world.size}
        update_metrics(worker.handle, {**metrics, **size})


def update_metrics(handle: WorkerHandle, numbers: dict[str, Any]) -> None:
    """Report numbers in addition to those before, also of an earlier call of the user's function, such as the loss."""
    metrics: dict[str, Any] = handle.process_values.setdefault(METRICS, {})
    metrics.update(numbers)
    handle.report_metrics(dict(metrics))


def task_resources() -> dict[str, tuple[str, ...]]:
    """Addresses by resource, as `TaskContext.resources()` has them: {"gpu": ("0",)}; empty where there are none.

    For the function on a worker. The addresses are the slot's own, so no two workers of a host share one.
    """
    worker = get_context()
    return {} if worker is None else dict(worker.resources)


# ---- outside of the loop


def mark_loop_begun(driver: DriverClient) -> None:
    """Say that a worker of this job is about to enter its loop. One short request."""
    driver.ask(SetValues(SCOPE, (KEY,), (b"1",)))


def has_loop_begun(driver: DriverClient) -> bool:
    """Whether a worker of this job has ever entered its loop. One short request."""
    return driver.ask(GetValues(SCOPE, (KEY,))).values != (None,)


def make_world_alone(me: WorkerIdentity) -> WorldView:
    member = Member(me.worker, me.slot, me.host, 0, 0, 1, 0, 1, None)
    return WorldView(ALONE, 1, member, (0,), None, None)


# ---- planned changes


class HostsListener(Protocol):
    """Is notified of planned changes, as a `State` is."""

    def on_hosts_updated(self, timestamp: float, update_res: HostUpdateResult) -> None: ...


class _Listeners(dict[int, HostsListener]):
    """Those of one call of the user's function, by their ids: a call that begins anew has none. Any thread."""


class WorkerNotificationManager:
    """Tells listeners of the current job that workers are to join or leave. All managers of a process are alike.

    A listener is notified of a change as soon as the driver announces it, on every worker and before `commit()` or
    `check_host_updates()` stops there. Losses are not announced.
    """

    def init(
        self, rendezvous_addr: object = None, rendezvous_port: object = None, nic: object = None
    ) -> None:
        """Does nothing: a worker follows its driver from the start."""

    def register_listener(self, listener: HostsListener) -> None:
        """Call `listener.on_hosts_updated(timestamp, update_res)`, in another thread, for each change from now on."""
        get_call_context().get_or_create(_Listeners)[id(listener)] = listener

    def remove_listener(self, listener: HostsListener) -> None:
        """Call that listener no more."""
        get_call_context().get_or_create(_Listeners).pop(id(listener), None)

    def handle_hosts_updated(self, timestamp: float, update_res: HostUpdateResult) -> None:
        """Tell all listeners of a change; the job's end is none. Returns at once.

        Args:
            timestamp: seconds since the Unix epoch.
        """
        listeners = tuple(get_call_context().get_or_create(_Listeners).values())
        if not listeners or not update_res:
            return
        told = listeners, timestamp, update_res
        try:
            threading.Thread(target=_tell, args=told, name="spark-elastic-listeners", daemon=True).start()
        except RuntimeError as error:  # the caller's thread, which watches the driver, must go on
            log.warning("listeners were not told of a change: %s", error)


notification_manager = WorkerNotificationManager()  # module state, as Horovod has it


def _tell(listeners: tuple[HostsListener, ...], timestamp: float, update_res: HostUpdateResult) -> None:
    for listener in listeners:
        try:
            listener.on_hosts_updated(timestamp, update_res)
        except Exception:  # user code; the others are notified nevertheless
            log.exception("a listener of changes raised, and the job continues")
