"""Scheduling of the slots of one application's jobs (R17, gathering).

One job gathers slots at a time. A job that cannot get enough gives back what it has while others exist, so that no
two jobs wait for each other's slots. While one job trains, the time for which others lack slots does not count, since
those slots are in use. Of jobs that have lost workers and have too few slots, the first gets what others cannot use.
The threads that run jobs share one `JobQueue`; its lock guards everything in it."""

from __future__ import annotations

import logging
import threading

from spark_elastic.clock import Clock
from spark_elastic.driver.ports import Post
from spark_elastic.errors import NotEnoughWorkers
from spark_elastic.protocol.events import SlotsWanted
from spark_elastic.protocol.types import Limits

log = logging.getLogger("spark_elastic")

POLL_SECONDS = 0.5  # seconds between two checks of a deadline; Ctrl-C is handled in between


class JobQueue:
    """The jobs of one application, in their order."""

    def __init__(self) -> None:
        self.shipping_lock = threading.Lock()  # held while packages are sent to executors
        self.condition = threading.Condition()  # guards the two below
        self.jobs: list[GangScheduler] = []
        self.gathering: GangScheduler | None = None  # the job that gathers slots now

    def find_training_job(self) -> str | None:
        """The name of a job that has a world, or None."""
        with self.condition:
            return next((job._name for job in self.jobs if job._trains and job.alive_lock.locked()), None)


def get_job_queue(owner: object) -> JobQueue:
    """The queue of a SparkContext or session, which holds it as an attribute. The first call creates it."""
    found: JobQueue = vars(owner).setdefault("_spark_elastic_job_queue", JobQueue())
    return found


class QueueTimeout:
    """A deadline that is postponed while a job of the application trains: its slots are in use, not missing, and a
    queue of long fits on a full cluster is worked off. seconds: that must pass without a training job. what: waits."""

    def __init__(self, queue: JobQueue, seconds: float, clock: Clock, what: str) -> None:
        self._queue, self._seconds, self._clock, self._what = queue, seconds, clock, what
        self._until = clock.now() + seconds
        self._logged_holder: str | None = None

    def is_expired(self) -> bool:
        """Call it regularly: it postpones the deadline if a job trains at the time of the call."""
        holder = self._queue.find_training_job()
        if holder is None:
            return self._clock.now() >= self._until
        self._until = self._clock.now() + self._seconds
        if holder != self._logged_holder:
            told = "%s waits while job %s of the same application trains: cancel its Spark jobs to end that"
            log.warning(told, self._what, holder)
            self._logged_holder = holder
        return False

    def join(self, thread: threading.Thread) -> bool:
        """Wait for a thread; returns whether it ended in time."""
        while thread.is_alive():
            if self.is_expired():
                return False
            thread.join(POLL_SECONDS)
        return True


class GangScheduler:
    """One job's place in the queue. From `with scheduler.alive_lock, scheduler` to its first world, only this job
    gathers slots. `alive_lock` is held as long as the job lasts: Ctrl-C may interrupt `__exit__`, but frees a lock."""

    def __init__(self, queue: JobQueue, name: str, limits: Limits, clock: Clock) -> None:
        self._queue, self._name, self._limits, self._clock = queue, name, limits, clock
        self.alive_lock = threading.Lock()
        self._over = threading.Event()
        self._trains = False  # it has or had a world
        self._short_since: float | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> GangScheduler:
        """Wait until this job may gather. Raises NotEnoughWorkers: another gathers for `start_timeout`, none trains."""
        try:
            self._wait_for_turn()
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._leave()
        self.finish_gathering()
        self._over.set()

    def _wait_for_turn(self) -> None:
        queue = self._queue
        timeout = QueueTimeout(queue, self._limits.start_timeout, self._clock, f"job {self._name}")
        with queue.condition:
            queue.jobs = [*(job for job in queue.jobs if job.alive_lock.locked()), self]
            while (first := queue.gathering) is not None and first.alive_lock.locked():
                if timeout.is_expired():
                    waited = f"waited {self._limits.start_timeout:g} s (start_timeout)"
                    other = f"job {first._name} of the same application was gathering its workers"
                    raise NotEnoughWorkers(f"job {self._name} {waited} while {other}.")
                queue.condition.wait(POLL_SECONDS)
            queue.gathering = self

    def _leave(self) -> None:
        """First step of `__exit__`: even if Ctrl-C interrupts the rest, no other job waits for this one."""
        queue = self._queue
        with queue.condition:
            if self in queue.jobs:
                queue.jobs.remove(self)
            queue.condition.notify_all()

    def finish_gathering(self) -> None:
        """The job has a world, so the next one may gather. Any thread, any number of times."""
        self._trains = True
        queue = self._queue
        with queue.condition:
            if queue.gathering is self:
                queue.gathering = None
                queue.condition.notify_all()

    def start(self, post: Post) -> None:
        name = "spark-elastic-gathering"
        self._thread = threading.Thread(target=self._watch, args=(post,), name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def report_shortage(self, is_short: bool) -> None:
        """The job begins to lack slots for its next world, or has enough again. Any thread."""
        self._short_since = self._clock.now() if is_short else None

    def _watch(self, post: Post) -> None:
        """Posts `SlotsWanted` regularly while the job lacks slots that another job has or needs."""
        logged: str | None = None
        while not self._over.wait(self._grace):
            claim = self.find_slot_claim()
            if claim is None:
                continue
            holder, in_use = claim
            if holder != logged:
                logged = holder
                told = "job %s waits for slots that job %s of the same application has or needs"
                log.warning(told, self._name, logged)
            reason = f"its job has too few slots, and job {holder} of this application may need them"
            post(SlotsWanted(self._clock.now(), reason, in_use))

    def find_slot_claim(self) -> tuple[str, bool] | None:
        """The other job that has the slots which this one lacks, or comes first among those that need them; True: it
        trains on them, so this one need not give back its own. None: it lacks none, or no job has any."""
        with self._queue.condition:
            jobs = [job for job in self._queue.jobs if job is self or job.alive_lock.locked()]
        # Jobs that wait in the queue could not use the slots.
        others = [job for job in jobs if job is not self and job._trains]
        short = [job for job in jobs if job._is_short()]
        if not self._trains:
            return (others[0]._name, False) if others else None
        if self not in short:
            return None
        if short[0] is not self:
            return short[0]._name, False
        holder = next((job for job in others if job not in short), None)
        return None if holder is None else (holder._name, True)

    @property
    def _grace(self) -> float:
        """Seconds for which it may lack slots before it gives back any."""
        return min(self._limits.gather_timeout, self._limits.start_timeout / 2)

    def _is_short(self) -> bool:
        """It lost its world and has lacked slots for another for longer than `_grace`."""
        since = self._short_since
        return self._trains and since is not None and self._clock.now() - since >= self._grace
