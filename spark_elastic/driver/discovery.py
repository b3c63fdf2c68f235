"""Discovery of hosts by a user's function or script, and the handle by which users drain workers or end a job.

One thread polls the function. Each call runs in a thread of its own, so a call that hangs blocks no other.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, suppress

from spark_elastic.clock import Clock, SystemClock
from spark_elastic.driver.ports import Discovery, Post
from spark_elastic.errors import InvalidInput
from spark_elastic.protocol.events import CancelRequested, DrainRequested, DriverEvent, HostsDiscovered
from spark_elastic.protocol.types import WorkerId

log = logging.getLogger("spark_elastic.driver")

POLL_INTERVAL = 1.0  # seconds
ANSWER_TIMEOUT = 10.0  # seconds; a later answer to a call is still taken, and until then the last one holds
JOIN_TIMEOUT = 5.0  # seconds for the asking thread at the end

Find = Callable[[], Mapping[str, int]]
OnAnswer = Callable[[Mapping[str, int]], None]
Listed = tuple[tuple[str, int], ...]

ALL_SLOTS = 1_000_000  # of a host that is listed without a number: as many as it has


def parse_hosts(text: str, default_slots: int | None = None) -> dict[str, int]:
    """Hosts and their slots of "h1:2,h2:4", or one `host[:slots]` a line; # begins a comment. "host slots=4", as in
    MPI's host files, is accepted, too. Hosts that differ in case alone are one host. Raises InvalidInput: an entry is
    malformed, comes twice, or has no number of slots although there is no default."""
    found: dict[str, int] = {}
    named: set[str] = set()
    lines = [line.partition("#")[0] for line in text.splitlines()]
    for entry in (" ".join(part.split()) for line in lines for part in line.split(",")):
        if not entry:
            continue
        host, slots = _parse(entry, default_slots)
        if host.lower() in named:
            raise InvalidInput(f"host {host} is named twice: name each once, with all its slots.")
        found[host] = slots
        named.add(host.lower())
    return found


def _parse(entry: str, default_slots: int | None) -> tuple[str, int]:
    host, named, slots = entry.partition(" slots=")
    if not named and ":" in host and not _is_ipv6(host) and not host.endswith("]"):
        host, _, slots = host.rpartition(":")
    host, slots = host.strip(), slots.strip()
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    is_host = bool(host) and " " not in host and (":" not in host or _is_ipv6(host))
    if is_host and not slots and default_slots is not None:
        return host, default_slots
    if not is_host or not slots.isdecimal():
        raise InvalidInput(f"{entry!r} is no host with a number of slots: write host:slots, as in node1:2.")
    return host, int(slots)


def _is_ipv6(text: str) -> bool:
    try:
        return isinstance(ipaddress.ip_address(text), ipaddress.IPv6Address)
    except ValueError:
        return False


class JobHandle:
    """Pass it to `run(..., handle=...)`; its methods work until the job ends. If several jobs run with one handle at
    the same time, each of them gets every request.

    Requests made before the job has begun are carried out at its start, those for a worker or a rank once its first
    world is complete. A request that matches no worker is reported in the log and with the job's progress.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()  # owns _jobs, _early
        self._jobs: dict[object, Post] = {}
        self._early: list[DriverEvent] = []

    def drain(
        self,
        *given: object,
        worker: str | None = None,
        rank: int | None = None,
        host: str | None = None,
        reason: str = "the user asked for it",
    ) -> None:
        """Make a worker (by its id or its current rank) or all workers of a host leave at the next step boundary.

        No step is lost. Slots that become free give their cores back; a single worker's slot is asked for again only
        after the loss of another member. host: an executor's id or its machine's name; this job no longer uses it.

        Raises:
            InvalidInput: not exactly one of worker, rank and host is given by name, or `worker` is no worker id.
        """
        if given or sum(choice is not None for choice in (worker, rank, host)) != 1:
            how = "by name: drain(rank=1), or drain(worker='0-0.1')"
            raise InvalidInput(f"drain takes exactly one of worker, rank and host, {how}.")
        try:
            worker_id = None if worker is None else WorkerId(worker)
        except ValueError as error:
            raise InvalidInput(f"drain: {error}; the status page and the log name the workers.") from None
        now = self._clock.now()
        self._send(DrainRequested(now, reason, worker=worker_id, host=host, rank=rank, by_user=True))

    def cancel(self, reason: str = "the user cancelled it") -> None:
        """End the job: the call that runs it raises `JobCancelled`."""
        self._send(CancelRequested(self._clock.now(), reason))

    def _send(self, event: DriverEvent) -> None:
        with self._lock:
            if not self._jobs:
                self._early.append(event)
            for post in self._jobs.values():
                post(event)


class HandleDiscovery:
    """Passes a handle's requests to one job. Those made after the last job's end wait for the handle's next job."""

    def __init__(self, handle: JobHandle) -> None:
        self._handle = handle

    def start(self, post: Post) -> None:
        handle = self._handle
        with handle._lock:
            early, handle._early = handle._early, []
            handle._jobs[self] = post
            for event in early:
                post(event)

    def close(self) -> None:
        with self._handle._lock:
            self._handle._jobs.pop(self, None)


