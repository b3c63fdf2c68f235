"""How a worker's loop handles what its program and the driver do."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from elastic_collectives import Endpoint
from spark_elastic.clock import SystemClock
from spark_elastic.errors import DriverUnreachable
from spark_elastic.protocol import commands as do
from spark_elastic.protocol import events as on
from spark_elastic.protocol.commands import Exit
from spark_elastic.protocol.events import UserRaised
from spark_elastic.protocol.messages import (
    Acknowledged,
    NextWorld,
    RequestNextWorld,
    WorkerDone,
    WorkerRaised,
)
from spark_elastic.protocol.types import (
    DRIVER_SILENT_EXIT_CODE,
    INITIAL_VERSION,
    START,
    Fence,
    Phase,
    Position,
    SlotId,
    WorkerId,
    WorkerIdentity,
    World,
    WorldView,
)
from spark_elastic.rendezvous.messages import (
    Addresses,
    FindAddresses,
    GetValues,
    Report,
    Values,
    WatchWorker,
    WorkerUpdate,
)
from spark_elastic.worker.context import WaitRecorder, WorkerContext, set_context
from spark_elastic.worker.loop import DriverWatch, GroupConnector, WorkerLoop
from spark_elastic.worker.program import Completed, WorkerExit, WorkerHandle
from tests.unit.protocol.driver_bench import make_world
from tests.worlds import use_context_per_thread


def build_loop(program: Any = None, driver: Any = None) -> WorkerLoop:
    """Its watch is not started."""
    driver = driver or SimpleNamespace()
    identity, clock = WorkerIdentity(worker=WorkerId("1-0.1"), slot=SlotId("1-0")), SystemClock()
    watch = DriverWatch(identity.worker, driver, clock, 30.0)
    endpoint: Any = SimpleNamespace(address="127.0.0.1:7000")
    groups = GroupConnector(endpoint, 5.0, WaitRecorder())
    return WorkerLoop(identity, program, driver, clock, watch, groups)


def _world(generation: int) -> WorldView:
    return make_world(generation, {"1-0.1": None}).view_of("1-0.1")


class _Group:
    def __init__(self) -> None:
        self.aborted: list[str] = []
        self.abort = self.aborted.append


def test_r10_a_late_abort_does_not_abort_the_next_world() -> None:
    """The main thread forms the next world between the driver's message and the abort."""
    loop, groups = build_loop(), [_Group(), _Group()]

    def enter_world(generation: int) -> None:
        loop._group, loop._world = groups[generation - 1], _world(generation)  # type: ignore[assignment]

    for event in (on.Warm(0), on.WorldReceived(0, _world(1)), on.GroupFormed(0, Fence(1, 1))):
        loop._post(event)
    enter_world(1)
    post = loop._post

    def post_late(event: on.WorkerEvent) -> tuple[do.WorkerCommand, ...]:
        commands = post(event)
        enter_world(2)
        return commands

    loop._post = post_late  # type: ignore[method-assign]
    loop.handle_event(on.AbortReceived(0, Fence(1, 1), "world 1 is over"))
    assert groups[1].aborted == []


def test_a_worker_that_leaves_names_its_newest_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever thread's event is the next one; and once it has left, it stands where it said."""
    use_context_per_thread(monkeypatch)
    loop, fence = build_loop(), Fence(1, 1)
    loop._world = _world(1)
    set_context(WorkerContext("1-0.1", world=loop._world))  # type: ignore[arg-type]
    for event in (on.Warm(0), on.WorldReceived(0, _world(1)), on.GroupFormed(0, fence)):
        loop._post(event)
    for step in range(3):
        loop._handle.report_position(Position(0, Phase.TRAIN, step))
    (asks,) = (command for command in loop._post(on.Boundary(0, fence, "")) if isinstance(command, do.Ask))
    assert asks.message.position == Position(0, Phase.TRAIN, 2)
    loop._handle.report_position(Position(0, Phase.TRAIN, 7))
    loop._post(on.AbortReceived(0, fence, "over"))
    assert loop._state.position == Position(0, Phase.TRAIN, 2)


def test_r21_a_newcomer_that_returns_before_the_loop_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    use_context_per_thread(monkeypatch)
    asked: list[Any] = []

    def ask(request: Any, *timing: float) -> Any:
        asked.append(request)
        return Values((b"1",)) if isinstance(request, GetValues) else Acknowledged()

    def run(world: World, group: Any, handle: WorkerHandle) -> Completed:
        assert (world.size, group.size, group.rank) == (1, 1, 0)
        return Completed("null")

    with Endpoint(b"key") as endpoint:
        program = SimpleNamespace(run=run, close=lambda: None, may_have_loop=True)
        loop = build_loop(program, SimpleNamespace(ask=ask))
        loop.groups = GroupConnector(endpoint, 5.0, WaitRecorder())
        assert loop.run() == 1
    assert [type(request) for request in asked] == [GetValues, WorkerRaised]
    told = "the function returned before its elastic loop, in which the other workers train"
    assert told in asked[1].traceback


