"""R17: the jobs of one application and their cluster's slots. One job gathers at a time; one that has not got enough
gives back what it has while others are there, so that no two jobs wait for each other's slots.

`Application` is shared by the threads that run jobs; its lock owns everything in it.
"""

from __future__ import annotations

import threading
from types import TracebackType

from spark_elastic.clock import Clock
from spark_elastic.driver.ports import Post
from spark_elastic.errors import NotEnoughWorkers
from spark_elastic.protocol.events import SlotsWanted
from spark_elastic.protocol.types import Limits

LOOK_EVERY = 0.5  # seconds between two looks at the deadline; an interrupt is heard in between


class Application:
    """Who gathers, and which jobs there are."""

    def __init__(self) -> None:
        self.change = threading.Condition()
        self.jobs: list[GatherTurn] = []
        self.gathering: GatherTurn | None = None


class GatherTurn:
    """One job's turn: from `with` to its first world it alone gathers. `driver.ports.Discovery` to the driver."""

    def __init__(self, application: Application, name: str, limits: Limits, clock: Clock) -> None:
        self._application = application
        self._name = name
        self._limits = limits
        self._clock = clock
        self._over = threading.Event()  # the first world is there, or the end
        self._thread: threading.Thread | None = None

    def __enter__(self) -> GatherTurn:
        """Wait for the turn.

        Raises:
            NotEnoughWorkers: another job has been gathering for `start_timeout`.
        """
        here = self._application
        deadline = self._clock.now() + self._limits.start_timeout
        with here.change:
            here.jobs.append(self)
            try:
                while here.gathering is not None:
                    if self._clock.now() >= deadline:
                        raise NotEnoughWorkers(
                            f"job {self._name} waited {self._limits.start_timeout:g} s (start_timeout) while job "
                            f"{here.gathering._name} of the same application was gathering its workers."
                        )
                    here.change.wait(LOOK_EVERY)
                here.gathering = self
            except BaseException:
                here.jobs.remove(self)
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.gathered()
        with self._application.change:
            self._application.jobs.remove(self)

    def gathered(self) -> None:
        """It has its first world: the next may gather. Any thread, any number of times."""
        self._over.set()
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

    def _mind(self, post: Post) -> None:
        """Now and then, as long as there is no world: others may need the slots more."""
        while not self._over.wait(self._limits.gather_timeout):
            with self._application.change:
                others = [job._name for job in self._application.jobs if job is not self]
            if others:
                reason = f"its job has too few slots to begin, and job {others[0]} of this application may need them"
                post(SlotsWanted(self._clock.now(), reason))