class HostPoller:
    """Asks `find() -> {host: slots}` again and again. on_answer: called with each answer before the driver gets it, in
    the polling thread; an answer for which it raises counts as failed."""

    def __init__(self, find: Find, clock: Clock, on_answer: OnAnswer = lambda hosts: None) -> None:
        self._find, self._clock, self._on_answer = find, clock, on_answer
        self._closing = threading.Event()
        self._call: Future[Listed] | None = None  # the open question to the function
        self._last: Listed | None = None
        self._thread: threading.Thread | None = None

    def start(self, post: Post) -> None:
        """Ask once, then keep asking in a thread. Raises InvalidInput: the first call failed or gave no answer."""
        try:
            listed = self._poll()
        except Exception as error:  # the user's function may raise anything
            raise InvalidInput(f"host discovery failed at its first call: {error}") from error
        self._handle_answer(listed, post)
        name = "spark-elastic-hosts"
        self._thread = threading.Thread(target=self._watch, args=(post,), name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        if isinstance(self._find, ScriptFinder):
            self._find.kill_script()
        if self._thread is not None:
            self._thread.join(JOIN_TIMEOUT)

    def _watch(self, post: Post) -> None:
        while not self._closing.wait(POLL_INTERVAL):
            try:
                self._handle_answer(self._poll(), post)
            except Exception as error:  # the last answer holds
                if not self._closing.is_set():
                    log.warning("host discovery failed, so its last answer holds: %s", error)

    def _poll(self) -> Listed:
        """One answer; of a call that was slow to answer before, if there is one."""
        call = self._call
        if call is None:
            call, name = Future[Listed](), "spark-elastic-find"
            threading.Thread(target=_call_find, args=(self._find, call), name=name, daemon=True).start()
            self._call = call
        if not wait([call], ANSWER_TIMEOUT).done:
            raise TimeoutError(f"no answer within {ANSWER_TIMEOUT:g} s")
        self._call = None
        return call.result()

    def _handle_answer(self, listed: Listed, post: Post) -> None:
        if listed == self._last:
            return
        self._on_answer(dict(listed))
        self._last = listed
        post(HostsDiscovered(self._clock.now(), listed))


def _call_find(find: Find, call: Future[Listed]) -> None:
    try:
        found = dict(find())
        for host, slots in found.items():
            if not isinstance(host, str) or not isinstance(slots, int) or slots < 0:  # type: ignore[redundant-expr]
                raise InvalidInput(
                    f"discovery returned {host!r}: {slots!r}: give names of hosts and numbers of their slots."
                )
        call.set_result(tuple(found.items()))
    except Exception as error:  # raised again in the thread that polls
        call.set_exception(error)
    except BaseException as error:  # as sys.exit does; that would end the polling thread
        call.set_exception(InvalidInput(f"the function ended with {error!r}: have it return the hosts."))


class ScriptFinder:
    """Runs an executable and reads the hosts off its output, one `host[:slots]` a line. Called by one thread."""

    def __init__(self, command: Sequence[str], parse: Callable[[str], Mapping[str, int]]) -> None:
        self._command = list(command)
        self._parse = parse
        self._script: subprocess.Popen[str] | None = None  # the newest script; None: none was started

    def __call__(self) -> Mapping[str, int]:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        try:
            # A session of its own, so that a script that takes too long ends with all that it has started.
            with subprocess.Popen(self._command, text=True, start_new_session=True, **pipes) as script:  # type: ignore[call-overload]
                self._script = script
                try:
                    output, errors = script.communicate(timeout=ANSWER_TIMEOUT)
                except BaseException:
                    self.kill_script()
                    raise
        except (OSError, subprocess.TimeoutExpired) as error:
            raise InvalidInput(
                f"the host discovery script {self._command[0]} did not run: {error}; give the path of an executable "
                f"file that prints host[:slots] lines within {ANSWER_TIMEOUT:g} s."
            ) from error
        if script.returncode != 0:
            said = (errors.strip() or output.strip())[-500:]
            raise InvalidInput(
                f"the host discovery script {self._command[0]} ended with code {script.returncode}: "
                f"{said or 'no output'}"
            )
        return self._parse(output)

    def kill_script(self) -> None:
        """Kill a script that runs, with all that it has started. Any thread."""
        script = self._script
        if script is not None and script.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(script.pid, signal.SIGKILL)


class CombinedDiscovery:
    """Combines several discoveries."""

    def __init__(self, *discoveries: Discovery) -> None:
        self._discoveries = discoveries

    def start(self, post: Post) -> None:
        for discovery in self._discoveries:
            discovery.start(post)

    def close(self) -> None:
        with ExitStack() as closing:  # an interrupt while one closes does not keep the others from closing
            for discovery in reversed(self._discoveries):
                closing.callback(discovery.close)


def check_requests(hosts: str | Find | None, handle: object) -> None:
    """Raise InvalidInput where `hosts` is the path of no executable file, or `handle` is no JobHandle."""
    if isinstance(hosts, str) and shutil.which(hosts) is None:
        raise InvalidInput(
            f"host_discovery is {hosts!r}, which is no executable file: give the path of one that prints host[:slots] "
            "lines, or a function."
        )
    if handle is not None and not isinstance(handle, JobHandle):
        raise InvalidInput(f"handle must be a spark_elastic.JobHandle; got a {type(handle).__name__}.")


def build_discovery(own: Discovery, hosts: str | Find | None, handle: object, clock: Clock) -> Discovery:
    """A cluster's own discovery, with the user's hosts and requests beside it. Raises as `check_requests`."""
    check_requests(hosts, handle)
    parts = [own]
    if isinstance(hosts, str):
        hosts = ScriptFinder([hosts], lambda text: parse_hosts(text, ALL_SLOTS))
    if hosts is not None:
        parts.append(HostPoller(hosts, clock))
    if isinstance(handle, JobHandle):
        parts.append(HandleDiscovery(handle))
    return CombinedDiscovery(*parts)
