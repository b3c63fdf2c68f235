from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from spark_elastic.clock import SystemClock
from spark_elastic.driver import discovery
from spark_elastic.driver.discovery import (
    CombinedDiscovery,
    HostPoller,
    JobHandle,
    ScriptFinder,
    build_discovery,
    parse_hosts,
)
from spark_elastic.errors import InvalidInput
from spark_elastic.protocol.events import CancelRequested, DrainRequested, DriverEvent, HostsDiscovered
from tests.full_process import refuse_next_thread
from tests.patience import until

CLOCK = SystemClock()


SILENT: Any = SimpleNamespace(start=lambda post: None, close=lambda: None)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "POLL_INTERVAL", 0.02)


def _read_hosts(event: DriverEvent) -> dict[str, int]:
    assert isinstance(event, HostsDiscovered)
    assert event.hosts is not None
    return dict(event.hosts)


def test_discovery_posts_changes_only_and_keeps_its_last_answer_while_it_fails_or_hangs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    a, both, b = {"a": 1}, {"a": 1, "b": 2}, {"b": 2}
    answers: list[Any] = [
        a,
        a,
        OSError("the cluster manager restarts"),
        SystemExit("gone"),
        both,
        both,
        None,
        b,
    ]
    told: list[Mapping[str, int]] = []
    posted: SimpleQueue[DriverEvent] = SimpleQueue()
    late = threading.Event()

    def find() -> dict[str, int]:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, BaseException):
            raise answer
        if answer is None:
            late.wait(30)
            return both
        return answer  # type: ignore[no-any-return]

    polling = HostPoller(find, CLOCK, told.append)
    polling.start(posted.put)
    monkeypatch.setattr(discovery, "ANSWER_TIMEOUT", 0.05)  # from the second call on
    try:
        assert [_read_hosts(posted.get(timeout=10)) for _ in range(2)] == [a, both]
        until(lambda: caplog.text.count("no answer within") > 1)
        assert len(answers) == 1, "a second question beside the open one"
        assert posted.empty()
        late.set()
        assert _read_hosts(posted.get(timeout=10)) == b
    finally:
        late.set()
        polling.close()
    assert told == [a, both, b]
    assert "its last answer holds: the cluster manager restarts" in caplog.text
    assert "ended with SystemExit" in caplog.text


@pytest.mark.scenario("U1")
@pytest.mark.parametrize(
    ("answer", "says"),
    [
        *((each, "names of hosts and numbers of their slots") for each in ({"a": -1}, {"a": "two"}, {3: 1})),
        (RuntimeError("no cluster manager"), "failed at its first call: no cluster manager"),
    ],
)
def test_discovery_results_that_are_no_hosts_are_refused(answer: Any, says: str) -> None:
    def find() -> dict[str, int]:
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[no-any-return]

    with pytest.raises(InvalidInput, match=says):
        HostPoller(find, CLOCK).start(lambda event: None)


def test_a_discovery_script_is_run(tmp_path: Path) -> None:
    path = tmp_path / "hosts.sh"
    path.write_text("#!/bin/sh\necho a:2\necho b\n")
    path.chmod(0o755)
    assert ScriptFinder([str(path)], lambda text: parse_hosts(text, 5))() == {"a": 2, "b": 5}
    path.write_text("#!/bin/sh\necho no quota >&2\nexit 3\n")
    with pytest.raises(InvalidInput, match="ended with code 3: no quota"):
        HostPoller(ScriptFinder([str(path)], parse_hosts), CLOCK).start(lambda event: None)
    with pytest.raises(InvalidInput, match=r"did not run: .*; give the path of an executable file"):
        ScriptFinder([str(tmp_path / "none.sh")], parse_hosts)()


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a:2,b:1", {"a": 2, "b": 1}),
        ("a:2\n# none\nb slots=3  # three\n\n", {"a": 2, "b": 3}),
        ("a,b:1", {"a": 4, "b": 1}),
        ("a\tslots=4\n b  slots=2\t# two\nc\t", {"a": 4, "b": 2, "c": 4}),
        ("", {}),
        ("fd00::12,[fd00::13]:2,[fd00::14]", {"fd00::12": 4, "fd00::13": 2, "fd00::14": 4}),
    ],
)
def test_hosts_are_parsed(text: str, hosts: dict[str, int]) -> None:
    assert parse_hosts(text, 4) == hosts


