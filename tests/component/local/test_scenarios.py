"""Horovod's elastic scenarios E1 to E8 on real processes, through the command line tool.

Where a host of several slots has one that fails, only that slot is left out for a while, not its host.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.component.local.watched import ObservedJob, start_watched
from tests.scenarios import Fault

pytestmark = [pytest.mark.native, pytest.mark.timeout(180)]

FIXED = ("-np", "4", "--min-np", "1", "-H", "localhost:2,127.0.0.2:2")
LONG = ("--blacklist-cooldown-range", "60", "60")


def _script(folder: Path, hosts: str) -> str:
    """A discovery script that prints what the file `hosts` says."""
    _list(folder, hosts)
    path = folder / "discover.sh"
    path.write_text(f"#!/bin/sh\ncat {folder}/hosts\n")
    path.chmod(0o755)
    return str(path)


def _list(folder: Path, hosts: str) -> None:
    draft = folder / "hosts.draft"
    draft.write_text(hosts.replace(",", "\n") + "\n")
    draft.rename(folder / "hosts")


def _check_no_step_is_lost(job: ObservedJob) -> None:
    """Rank 0's steps follow each other over all worlds."""
    steps = [line["step"] for line in job.lines() if line["rank"] == 0]
    assert steps == list(range(1, len(steps) + 1))


def _has_same_rank(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether these lines are of the same rank of the same world."""
    return all(one[name] == other[name] for name in ("generation", "rank"))


@pytest.mark.scenario("E1")
def test_hosts_added_and_removed(tmp_path: Path, fault: Fault) -> None:
    script = _script(tmp_path, "localhost:1")
    options = ("-np", "1", "--max-np", "2", "--host-discovery-script", script)
    with start_watched(tmp_path, fault, *options) as job:
        leader = job.await_size(1)[0]["pid"]
        fault(_list, tmp_path, "localhost:1,127.0.0.2:1")
        both = job.await_size(2)
        assert [line["host"] for line in both] == ["localhost", "127.0.0.2"]
        assert both[0]["pid"] == leader
        fault(_list, tmp_path, "127.0.0.2:1")
        assert job.await_size(1)[0]["pid"] == both[1]["pid"]
        assert job.stop() == 0
        assert job.sizes() == [1, 2, 1]
        _check_no_step_is_lost(job)


@pytest.mark.scenario("E2")
def test_single_rank_failure_with_discovery(tmp_path: Path, fault: Fault) -> None:
    script = _script(tmp_path, "localhost:2,127.0.0.2:2")
    options = ("-np", "4", "--min-np", "1", *LONG, "--host-discovery-script", script)
    with start_watched(tmp_path, fault, *options) as job:
        before = job.await_size(4)
        fault(job.order, 0, "raise")
        after = job.await_size(3)
        assert [line["pid"] for line in after] == [line["pid"] for line in before[1:]]
        assert job.stop() == 0
        assert job.sizes() == [4, 3]


@pytest.mark.scenario("E3")
@pytest.mark.parametrize(("how", "sizes"), [("exit", [4, 3]), ("kill", [4, 3, 4])])
def test_fault_tolerance_without_scaling(tmp_path: Path, fault: Fault, how: str, sizes: list[int]) -> None:
    """A crash keeps its slot out for the cooldown; a process that was killed is followed by its spare."""
    with start_watched(tmp_path, fault, *FIXED, *LONG) as job:
        before = job.await_size(4)
        fault(job.order, 0, how)
        job.wait_for(lambda: len(job.sizes()) > 1, "second world")
        survivor = job.await_size(sizes[-1])[0]["pid"]
        assert survivor == before[1]["pid"]
        ended = "killed by signal 9" if how == "kill" else "exit code 1"
        job.wait_for(lambda: ended in job.stderr(), f"line with {ended!r}")
        assert job.stop() == 0
        assert set(job.sizes()) <= set(sizes)  # the spare may be back before three took a step
        assert job.sizes()[-1] == sizes[-1]


@pytest.mark.scenario("E4")
def test_all_ranks_failure(tmp_path: Path, fault: Fault) -> None:
    with start_watched(tmp_path, fault, *FIXED) as job:
        job.await_size(4)
        fault(job.order, "all", "raise")
        assert job.wait_for_exit() == 1
        assert "WorkerFailed" in job.stderr()
        assert "ordered of process" in job.stderr()


@pytest.mark.scenario("E5")
def test_all_hosts_blacklisted(tmp_path: Path, fault: Fault) -> None:
    """The only slot of each host fails: nothing is gained by waiting for the timeout."""
    hosts = ("-np", "2", "--min-np", "1", "-H", "localhost:1,127.0.0.2:1", "--elastic-timeout", "30")
    with start_watched(tmp_path, fault, *hosts, *LONG) as job:
        job.await_size(2)
        fault(job.order, "all", "exit")
        assert job.wait_for_exit() == 1
        assert "all hosts are blacklisted since their workers failed: 127.0.0.2, localhost" in job.stderr()


@pytest.mark.scenario("E6")
def test_min_hosts_timeout(tmp_path: Path, fault: Fault) -> None:
    options = ("-np", "2", "--min-np", "2", "-H", "localhost:2", "--elastic-timeout", "8")
    with start_watched(tmp_path, fault, *options, *LONG) as job:
        job.await_size(2)
        fault(job.order, 1, "exit")
        assert job.wait_for_exit() == 1
        assert "1 workers came within 8 s and 2 are needed (min_workers)" in job.stderr()
        assert "cooling down:" in job.stderr()


@pytest.mark.scenario("E7")
def test_reset_limit(tmp_path: Path, fault: Fault) -> None:
    options = ("-np", "4", "--min-np", "1", "-H", "localhost:4", "--reset-limit", "2")
    with start_watched(tmp_path, fault, *options, *LONG) as job:
        for size in (4, 3, 2):
            job.await_size(size)
            fault(job.order, size - 1, "exit")
        assert job.wait_for_exit() == 1
        assert "(reset_limit 2)" in job.stderr()


@pytest.mark.scenario("E8")
def test_resurrecting_blacklisted_hosts_exponential_backoff(tmp_path: Path, fault: Fault) -> None:
    options = ("-np", "2", "--min-np", "1", "-H", "localhost:1,127.0.0.2:1")
    away = []
    with start_watched(tmp_path, fault, *options, "--blacklist-cooldown-range", "1.5", "20") as job:
        for _ in range(2):
            before = job.await_size(2)[1]
            fault(job.order, 1, "exit")
            after = job.await_size(2, after=before["generation"])[1]
            assert after["host"] == before["host"]
            left = max(line["wall"] for line in job.lines() if _has_same_rank(line, before))
            back = min(line["wall"] for line in job.lines() if _has_same_rank(line, after))
            away.append(back - left)
        assert job.stop() == 0
        assert job.sizes() == [2, 1, 2, 1, 2]
    assert away[0] > 1.0
    assert away[1] > 2.5
