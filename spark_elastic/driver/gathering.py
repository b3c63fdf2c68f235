"""R17: the jobs of one application and their cluster's slots. One job gathers at a time; one that has not got enough
gives back what it has while others are there, so that no two jobs wait for each other's slots. While one trains, nobody
counts the time for which others lack slots: those are taken, not missing. Of jobs that have lost workers and have too
few for their next worlds, the one that came first gets what the others cannot use.

`Application` is shared by the threads that run jobs; its lock owns everything in it.
"""

from __future__ import annotations

import logging
import threading
from types import TracebackType
from typing import NamedTuple

from spark_elastic.clock import Clock
from spark_elastic.driver.ports import Post
from spark_elastic.errors import NotEnoughWorkers
from spark_elastic.protocol.events import SlotsWanted
from spark_elastic.protocol.types import Limits

log = logging.getLogger("spark_elastic")

LOOK_EVERY = 0.5  # seconds between two looks at the deadline; an interrupt is heard in between


class Application:
    """Who gathers, and which jobs there are. shipping: held by who sends the packages to executors."""

    def __init__(self) -> None:
        self.shipping = threading.Lock()
        self.change = threading.Condition()
        self.jobs: list[GatherTurn] = []
        self.gathering: GatherTurn | None = None

    def training(self) -> str | None:
        """The name of a job that has a world; None where there is none."""
        with self.change:
            return next((job._name for job in self.jobs if job._trains and job.lives.locked()), None)


def application_of(owner: object) -> Application:
    """That of a SparkContext or a session, which keeps it: the first one to come makes it."""
    found: Application = vars(owner).setdefault("_spark_elastic_application", Application())
    return found


class Patience:
    """A deadline of `seconds` that comes no nearer while a job of the application trains.

    what: it is that waits, for the log.
    """

    def __init__(self, application: Application, seconds: float, clock: Clock, what: str) -> None:
        self._application = application
        self._seconds = seconds
        self._clock = clock
        self._what = what
        self._until = clock.now() + seconds
        self._told: str | None = None

    def over(self) -> bool:
        """To be asked now and then: time passes for it between two questions."""
        holder = self._application.training()
        if holder is not None:
            self._until = self._clock.now() + self._seconds
            if holder != self._told:
                log.warning(
                    "%s waits while job %s of the same application trains: cancel its Spark jobs to end that",
                    self._what,
                    holder,
                )
                self._told = holder
            return False
        return self._clock.now() >= self._until

    def join(self, thread: threading.Thread) -> bool:
        """Wait for a thread. Returns whether it ended in time."""
        while thread.is_alive():
            if self.over():
                return False
            thread.join(LOOK_EVERY)
        return True


class Wanted(NamedTuple):
    """What a job should do about the slots that it lacks. holder: the job that has them or needs them first. taken: it
    trains on them, so that nothing needs to be given back."""

    holder: str
    taken: bool


class GatherTurn:
    """One job's turn: from `with turn.lives, turn` to its first world it alone gathers. `driver.ports.Discovery` to the
    driver.

    lives: held for as long as the job lasts. An interrupt may hit at any point of Python's own code, this class's
    `__exit__` too; a lock is let go of all the same.
    """

    def __init__(self, application: Application, name: str, limits: Limits, clock: Clock) -> None:
        self._application = application
        self._name = name
        self._limits = limits
        self._clock = clock
        self.lives = threading.Lock()
        self._over = threading.Event()
        self._trains = False
        self._short_since: float | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> GatherTurn:
        """Wait for the turn.

        Raises:
            NotEnoughWorkers: another job has been gathering for `start_timeout`, and none trained.
        """
        try:
            self._await_turn()
        except BaseException:
            self._leave()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()
        self.gathered()
        self._over.set()

    def _await_turn(self) -> None:
        here = self._application
        patience = Patience(here, self._limits.start_timeout, self._clock, f"job {self._name}")
        with here.change:
            here.jobs = [*(job for job in here.jobs if job.lives.locked()), self]
            while (first := here.gathering) is not None and first.lives.locked():
                if patience.over():
                    raise NotEnoughWorkers(
                        f"job {self._name} waited {self._limits.start_timeout:g} s (start_timeout) while job "
                        f"{first._name} of the same application was gathering its workers."
                    )
                here.change.wait(LOOK_EVERY)
            here.gathering = self

    def _leave(self) -> None:
        """Whatever interrupts what follows, nobody waits for this job from here on."""
        here = self._application
        with here.change:
            if self in here.jobs:
                here.jobs.remove(self)
            here.change.notify_all()

    def gathered(self) -> None:
        """It has a world: the next may gather. Any thread, any number of times."""
        self._trains = True
        here = self._application
        with here.change:
            if here.gathering is self:
                here.gathering = None
                here.change.notify_all()

    # ---- the driver's side

    def start(self, post: Post) -> None:
        self._thread = threading.Thread(
            target=self._mind, args=(post,), name="spark-elastic-gathering", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def lacks(self, slots: bool) -> None:
        """Whether it has no world and too few slots for one: to be told at each change. Any thread."""
        self._short_since = self._clock.now() if slots else None

    def _mind(self, post: Post) -> None:
        """Now and then, as long as there is no world: others may need the slots more."""
        told: str | None = None
        while not self._over.wait(self._patience):
            wanted = self.wanted()
            if wanted is None:
                continue
            if wanted.holder != told:
                log.warning(
                    "job %s waits for slots that job %s of the same application has or needs",
                    self._name,
                    wanted.holder,
                )
                told = wanted.holder
            reason = f"its job has too few slots, and job {wanted.holder} of this application may need them"
            post(SlotsWanted(self._clock.now(), reason, wanted.taken))

    def wanted(self) -> Wanted | None:
        """Which other job has the slots that this one lacks; None: it lacks none, or nobody has any."""
        with self._application.change:
            jobs = [job for job in self._application.jobs if job is self or job.lives.locked()]
        # Those that wait for their turn could not use the slots.
        others = [job for job in jobs if job is not self and job._trains]
        short = [job for job in jobs if job._is_short()]
        if not self._trains:
            return Wanted(others[0]._name, taken=False) if others else None
        if self not in short:
            return None
        if short[0] is not self:
            return Wanted(short[0]._name, taken=False)
        holder = next((job for job in others if job not in short), None)
        return None if holder is None else Wanted(holder._name, taken=True)

    @property
    def _patience(self) -> float:
        return min(self._limits.gather_timeout, self._limits.start_timeout / 2)

    def _is_short(self) -> bool:
        """It lost its world, and for a while had too few slots for another."""
        since = self._short_since
        return self._trains and since is not None and self._clock.now() - since >= self._patience
