"""The numbered scenarios that the project is held to, and the switch that turns their faults off.

A test plays a scenario by `@pytest.mark.scenario("E3")` and does every fault through the fixture `fault`. Under
`--without-faults` that fixture does nothing, and a scenario's test that passes all the same fails: it saw nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

LAST = {"E": 8, "S": 14, "U": 3, "G": 19}
IDS = tuple(f"{letter}{number}" for letter, last in LAST.items() for number in range(1, last + 1))
# Nothing goes wrong in these: happy runs, units without a process, versions, sizes.
FAULTLESS = frozenset({"S1", "U1", "U2", "U3", "G10", "G11", "G16", "G17", "G19"})


class Fault:
    """Does what a scenario does to a job: `fault(os.kill, pid, SIGKILL)`. Switched off, it returns None instead."""

    def __init__(self, on: bool) -> None:
        self.on = on
        self.done = 0

    def __call__(self, act: Callable[..., T], *arguments: Any, **keywords: Any) -> T | None:
        if not self.on:
            return None
        self.done += 1  # at its start: an act in a thread may outlast the test's body
        return act(*arguments, **keywords)


def numbers(item: pytest.Item) -> tuple[str, ...]:
    """The scenarios that a test plays."""
    return tuple(name for mark in item.iter_markers("scenario") for name in mark.args)


def invert_report(item: pytest.Item, report: pytest.TestReport) -> None:
    """Turn a scenario's report around where its faults are off, and a skip into a failure where they are on."""
    mine = numbers(item)
    if not mine:
        return
    if report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"scenario {', '.join(mine)} was skipped: {report.longrepr}"
    elif _is_unfaulted(item) and report.when == "call":
        if report.passed:
            report.outcome = "failed"
            report.longrepr = f"scenario {', '.join(mine)} passes with its faults switched off"
        else:
            report.outcome, report.longrepr = "passed", None
    elif _is_unfaulted(item) and report.failed:
        report.outcome, report.longrepr = "passed", None  # what the failed test left behind is no news


def _is_unfaulted(item: pytest.Item) -> bool:
    return bool(item.config.getoption("--without-faults")) and "fault" in getattr(item, "fixturenames", ())


def provide_fault(request: pytest.FixtureRequest) -> Iterator[Fault]:
    """The fixture's body. With faults on, a test that takes it must use it."""
    fault = Fault(not request.config.getoption("--without-faults"))
    yield fault
    if fault.on and not fault.done and getattr(request.node, "passed", True):
        pytest.fail("the test asked for `fault` and did none", pytrace=False)
