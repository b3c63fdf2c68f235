"""A slot's agent with real training processes, under a driver that is the test."""

from __future__ import annotations

import atexit
import ctypes
import errno
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest

from spark_elastic.clock import SystemClock
from spark_elastic.data.scratch import make_scratch_folder
from spark_elastic.protocol.events import is_heartbeat
from spark_elastic.protocol.messages import (
    Heartbeat,
    RegisterSlot,
    WorkerExited,
    WorkerStarted,
)
from spark_elastic.protocol.types import SlotId, SlotIdentity, SlotSpec
from spark_elastic.rendezvous.messages import MAX_BODY_BYTES
from spark_elastic.testing.fakes import CountingProgram
from spark_elastic.worker import child, slot_agent
from spark_elastic.worker.child import CLOSE_WAIT, Child
from spark_elastic.worker.forking import fork_server_cache
from spark_elastic.worker.pickling import pickle_for_workers
from spark_elastic.worker.slot_agent import SlotAgent
from tests.component.injected_faults import is_training_process
from tests.component.rendezvous.driver_side import ATTEMPT, KEY, Driver, start_driver
from tests.patience import until

pytestmark = pytest.mark.native

SLOT = SlotId("4-0")
MUCH = MAX_BODY_BYTES + 1
CLOCK = SystemClock()


@pytest.fixture
def driver() -> Iterator[Driver]:
    made = start_driver()
    yield made
    made.close()


@pytest.fixture
def no_fork_server() -> Iterator[None]:
    """One that a slot has kept is not left behind."""
    yield
    fork_server_cache.close()


def serve(
    driver: Driver,
    prepare: Callable[[], object],
    play: Callable[[], Any],
    spare_after: float = 0.0,
    shortage: Callable[[int, int | None, int | None], str | None] = lambda worker, spare, server: None,
    imports: tuple[str, ...] = (),
    end: str | None = "enough",
) -> None:
    """Run a slot, whose program calls `prepare` as it is prepared, in this thread, which must be the main one.

    `play` acts as the driver in another thread. end: why the slot is released after it; None: it is already.
    """
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    payload = pickle_for_workers(Prepared(prepare))

    spec = SlotSpec(
        address=driver.server.address,
        key=KEY,
        attempt=ATTEMPT,
        collective_timeout=20.0,
        spare_after=spare_after,
        imports=imports,
        fork_workers=bool(imports),
        network_interface="lo",
    )
    # Where other machines may not reach it: workers say the address of the interface.
    identity = SlotIdentity(slot=SLOT, host="host-4", address="192.0.2.1")

    def play_and_release() -> None:
        try:
            play()
        finally:
            if end is not None:
                driver.server.release_slot(SLOT, end)

    played = driver.call_in_thread(play_and_release)
    with driver.client() as client:
        ended = SlotAgent(spec, identity, payload, client, CLOCK, find_shortage=shortage).run()
    played.result(20.0)
    assert end is None or ended == end


def await_children(count: int) -> list[psutil.Process]:
    """The slot's processes, oldest first, once there are so many. Other children are of other tests' fixtures."""

    def find_all() -> list[psutil.Process]:
        living = [child for child in psutil.Process().children() if is_training_process(child)]
        return living if len(living) == count else []

    return sorted(until(find_all, 60.0), key=lambda child: child.create_time())


class Prepared(CountingProgram):
    """Calls a function as it is prepared."""

    def __init__(self, prepare: Callable[[], object]) -> None:
        super().__init__(1)
        self.prepare = prepare  # type: ignore[assignment,method-assign]


def announce() -> None:
    sys.stdout.write("prepared\n")


