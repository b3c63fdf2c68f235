"""What holds for every test: repeatable examples, and nothing left behind."""

from __future__ import annotations

import gc
import os
import sys
import time
import uuid
from collections.abc import Generator, Iterator

import pytest
from hypothesis import settings

from tests import scenarios
from tests.devices import initialize_cuda, use_device
from tests.leaks import SETTLE_SECONDS, SessionOwned, describe_process, find_marked, leaked, take
from tests.sources import LIGHT_START

# The same examples in each run, and no deadline: a busy machine is no failure.
settings.register_profile("house", deadline=None, derandomize=True, database=None)
settings.load_profile("house")

# Workers are killed in their first seconds here, which a spare is made for later elsewhere.
os.environ.setdefault("SPARK_ELASTIC_SPARE_AFTER", "0")

os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(LIGHT_START)]))
sys.path.append(str(LIGHT_START))  # which a slot's process gets
THRESHOLDS = gc.get_threshold()
gc.set_threshold(20_000)  # as processes that tests start have it: imports are a third shorter


def pytest_addoption(parser: pytest.Parser) -> None:
    what = "play the scenarios without their faults: each must then fail"
    parser.addoption("--without-faults", action="store_true", help=what)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without faults only what has some is played."""
    if config.getoption("--without-faults"):
        marked = [item for item in items if scenarios.numbers(item)]
        played = [item for item in marked if "fault" in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=[item for item in items if item not in played])
        items[:] = played


def pytest_collection_finish() -> None:
    """What imported frameworks are made of stays: a check for leaks need not look through it each time, nor the kernel
    fetch memory back that was cold for many minutes."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    scenarios.invert_report(item, report)
    return report


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A device of `DEVICES`, given as an indirect parameter, on which this process trains. Name it before `fault`."""
    use_device(request.param, monkeypatch)
    return str(request.param)


@pytest.fixture
def fault(request: pytest.FixtureRequest) -> Iterator[scenarios.Fault]:
    """What a scenario does to a job goes through this: `fault(os.kill, pid, SIGKILL)`."""
    yield from scenarios.provide_fault(request)


@pytest.fixture(scope="session")
def session_owned() -> SessionOwned:
    """Where a session-scoped fixture adopts its processes, ports and threads; no test may use it for its own."""
    return SessionOwned()


@pytest.fixture(scope="session", autouse=True)
def no_orphan_of_the_session() -> Iterator[str]:
    """Every process that the tests start, however deep, carries a mark; none may outlive the session's fixtures."""
    mark = f"TESTS_OF_SPARK_ELASTIC={uuid.uuid4().hex}"
    name, _, value = mark.partition("=")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, value)
        yield mark
    deadline = time.monotonic() + SETTLE_SECONDS
    while (orphans := find_marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    if orphans:
        names = [describe_process(process) for process in orphans]
        for process in orphans:
            process.kill()
        pytest.fail("processes outlived the tests:\n  " + "\n  ".join(names), pytrace=False)


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest, session_owned: SessionOwned) -> Iterator[None]:
    """Fail a test that leaves a thread, a child process or a descriptor; closing ones get a moment to end."""
    if request.node.get_closest_marker("gpu"):
        initialize_cuda()  # the driver's threads and descriptors stay
    before = take(session_owned)
    yield
    found = leaked(before, session_owned)
    if found:
        pytest.fail("the test left behind:\n  " + "\n  ".join(found), pytrace=False)
