"""What the store shows of a run's job, for `attach` in other processes, and what they ask of it.

    runs/RUN/status/ATTEMPT.json         how the job stands, a few seconds ago, or how it has ended
    runs/RUN/status/ATTEMPT.html         the last status page
    runs/RUN/requests/ATTEMPT-NAME       a request to drain or to cancel, deleted once the driver has read it

A thread of the driver's writes and reads them, from `with` to its end. It publishes checkpoints, too, and looks whether
another driver holds the run.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from spark_elastic.clock import Clock
from spark_elastic.data.store import Store, parse_document
from spark_elastic.driver.ports import Post
from spark_elastic.errors import JobCancelled, StoreError
from spark_elastic.monitoring.report import JobReport, encode_json
from spark_elastic.protocol.commands import End, JobOutcome
from spark_elastic.protocol.events import CancelRequested, DrainRequested, DriverEvent
from spark_elastic.rendezvous import codec
from spark_elastic.runs.checkpoint import CheckpointList, OwnedRun, find_highest_attempt

log = logging.getLogger("spark_elastic")

EVERY = 5.0  # seconds between two looks at the store
END_WAIT = 30.0  # seconds that the job's end waits for the store
REQUESTS = {"CancelRequested": CancelRequested, "DrainRequested": DrainRequested}


@dataclass(frozen=True)
class Shown:
    """What the store shows of a job."""

    status: dict[str, Any] = field(default_factory=dict)  # that of the status page
    report: JobReport = field(default_factory=JobReport)  # of the job so far
    end: End | None = None  # how it has ended; None: it runs
    beat: int = 0  # how often the driver has shown something

    def __post_init__(self) -> None:
        if self.end is not None and self.end.outcome is JobOutcome.SUCCESS and not self.end.results:
            raise ValueError("a success without results")


class RunBoard:
    """The driver's side. describe: returns the job's status and report; called in the thread. post: takes what others
    ask for, and the end of a job whose run another driver holds."""

    def __init__(self, run: OwnedRun, describe: Callable[[], Shown], post: Post, clock: Clock) -> None:
        self._run, self._describe, self._post, self._clock = run, describe, post, clock
        self._beat = 0
        self._failed = False
        self._lists: queue.SimpleQueue[CheckpointList | None] = queue.SimpleQueue()  # None: the end
        self._thread = threading.Thread(target=self._watch, name="spark-elastic-board", daemon=True)

    def __enter__(self) -> RunBoard:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._lists.put(None)
        self._thread.join(END_WAIT)
        if kind is not None:
            self.show(End("the caller was interrupted", JobOutcome.CANCELLED))

    def show(self, end: End | None = None, page: str | None = None) -> None:
        """Show how the job stands. end: it has ended so. page: the last one of its status, which the run keeps. A store
        that fails costs this, and one warning."""
        self._beat += 1
        shown = replace(self._describe(), end=end, beat=self._beat)
        name = status_name(self._run.run_id, self._run.attempt)
        try:
            self._run.store.write_bytes(name, encode_json(codec.to_plain(shown)))
            if page is not None:
                self._run.store.write_bytes(f"{name.removesuffix('json')}html", page.encode())
        except StoreError as error:
            level = logging.DEBUG if self._failed else logging.WARNING
            log.log(level, "attach() shows nothing new: %s", error)
            self._failed = True

    def publish(self, checkpoints: CheckpointList) -> None:
        """Have the thread publish these checkpoints, newest first, in place of the former list. Returns at once."""
        self._lists.put(checkpoints)

    def _watch(self) -> None:
        checkpoints: CheckpointList | None = ()
        while checkpoints is not None:
            try:
                if checkpoints:
                    self._run.publish_now(checkpoints)
                else:
                    self._run.check()
                    self._read_requests()
                    self.show()
            except JobCancelled as error:  # this process may have been stopped, or its host cut off
                self._post(CancelRequested(self._clock.now(), str(error)))
                return
            except Exception as error:  # of any file system; the next look, or list, may succeed
                level, what = logging.DEBUG, "the store was not read"
                if checkpoints:
                    level, what = logging.WARNING, "a checkpoint could not be published"
                log.log(level, "%s: %s", what, error)
            try:
                checkpoints = self._lists.get(timeout=0 if checkpoints else EVERY)
            except queue.Empty:
                checkpoints = ()

    def _read_requests(self) -> None:
        store, attempt = self._run.store, f"{self._run.attempt:06d}-"
        for name in store.list(requests_folder(self._run.run_id)):
            if not name.rpartition("/")[2].startswith(attempt):
                continue
            try:
                request = parse_document(store.read_bytes(name), name, _read_request)
            except StoreError as error:
                log.warning("this is no request: %s", error)
            else:
                self._post(replace(request, now=self._clock.now()))
            store.delete(name)


def _read_request(value: Any) -> DriverEvent:
    kind, fields = value
    return codec.read(REQUESTS[kind], fields)


def status_name(run_id: str, attempt: int) -> str:
    return f"runs/{run_id}/status/{attempt:06d}.json"


def requests_folder(run_id: str) -> str:
    return f"runs/{run_id}/requests"


def encode_request(event: DriverEvent) -> bytes:
    return json.dumps([type(event).__name__, codec.to_plain(event)]).encode()


def read_board(store: Store, run_id: str) -> tuple[int, Shown]:
    """The newest attempt of a run, 0: there is none, and what its driver shows, if it does yet. Raises StoreError."""
    attempt = find_highest_attempt(store, run_id)
    name = status_name(run_id, attempt)
    text = store.read_bytes(name) if store.exists(name) else b""
    try:
        json.loads(text)
    except (ValueError, RecursionError):  # of a store that does not replace an object at once
        return attempt, Shown()
    return attempt, parse_document(text, f"{name} in the store {store.url}", partial(codec.read, Shown))