@pytest.mark.timeout(180)
@pytest.mark.parametrize("imports", [(), ("json",)], ids=["spawned", "forked"])
@pytest.mark.usefixtures("no_fork_server")
def test_a_warm_spare_follows_each_crash(
    driver: Driver, imports: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    spares: list[int] = []
    addresses: set[str] = set()
    start = Child.start

    def start_and_note(spec: SlotSpec, identity: SlotIdentity, *arguments: Any) -> Child:
        addresses.add(identity.address)
        return start(spec, identity, *arguments)

    monkeypatch.setattr(Child, "start", start_and_note)

    def play() -> None:
        driver.await_event(RegisterSlot)
        for number in (1, 2, 3):
            assert driver.await_event(WorkerStarted).worker == f"{SLOT}.{number}"
            worker, spare = await_children(2)
            assert number == 1 or worker.pid == spares[-1], "the worker was not made of the spare"
            spares.append(spare.pid)
            while driver.logs.get(timeout=20.0).worker:
                continue  # the spare, which is no worker yet, is the one to be prepared
            worker.kill()
            exited = driver.await_event(WorkerExited)
            assert (exited.worker, exited.reason) == (f"{SLOT}.{number}", "killed by signal 9")

    serve(driver, announce, play, imports=imports)
    assert len(set(spares)) == 3
    assert addresses == {"127.0.0.1"}, "not that of the job's network interface"
    assert (fork_server_cache.pid is not None) is bool(imports)


def crash() -> None:
    ctypes.string_at(0)


def test_a_crash_in_native_code_is_reported_with_its_python_frames(driver: Driver) -> None:
    def play() -> None:
        exited = driver.await_event(WorkerExited)
        assert exited.reason == "killed by signal 11"
        innermost, caller, *_ = exited.crashed_at.split("; called from ")
        assert innermost.endswith(", in string_at")
        assert caller.startswith("test_slot_agent.py, line ")
        assert caller.endswith(", in crash")

    serve(driver, crash, play, spare_after=1000.0)


def make_folder() -> None:
    sys.folder = make_scratch_folder()  # type: ignore[attr-defined] # as long as the process lives
    sys.stdout.write(f"{sys.folder.__enter__()}\n")  # type: ignore[attr-defined]


def test_no_worker_leaves_a_temporary_folder_behind(driver: Driver) -> None:
    folders: list[Path] = []

    def play() -> None:
        for number in (1, 2):
            assert driver.await_event(WorkerStarted).worker == f"{SLOT}.{number}"
            (line,) = driver.logs.get(timeout=20.0).lines
            folders.append(Path(line))
            assert folders[-1].is_dir()
            if number == 1:
                await_children(1)[0].kill()
                driver.await_event(WorkerExited)

    serve(driver, make_folder, play, spare_after=1000.0)
    assert len(set(folders)) == 2
    assert not any(folder.exists() for folder in folders)


def test_a_lack_of_memory_or_of_a_spare_is_told_once(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_agent, "MEMORY_CHECK_EVERY", 0.05)
    monkeypatch.setattr(slot_agent, "SPARE_RETRY", 0.05)
    starts: list[OSError | None] = [None, OSError(errno.EMFILE, "Too many open files"), None]
    start = child.start_process

    def start_unless_full(*arguments: Any) -> Any:
        if (error := starts.pop(0)) is not None:
            raise error
        return start(*arguments)

    monkeypatch.setattr(child, "start_process", start_unless_full)
    looks: list[tuple[int, int | None]] = []

    def shortage(worker: int, spare: int | None, server: int | None) -> str | None:
        looks.append((worker, spare))
        return "it takes too much" if spare is not None else None

    def play() -> None:
        driver.await_event(RegisterSlot)
        worker, spare = await_children(2)
        said = ""
        while "it takes too much" not in said:
            said += str(driver.logs.get(timeout=20.0).lines)
        assert "no spare was started: OSError: [Errno 24]" in said
        assert {pid for pid, _ in looks} == {worker.pid}
        assert looks[-1] == (worker.pid, spare.pid)

    serve(driver, announce, play, shortage=shortage)
    assert len([spare for _, spare in looks if spare is not None]) == 1


def leave_orphan() -> None:
    """Start a process that keeps the worker's output open after the worker's death."""
    left = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    sys.stdout.write(f"left behind: {left.pid}\n")


def test_processes_that_a_worker_leaves_behind_do_not_block_its_slot(driver: Driver) -> None:
    """Data loaders and the like outlive a killed worker for a while; its slot ends without them."""
    left: list[psutil.Process] = []
    released: list[float] = []

    def play() -> None:
        driver.await_event(WorkerStarted)
        while len(left) < 2:  # the worker's and the spare's
            lines = driver.logs.get(timeout=20.0).lines
            left.extend(psutil.Process(int(line.rpartition(" ")[2])) for line in lines)
        released.append(CLOCK.now())

    try:
        serve(driver, leave_orphan, play)
        assert CLOCK.now() - released[0] < 2 * CLOSE_WAIT + 5.0
        assert all(process.is_running() for process in left)
    finally:
        for process in left:
            process.kill()


def print_much() -> None:
    """A line that is longer than a message may be, and so many lines that 500 are as well."""
    sys.stdout.write("x" * MUCH + "\n" + f"{'y' * 20_000}\n" * 500 + "the end\n")
    sys.exit(3)


def test_all_output_of_a_worker_arrives_whatever_its_amount(driver: Driver) -> None:
    told = ""

    def play() -> None:
        """The slot is released once all is there: what is still on its way then has a few seconds only."""
        nonlocal told
        while not told.endswith("the end"):
            told += "".join(driver.logs.get(timeout=20.0).lines)

    serve(driver, print_much, play)
    assert told == "x" * MUCH + "y" * 10_000_000 + "the end"


def exit_slowly() -> None:
    atexit.register(print, "goodbye")
    atexit.register(time.sleep, 0.5)
    announce()


def test_the_last_lines_of_a_stopped_worker_arrive(driver: Driver) -> None:
    def play() -> None:
        worker = driver.await_event(WorkerStarted).worker
        driver.logs.get(timeout=20.0)
        driver.server.stop_worker(worker, "the job is over", False)

    serve(driver, exit_slowly, play, spare_after=60.0, end="the job is over")
    assert driver.logs.get(timeout=20.0).lines == ("goodbye",)


def test_a_refused_slot_starts_no_worker(driver: Driver) -> None:
    driver.server.end("the job is over")
    serve(driver, announce, lambda: None, end=None)
    driver.await_event(RegisterSlot)
    assert driver.events.empty()


def test_r14_a_slot_on_an_unfit_host_starts_no_worker_and_waits_for_its_release() -> None:
    driver = start_driver(admit=lambda facts: "host-4 has no torch")

    def play() -> None:
        driver.await_event(RegisterSlot)
        assert driver.await_event(Heartbeat).worker is None  # else it would be taken for ended

    try:
        serve(driver, announce, play, end="the first attempt is gone")
        assert all(is_heartbeat(event) for event in driver.events.queue)
    finally:
        driver.close()