@pytest.mark.parametrize(
    "text", ["a", "a:x", "a:-1", ":3", "a:1,a:2", "Node1:2,node1:2", "two words:1", "a:²"]
)
def test_a_malformed_list_of_hosts_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        parse_hosts(text)
    for other in ("No hosts found", ":", "a:b:2"):  # also where slots have a default
        with pytest.raises(InvalidInput, match="is no host with a number of slots"):
            parse_hosts(other, 4)


def test_a_slow_script_ends_with_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_elastic.driver.discovery.ANSWER_TIMEOUT", 0.5)
    path = tmp_path / "hosts.sh"
    path.write_text(f"#!/bin/sh\nsleep 60 &\necho $! >{tmp_path}/started\nwait\n")
    path.chmod(0o755)
    with pytest.raises(InvalidInput, match=r"did not run: .* timed out"):
        ScriptFinder([str(path)], parse_hosts)()
    child = (tmp_path / "started").read_text().strip()
    until(
        lambda: not Path(f"/proc/{child}/cmdline").exists() or not Path(f"/proc/{child}/cmdline").read_bytes()
    )


def test_a_job_handle_passes_requests_on_even_those_before_the_start() -> None:
    handle, posted = JobHandle(), list[DriverEvent]()
    handle.drain(rank=2, reason="maintenance")
    watch = build_discovery(SILENT, lambda: {"a": 1}, handle, CLOCK)
    watch.start(posted.append)
    handle.drain(host="a")
    handle.cancel("enough")
    watch.close()
    handle.cancel("too late")
    kinds = [type(event) for event in posted]
    assert kinds == [HostsDiscovered, DrainRequested, DrainRequested, CancelRequested]
    assert isinstance(posted[1], DrainRequested)
    assert (posted[1].rank, posted[1].reason) == (2, "maintenance")


def test_a_job_handle_of_two_jobs_passes_requests_to_both_while_they_run() -> None:
    handle, first, second = JobHandle(), list[DriverEvent](), list[DriverEvent]()
    handle.drain(host="a")
    one, other = (build_discovery(SILENT, None, handle, CLOCK) for _ in range(2))
    one.start(first.append)
    other.start(second.append)
    handle.drain(host="b")
    one.close()
    handle.cancel("enough")
    assert [type(event) for event in first] == [DrainRequested, DrainRequested]
    assert [type(event) for event in second] == [DrainRequested, CancelRequested]
    other.close()


@pytest.mark.parametrize(("given", "choices"), [((), {}), ((), {"rank": 1, "host": "a"}), (("0-0.1",), {})])
def test_a_drain_names_one_target(given: tuple[str, ...], choices: dict[str, object]) -> None:
    with pytest.raises(InvalidInput, match=r"exactly one .* drain\(rank=1\), or drain\(worker='0-0\.1'\)"):
        JobHandle().drain(*given, **choices)  # type: ignore[arg-type]


def test_a_value_that_is_no_job_handle_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"spark_elastic\.JobHandle; got a str"):
        build_discovery(SILENT, None, "handle", CLOCK)


def test_a_discovery_script_that_runs_at_the_jobs_end_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "hosts.sh"
    path.write_text(
        f"#!/bin/sh\necho a\n[ -e {tmp_path}/asked ] && echo $$ >{tmp_path}/started && exec sleep 60\n"
        f"touch {tmp_path}/asked\n"
    )
    path.chmod(0o755)
    poller = HostPoller(ScriptFinder([str(path)], lambda text: parse_hosts(text, 1)), CLOCK)
    poller.start(lambda event: None)
    until((tmp_path / "started").exists)
    until(lambda: bool((tmp_path / "started").read_text()))
    poller.close()
    script = Path(f"/proc/{(tmp_path / 'started').read_text().strip()}/cmdline")
    until(lambda: not script.exists() or not script.read_bytes())


def test_an_interrupt_while_a_discovery_closes_lets_the_others_close() -> None:
    parts = [Mock(close=Mock(side_effect=KeyboardInterrupt)) for _ in range(2)]
    with pytest.raises(KeyboardInterrupt):
        CombinedDiscovery(*parts).close()
    assert all(part.close.called for part in parts)


def test_a_question_for_which_there_is_no_thread_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "ANSWER_TIMEOUT", 5.0)
    polling = HostPoller(lambda: {"a": 1}, CLOCK)
    refuse_next_thread(monkeypatch)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        polling._poll()
    assert dict(polling._poll()) == {"a": 1}
