"""A handle on a running job, by which another thread can drain workers or hosts, or end it.

Thread-safe. Its orders reach the driver like other news of the cluster, through `driver.ports.Discovery`.
"""

from __future__ import annotations

import threading

from spark_elastic.clock import Clock, SystemClock
from spark_elastic.driver.ports import Discovery, Post
from spark_elastic.errors import InvalidInput
from spark_elastic.protocol.events import CancelRequested, DrainRequested, DriverEvent


class JobHandle:
    """Pass it to `run(..., handle=...)`; its methods work until the job ends. If several jobs run with one handle at
    the same time, each of them gets every order.

    Orders given before the job has begun are carried out at its start, those for a worker or a rank once its first
    world is complete. An order that matches nobody is reported in a sentence, in the log and with the job's progress.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()  # owns _jobs, _early
        self._jobs: dict[object, Post] = {}
        self._early: list[DriverEvent] = []

    def drain(
        self,
        *,
        worker: str | None = None,
        rank: int | None = None,
        host: str | None = None,
        reason: str = "the user asked for it",
    ) -> None:
        """Make a worker (by its id or its current rank) or all workers of a host leave at the next step boundary.

        No step is lost. Slots that become free give their cores back; a single worker's slot is asked for again only
        after the loss of another member. host: an executor's id or its machine's name; this job no longer uses it.

        Raises:
            InvalidInput: not exactly one of worker, rank and host is given.
        """
        if sum(choice is not None for choice in (worker, rank, host)) != 1:
            raise InvalidInput("drain takes exactly one of worker, rank and host.")
        now = self._clock.now()
        self._order(DrainRequested(now, reason, worker=worker, host=host, rank=rank, by_hand=True))

    def cancel(self, reason: str = "the user cancelled it") -> None:
        """End the job: the call that runs it raises `JobCancelled`."""
        self._order(CancelRequested(self._clock.now(), reason))

    def _order(self, event: DriverEvent) -> None:
        with self._lock:
            if not self._jobs:
                self._early.append(event)
            for post in self._jobs.values():
                post(event)

    # ---- the driver's side

    def of_a_job(self) -> Discovery:
        """What gives a job, and no other, the orders."""
        return _Orders(self)

    def begin(self, job: object, post: Post) -> None:
        with self._lock:
            early, self._early = self._early, []
            self._jobs[job] = post
            for event in early:
                post(event)

    def end(self, job: object) -> None:
        """Orders after the last job's end are kept for one that is started with this handle later."""
        with self._lock:
            self._jobs.pop(job, None)


class _Orders:
    """`driver.ports.Discovery` over a handle."""

    def __init__(self, handle: JobHandle) -> None:
        self._handle = handle

    def start(self, post: Post) -> None:
        self._handle.begin(self, post)

    def close(self) -> None:
        self._handle.end(self)