def _run_program(raised: BaseException | None) -> on.WorkerEvent:
    def run(*world: object) -> Completed:
        if raised is not None:
            raise raised
        return Completed("x" * 9_000_000)

    loop = build_loop(SimpleNamespace(run=run))
    loop._group, loop._world = SimpleNamespace(), _world(1)  # type: ignore[assignment]
    return loop._run_program(do.Run("", _world(1), None))


@pytest.mark.parametrize(
    ("raised", "says"),
    [
        (asyncio.CancelledError("why"), "CancelledError: why"),
        (KeyboardInterrupt("why"), "KeyboardInterrupt: why"),
        (GeneratorExit("why"), "GeneratorExit: why"),
        (BaseException("why"), "BaseException: why"),
        (None, "InvalidInput: what training returned takes 8.6 MiB"),  # the server would refuse the message
    ],
)
def test_exceptions_of_user_code_of_any_class_are_told(raised: BaseException | None, says: str) -> None:
    """Otherwise it would be a mere exit code, and be retried until the failure budget is used up."""
    event = _run_program(raised)
    assert isinstance(event, on.UserRaised)
    assert says in event.traceback
    with pytest.raises(WorkerExit):
        _run_program(WorkerExit(0))


def test_r04_a_worker_asks_for_no_address_that_it_knew_in_the_world_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, told = list[tuple[int, ...]](), list[list[bytes]]()

    def ask(request: Any, *timing: float) -> Any:
        match request:
            case FindAddresses():
                asked.append(request.ranks)
                return Addresses(tuple(f"host-{rank}" for rank in request.ranks))
            case RequestNextWorld(fence=None):
                return NextWorld(view(1))
            case RequestNextWorld():
                return NextWorld(view(2), runs=((-1, 1), (0, 1), (2, 1)))
        return Acknowledged()

    def connect(_: Any, rank: int, size: int, fence: Any, exchange: Any, **options: Any) -> Any:
        told.append(exchange(b""))
        assert options["find_addresses"]([2, 0]) == ("host-2", "host-0")
        return _Group()

    def view(generation: int) -> WorldView | None:
        return make_world(generation, {f"{number}-0.1": None for number in (1, 2, 3)}).view_of("1-0.1")

    monkeypatch.setattr("spark_elastic.worker.loop.connect", connect)
    loop = build_loop(driver=SimpleNamespace(ask=ask, now=lambda: 0.0))
    loop.groups.wait_recorder = SimpleNamespace(  # type: ignore[assignment]
        watch_group=lambda group: group, record_wait=contextlib.nullcontext
    )
    for fence in (None, Fence(1, 1)):
        received = loop._ask(RequestNextWorld(WorkerId("1-0.1"), fence))
        loop.groups.connect(received.world, loop._addresses, loop.driver)  # type: ignore[union-attr]
    assert told == [[b"", b"", b""], [b"", b"host-0", b"host-2"]]
    assert asked == [(2, 0), (2, 0)]


@pytest.mark.parametrize("reason", ["", "worker 2-0.1 is lost"])
def test_an_abort_names_its_reason_or_where_it_stands(reason: str) -> None:
    """In a large world the server tells rank 0 alone."""
    aborts = list[on.AbortReceived]()
    updates = iter([WorkerUpdate(ended_fence=Fence(1, 1), end_reason=reason)])

    def handle(event: Any) -> None:
        aborts.append(event)
        watch.close()

    driver: Any = SimpleNamespace(ask=lambda *request: next(updates), last_answered_at=lambda: 0.0)
    watch = DriverWatch(WorkerId("1-0.1"), driver, SystemClock(), 30.0)
    watch._watch(handle)
    assert [event.reason for event in aborts] == [
        reason or "the driver ended this world, and its log says why"
    ]


def test_the_newest_metrics_are_sent_before_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_elastic.worker.loop.REPORT_EVERY", 1000.0)
    heard: list[Any] = []
    over = threading.Event()

    def ask(request: Any, *time: float) -> Any:
        match request:
            case WatchWorker():
                over.wait(30)
                return WorkerUpdate(INITIAL_VERSION)
            case Report():
                heard.append(request.numbers)
                return Acknowledged()
        heard.append(type(request))
        return NextWorld(stop="the job is over")

    driver: Any = SimpleNamespace(ask=ask, last_answered_at=lambda: 0.0)
    loop = build_loop(driver=driver)
    loop.watch.start(loop.handle_event)
    loop._handle.report_metrics({"val_loss": 0.5})
    loop._execute(do.Ask("", WorkerDone("1-0.1", Fence(1, 1), START, "result")))
    loop.watch.close()
    over.set()
    assert heard == [{"val_loss": 0.5}, WorkerDone]


def test_r12_a_silent_driver_ends_the_worker_and_does_not_hide_an_exception_of_user_code() -> None:
    """The main thread, which waits for a world, may time out before the watching thread does."""
    driver: Any = SimpleNamespace(ask=Mock(side_effect=DriverUnreachable("The driver does not answer.")))
    assert build_loop(SimpleNamespace(close=lambda: None), driver).run() == DRIVER_SILENT_EXIT_CODE
    raised = UserRaised(0.0, "f", "Traceback: the user's\n")
    assert build_loop(driver=driver)._advance(raised) == Exit("user code raised", 1)
