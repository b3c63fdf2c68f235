"""Horovod's `WorkerNotificationManager`: a program listens to planned changes as the driver announces them.

Listeners belong to one call of the user's function: a call that begins anew has none. The thread that follows the
driver tells them, in a thread of its own, since a listener may take its time.
"""

from __future__ import annotations

import logging
import threading
from typing import Protocol

from spark_elastic.protocol.types import HostUpdateResult
from spark_elastic.worker.context import get_call_context

log = logging.getLogger(__name__)


class HostsListener(Protocol):
    """Is notified of planned changes, as a `State` is."""

    def on_hosts_updated(self, timestamp: float, update_res: HostUpdateResult) -> None: ...


class _Listeners:
    """The listeners of one call of the user's function. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # owns _all
        self._all: tuple[HostsListener, ...] = ()

    def add(self, listener: HostsListener) -> None:
        with self._lock:
            self._all = (*(one for one in self._all if one is not listener), listener)

    def remove(self, listener: HostsListener) -> None:
        with self._lock:
            self._all = tuple(one for one in self._all if one is not listener)

    def get_all(self) -> tuple[HostsListener, ...]:
        with self._lock:
            return self._all


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
        get_call_context().get_or_create(_Listeners).add(listener)

    def remove_listener(self, listener: HostsListener) -> None:
        """Call that listener no more."""
        get_call_context().get_or_create(_Listeners).remove(listener)

    def handle_hosts_updated(self, timestamp: float, update_res: HostUpdateResult) -> None:
        """Tell all listeners of a change; the job's end is none. Returns at once.

        Args:
            timestamp: seconds since the Unix epoch.
        """
        listeners = get_call_context().get_or_create(_Listeners).get_all()
        if not listeners or not update_res:
            return
        arguments = listeners, timestamp, update_res
        try:
            threading.Thread(
                target=_tell, args=arguments, name="spark-elastic-listeners", daemon=True
            ).start()
        except RuntimeError as error:  # the caller's thread, which watches the driver, must go on
            log.warning("listeners were not told of a change: %s", error)


# Module state, as Horovod has it: `horovod.common.elastic.notification_manager`.
notification_manager = WorkerNotificationManager()


def _tell(listeners: tuple[HostsListener, ...], timestamp: float, update_res: HostUpdateResult) -> None:
    for listener in listeners:
        try:
            listener.on_hosts_updated(timestamp, update_res)
        except Exception:  # user code; the others are notified nevertheless
            log.exception("a listener of changes raised, and the job continues")
