"""Which hosts may take part, as a function or script of the user's says: asked again and again, posted when it changes.

One thread asks; each call runs in a thread of its own, so that one that hangs holds nobody up.
"""

from __future__ import annotations

import logging
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from spark_elastic.clock import Clock
from spark_elastic.driver.handle import JobHandle
from spark_elastic.driver.hosts import ALL_SLOTS, parse_hosts
from spark_elastic.driver.ports import Discovery, Post
from spark_elastic.errors import InvalidInput
from spark_elastic.protocol.events import HostsListed

log = logging.getLogger("spark_elastic.driver")

ASK_EVERY = 1.0  # seconds
ANSWER_WITHIN = 10.0  # seconds; a later answer to a call is still taken, and until then the last one holds
END_WAIT = 5.0  # seconds for the asking thread at the end

Find = Callable[[], Mapping[str, int]]
Listed = tuple[tuple[str, int], ...]


@dataclass
class _Call:
    """One question: `done` once `answer` or `error` is there."""

    done: threading.Event = field(default_factory=threading.Event)
    answer: Listed = ()
    error: Exception | None = None


class HostPolling:
    """`driver.ports.Discovery` over `find() -> {host: slots}`.

    tell: is told every answer before the driver is, in the asking thread; what it raises counts as a failed answer.
    """

    def __init__(
        self, find: Find, clock: Clock, tell: Callable[[Mapping[str, int]], None] = lambda hosts: None
    ) -> None:
        self._find = find
        self._clock = clock
        self._tell = tell
        self._closing = threading.Event()
        self._call: _Call | None = None
        self._last: Listed | None = None
        self._thread: threading.Thread | None = None

    def start(self, post: Post) -> None:
        """Ask for the first time, and go on asking.

        Raises:
            InvalidInput: the first answer failed or did not come.
        """
        try:
            self._take(self._ask(), post)
        except Exception as error:  # the user's function may raise anything
            raise InvalidInput(f"host discovery failed at its first call: {error}") from error
        self._thread = threading.Thread(
            target=self._watch, args=(post,), name="spark-elastic-hosts", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join(END_WAIT)

    def _watch(self, post: Post) -> None:
        while not self._closing.wait(ASK_EVERY):
            try:
                self._take(self._ask(), post)
            except Exception as error:  # the last answer holds
                if not self._closing.is_set():
                    log.warning("host discovery failed, so its last answer holds: %s", error)

    def _ask(self) -> Listed:
        """One answer; of a call that was slow to answer before, if there is one."""
        call = self._call
        if call is None:
            call = self._call = _Call()
            threading.Thread(
                target=_run, args=(self._find, call), name="spark-elastic-find", daemon=True
            ).start()
        if not call.done.wait(ANSWER_WITHIN):
            raise TimeoutError(f"no answer within {ANSWER_WITHIN:g} s")
        self._call = None
        if call.error is not None:
            raise call.error
        return call.answer

    def _take(self, listed: Listed, post: Post) -> None:
        if listed == self._last:
            return
        self._tell(dict(listed))
        self._last = listed
        post(HostsListed(self._clock.now(), listed))


def _run(find: Find, call: _Call) -> None:
    try:
        found = dict(find())
        for host, slots in found.items():
            if not isinstance(host, str) or not isinstance(slots, int) or slots < 0:  # type: ignore[redundant-expr]
                raise InvalidInput(
                    f"discovery returned {host!r}: {slots!r}: give names of hosts and numbers of their slots."
                )
        call.answer = tuple(found.items())
    except Exception as error:  # handed to whoever asked
        call.error = error
    finally:
        call.done.set()


def script(command: Sequence[str], parse: Callable[[str], Mapping[str, int]]) -> Find:
    """A function that runs an executable and reads the hosts off its output, one `host[:slots]` a line."""

    def find() -> Mapping[str, int]:
        try:
            done = subprocess.run(
                list(command), check=False, capture_output=True, text=True, timeout=ANSWER_WITHIN
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise InvalidInput(f"the host discovery script {command[0]} did not run: {error}") from error
        if done.returncode != 0:
            said = (done.stderr.strip() or done.stdout.strip())[-500:]
            raise InvalidInput(
                f"the host discovery script {command[0]} ended with code {done.returncode}: {said or 'no output'}"
            )
        return parse(done.stdout)

    return find


class FixedHosts:
    """A listing that never changes. tell: as of `HostPolling`."""

    def __init__(
        self,
        hosts: Mapping[str, int],
        clock: Clock,
        tell: Callable[[Mapping[str, int]], None] = lambda hosts: None,
    ) -> None:
        self._hosts = dict(hosts)
        self._clock = clock
        self._tell = tell

    def start(self, post: Post) -> None:
        self._tell(self._hosts)
        post(HostsListed(self._clock.now(), tuple(self._hosts.items())))

    def close(self) -> None:
        """Nothing to end."""


class Together:
    """Several discoveries as one."""

    def __init__(self, *discoveries: Discovery) -> None:
        self._discoveries = discoveries

    def start(self, post: Post) -> None:
        for discovery in self._discoveries:
            discovery.start(post)

    def close(self) -> None:
        for discovery in self._discoveries:
            discovery.close()


def steered(own: Discovery, hosts: str | Find | None, handle: object | None, clock: Clock) -> Discovery:
    """A cluster's own discovery, with the user's hosts and orders beside it.

    hosts, handle: see `ElasticConfig.host_discovery` and `ElasticConfig.handle`.

    Raises:
        InvalidInput: `handle` is not a JobHandle.
    """
    parts = [own]
    if hosts is not None:
        find = script([hosts], lambda text: parse_hosts(text, ALL_SLOTS)) if isinstance(hosts, str) else hosts
        parts.append(HostPolling(find, clock))
    if handle is not None:
        if not isinstance(handle, JobHandle):
            raise InvalidInput(f"handle must be a spark_elastic.JobHandle; got a {type(handle).__name__}.")
        parts.append(handle.of_a_job())
    return parts[0] if len(parts) == 1 else Together(*parts)
