"""What ranks ask for, in one order whatever order each asks in; what travels together; errors, joins and the end."""

from __future__ import annotations

import faulthandler
import logging
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, strategies

from elastic_collectives import CollectiveError, CollectiveTimeout, Group, MismatchError
from spark_elastic.clock import SystemClock
from spark_elastic.config import OperationConfig
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.process_sets import SingleProcessGroup
from spark_elastic.horovod.ops import negotiation
from spark_elastic.horovod.ops.negotiation import Message, Negotiation, OperationRequest, RoundResult
from spark_elastic.horovod.ops.operation_queue import (
    Operation,
    OperationQueue,
    Task,
    fuse_tasks,
    make_neutral_arrays,
)
from tests.fake_group import FakeFabric
from tests.patience import until
from tests.reductions import reduce_parts

CLOCK = SystemClock()
PATIENCE = 45.0  # seconds; where a rank stays away for a third of them, the stacks of all threads are printed


DTYPES = ("bool", "uint8", "int64", "float16", "bfloat16", "float32", "float64")


def reduction(name: str | None, length: int = 4, dtype: str = "float32", op: str = "sum") -> OperationRequest:
    return OperationRequest("allreduce", name, (dtype,), ((length,),), op)


def make_queue(group: Group, limits: OperationConfig | None = None) -> OperationQueue:
    return OperationQueue(group, CLOCK, limits or OperationConfig())


def submit_sum(
    queue: OperationQueue, name: str | None, array: np.ndarray[Any, Any], op: str = "sum"
) -> Operation:
    return queue.submit(OperationRequest("allreduce", name, (array.dtype.name,), (array.shape,), op), [array])


def on_ranks(
    size: int,
    work: Callable[[OperationQueue], Any],
    limits: OperationConfig | None = None,
    members: Sequence[int] | None = None,
) -> list[Any]:
    """`work` on every rank, or on these members of the world; what it returned, or the CollectiveError it raised."""
    fabric = FakeFabric(size, timeout=PATIENCE)
    groups = fabric.groups if members is None else [fabric.group(r).subgroup(1, members) for r in members]
    queues = [make_queue(group, limits) for group in groups]
    all_done = threading.Barrier(len(groups))

    def work_as(queue: OperationQueue) -> Any:
        try:
            return work(queue)
        except CollectiveError as error:
            return error
        finally:
            all_done.wait(PATIENCE)

    faulthandler.dump_traceback_later(PATIENCE / 3)
    try:
        with ThreadPoolExecutor(len(groups)) as pool:
            return list(pool.map(work_as, queues))
    finally:
        faulthandler.cancel_dump_traceback_later()
        for queue in queues:
            queue.close()


def poll_until_done(operation: Operation) -> None:
    """As `wait`, for who only asks."""
    until(operation.poll)
    operation.wait()


@pytest.mark.parametrize("end", [Operation.wait, poll_until_done])
def test_ranks_that_wait_for_different_operations_get_an_error_soon(end: Callable[[Operation], Any]) -> None:
    def work(queue: OperationQueue) -> None:
        with pytest.raises(MismatchError, match=r"rank\(s\) 0 for 'of 0', which rank\(s\) 1 did not request"):
            end(submit_sum(queue, f"of {queue.group.rank}", np.ones(1)))

    assert on_ranks(2, work, OperationConfig(stuck_after=0.1)) == [None, None]


@pytest.mark.parametrize("end", [Operation.wait, poll_until_done])
def test_the_log_and_then_the_error_name_the_rank_of_the_world_that_does_not_request_an_operation(
    end: Callable[[Operation], Any], caplog: pytest.LogCaptureFixture
) -> None:
    def work(queue: OperationQueue) -> None:
        submit_sum(queue, "first", np.ones(1)).wait()
        if queue.group.rank != 1:
            end(submit_sum(queue, "late", np.ones(1)))

    with caplog.at_level(logging.WARNING):
        limits = OperationConfig(warn_after=0.05, wait_at_most=0.8)
        results = on_ranks(6, work, limits, members=[1, 3, 5])
    assert results[1] is None
    for error in (results[0], results[2]):
        assert isinstance(error, CollectiveTimeout)
        assert error.ranks == (3,)
    assert "operation 'late' has been waiting" in caplog.text
    assert "for rank(s) 3, which did not request it" in caplog.text


def test_a_name_can_be_in_progress_only_once() -> None:
    def work(queue: OperationQueue) -> None:
        if queue.group.rank == 0:
            handle = submit_sum(queue, "x", np.ones(1))
            with pytest.raises(InvalidInput, match="'x' is under way"):
                submit_sum(queue, "x", np.ones(1))
            submit_sum(queue, "go", np.ones(1)).wait()
            handle.wait()
        else:
            submit_sum(queue, "go", np.ones(1)).wait()
            submit_sum(queue, "x", np.ones(1)).wait()

    assert on_ranks(2, work) == [None, None]


@pytest.mark.parametrize(("op", "expected"), [("sum", 3.0), ("average", 1.0), ("min", 1.0), ("product", 2.0)])
def test_joined_ranks_add_nothing_and_all_learn_who_was_last(op: str, expected: float) -> None:
    def work(queue: OperationQueue) -> tuple[list[float], int]:
        results = []
        for _ in range(queue.group.rank):
            array = np.full(3, float(queue.group.rank))
            results.append(float(submit_sum(queue, None, array, op).wait()[0][0]))
        last = int(queue.join().wait()[0][0])
        assert submit_sum(queue, None, np.ones(1)).wait()[0][0] == 3.0
        return results, last

    none, first, second = on_ranks(3, work)
    assert none == ([], 2)
    assert first == ([expected], 2)
    assert (second[0][0], second[1]) == (expected, 2)


@pytest.mark.parametrize("end", ["kill", "abort", "close"])
def test_a_broken_world_or_a_closed_queue_fails_all_handles_at_once(end: str) -> None:
    fabric = FakeFabric(3)
    queues = list(map(make_queue, fabric.groups))
    ranks = [0] if end == "close" else [0, 1]
    handles = [submit_sum(queues[rank], f"t{n}", np.ones(1)) for rank in ranks for n in range(5)]
    if end == "kill":
        fabric.kill(2)
    elif end == "abort":
        fabric.group(0).abort("enough")
    else:
        queues[0].close()
    began = CLOCK.now()
    for handle in handles:
        with pytest.raises(CollectiveError):
            handle.wait()
    assert CLOCK.now() - began < 5
    with pytest.raises(CollectiveError):
        submit_sum(queues[0], "later", np.ones(1))
    for queue in queues:
        queue.close()


class _FullDisk:
    """A timeline that cannot be written."""

    def mark_round(self, now: float) -> None:
        raise OSError(28, "No space left on device")


def test_a_failure_of_one_rank_is_raised_there_as_itself_and_as_a_collective_error_elsewhere() -> None:
    fabric = FakeFabric(2)
    queues = list(map(make_queue, fabric.groups))
    queues[1].timeline = _FullDisk()  # type: ignore[assignment]
    handles = [submit_sum(queue, "x", np.ones(1)) for queue in queues]
    with pytest.raises(OSError, match="No space left") as raised:
        handles[1].wait()
    assert "mark_round" in [entry.name for entry in raised.traceback]
    with pytest.raises(OSError, match="No space left"):
        submit_sum(queues[1], "later", np.ones(1))
    with pytest.raises(CollectiveError, match="rank 1 cannot continue: OSError"):
        handles[0].wait()
    for queue in queues:
        queue.close()


@pytest.mark.parametrize(
    ("request_", "array", "says"),
    [
        (("allreduce", "x", ("float64",), ((2,),), "sum"), np.arange(2), "'x': dtype 'float64'"),
        (("allreduce", "x", ("bool",), ((2,),), "average"), np.ones(2, bool), "neither averages"),
        (("alltoall", "x", ("int64",), ((-1,),)), np.arange(3), "cannot be shared evenly"),
        (("broadcast", "x", ("int64",), ((3,),), "", (1.0, 1.0), None, 2), np.arange(3), "root must be in"),
    ],
)
def test_invalid_operations_are_not_announced(request_: Any, array: np.ndarray[Any, Any], says: str) -> None:
    queue = make_queue(FakeFabric(2).group(0))
    with pytest.raises(InvalidInput, match=says):
        queue.submit(OperationRequest(*request_), [array])


def test_operations_of_a_single_process_are_done_at_once_and_need_no_thread() -> None:
    queue = make_queue(FakeFabric(1).group(0))
    assert submit_sum(queue, "x", np.ones(2)).done
    assert queue.join().wait()[0].tolist() == [0]
    assert not [thread for thread in threading.enumerate() if "operations" in thread.name]


Pair = tuple[OperationQueue, OperationQueue, threading.Event]


@pytest.fixture
def pair_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """Two queues that have met, of a group with a timeout of 0.5 s; where the event is not set, the second one is kept
    from its next rounds, as by a call that holds the interpreter's lock."""
    fabric, free = FakeFabric(2, timeout=0.5), threading.Event()
    free.set()
    gather = fabric.group(1).allgather
    monkeypatch.setattr(fabric.group(1), "allgather", lambda array: free.wait(PATIENCE) and gather(array))
    first, second = map(make_queue, fabric.groups)
    for handle in [submit_sum(queue, "x", np.ones(1)) for queue in (first, second)]:
        handle.wait()
    free.clear()
    yield first, second, free
    free.set()
    for queue in (first, second):
        queue.close()


def test_an_idle_round_has_no_timeout(pair_of: Pair) -> None:
    first, second, free = pair_of
    CLOCK.sleep(1.5)  # longer than the first one's idle time and the group's timeout
    free.set()
    handles = [submit_sum(queue, "y", np.ones(1)) for queue in (first, second)]
    assert [handle.wait()[0][0] for handle in handles] == [2.0, 2.0]


def test_an_operation_requested_in_an_idle_round_has_the_usual_timeout(pair_of: Pair) -> None:
    first, _, _ = pair_of
    CLOCK.sleep(1.2)  # the first one is in such a round
    with pytest.raises(CollectiveTimeout, match=r"waiting for rank\(s\) \[1\]"):
        submit_sum(first, "y", np.ones(1)).wait()


class Ranks:
    """All ranks' machines, fed with the same words."""

    def __init__(self, size: int) -> None:
        self.machines = [Negotiation(rank, size) for rank in range(size)]
        self.sent: list[int] = []  # bytes that rank 0 said in each round

    def say(self, *words: Sequence[Message | OperationRequest], deadlocked: bool = False) -> RoundResult:
        texts = [
            machine.encode([word if isinstance(word, Message) else Message(word) for word in said])
            for machine, said in zip(self.machines, words, strict=True)
        ]
        self.sent.append(len(texts[0]))
        rounds = [machine.process(texts, deadlocked) for machine in self.machines]
        told = [
            ([(d.label, d.request, str(d.error)) for d in came.responses], came.last_joined)
            for came in rounds
        ]
        assert told == [told[0]] * len(told)
        assert len({frozenset(machine.pending.items()) for machine in self.machines}) == 1
        return rounds[0]


@given(strategies.integers(1, 5), strategies.integers(1, 12), strategies.integers(0, 1 << 30))
def test_any_order_on_each_rank_ends_with_all_done_in_one_order(size: int, count: int, seed: int) -> None:
    """Named ones in any order, unnamed ones in their own, spread over rounds in any way."""
    chance = random.Random(seed)
    ranks, done = Ranks(size), []
    queues: list[list[OperationRequest]] = []
    for _ in range(size):
        queue = [reduction(f"t{number}", number + 1) for number in range(count)]
        chance.shuffle(queue)
        for place, number in zip(
            sorted(chance.choices(range(count), k=3), reverse=True), (2, 1, 0), strict=True
        ):
            queue.insert(place, reduction(None, number))
        queues.append(queue)
    while any(queues):
        words = []
        for queue in queues:
            cut = chance.randrange(len(queue) + 1)
            words.append(queue[:cut])
            del queue[:cut]
        came = ranks.say(*words)
        assert not any(due.error for due in came.responses)
        done += [due.label for due in came.responses]
    expected = [f"t{number}" for number in range(count)] + [f"allreduce.noname.{n}" for n in (1, 2, 3)]
    assert sorted(done) == sorted(expected)


def test_a_request_that_was_sent_before_takes_few_bytes() -> None:
    ranks = Ranks(3)
    step = [reduction(f"layer {number}", 1000) for number in range(40)]
    for _ in range(5):
        assert len(ranks.say(step, step, step[::-1]).responses) == 40
    assert ranks.sent[0] > 40 * 20
    assert max(ranks.sent[1:]) < 40 * 4


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (reduction("x", 5), r"'x': rank 0 has shapes \(4,\), rank 1 \(5,\)"),
        (reduction("x", op="max"), "rank 0 has op sum, rank 1 max"),
        (replace(reduction("x"), dtypes=("float64",)), "has dtypes float32, rank 1 float64"),
        (replace(reduction("x"), kind="broadcast"), "has kind allreduce, rank 1 broadcast"),
        (replace(reduction("x"), root=1), "has root 0, rank 1 1"),
        (replace(reduction("x"), scale=(1.0, 0.5)), "has scale"),
        (replace(reduction("x"), compression="fp16"), "has compression None, rank 1 fp16"),
    ],
)
def test_a_mismatch_names_the_tensor_and_the_ranks(other: OperationRequest, says: str) -> None:
    ranks = Ranks(3)
    (due,) = ranks.say([reduction("x")], [other], [reduction("x")]).responses
    assert isinstance(due.error, MismatchError)
    assert due.error.ranks == (1,)
    with pytest.raises(MismatchError, match=says):
        raise due.error
    assert ranks.say([reduction("x")], [reduction("x")], [reduction("x")]).responses[0].error is None


def test_of_ranks_that_join_together_the_one_with_most_steps_was_last() -> None:
    ranks = Ranks(3)
    assert ranks.say([Message(joined=5)], [Message(joined=7)], [Message(joined=5)]).last_joined == 1
    assert ranks.say([Message()], [Message()], [Message()]).last_joined == 2


def test_operations_other_than_reductions_fail_while_a_rank_has_joined() -> None:
    ranks = Ranks(2)
    ranks.say([Message()], [])
    (due,) = ranks.say([], [OperationRequest("allgather", "g", ("float32",), ((-1,),))]).responses
    assert "no allgather while rank(s) 0 have joined" in str(due.error)


def test_all_ranks_clear_their_request_caches_together(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(2)
    monkeypatch.setattr(negotiation, "CAPACITY", 10)
    for number in range(30):
        step = [reduction(f"{number % 7}.{part}") for part in range(4)]
        assert len(ranks.say(step, step[::-1]).responses) == 4


def test_small_reductions_of_a_kind_go_together_up_to_the_threshold() -> None:
    requests = [
        reduction("a", 10), reduction("wide", 10, "float64"), reduction("b", 10), reduction("big", 1 << 20),
        reduction("c", 10), reduction("max", 1, op="max"), reduction("s1", 1, op="adasum"),
        reduction("s2", 1, op="adasum"), OperationRequest("barrier", "barrier"),
    ]  # fmt: skip
    tasks = [Task(request.name or "", request, None) for request in requests]
    told = [[task.label for task in batch] for batch in fuse_tasks(tasks, 100)]
    assert sorted(told) == [
        ["a", "b"], ["barrier"], ["big"], ["c"], ["max"], ["s1"], ["s2"], ["wide"],
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", ["sum", "min", "max", "product"])
def test_the_neutral_arrays_of_a_joined_rank_change_no_result(op: str, dtype: str) -> None:
    group = cast("Group", FakeFabric(1).group(0))
    (added,) = make_neutral_arrays(reduction("x", 3, dtype, op))
    values = np.array([0, 1, 1]) if dtype != "bfloat16" else np.array([0, 0x3F80, 0xC000])
    own = values.astype("uint16" if dtype == "bfloat16" else dtype)
    assert added.dtype == own.dtype
    assert reduce_parts([own, added], dtype, op, 1.0).tolist() == own.tolist()
    factors = {"min": (-2.0, 0.0)}.get(op, (-2.0,)) if dtype == "float32" else ()
    for factor in factors:  # also after the prescale
        request = OperationRequest("allreduce", "x", ("float32",), ((3,),), op, (factor, 1.0))
        (added,) = make_neutral_arrays(request)
        scaled = [np.float32(factor) * array for array in (own, added)]
        assert reduce_parts(scaled, "float32", op, 1.0).tolist() == scaled[0].tolist()
    group.close()


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_a_world_of_one_scales_as_a_group_does(dtype: str) -> None:
    kind = "uint16" if dtype == "bfloat16" else dtype
    request = OperationRequest("allreduce", "x", (dtype,), ((2,),), "average", (2.0, 0.5))
    results = []
    for group in (cast("Group", SingleProcessGroup()), FakeFabric(1).group(0)):
        array = np.array([16256, 4] if dtype == "bfloat16" else [3, 4]).astype(kind)
        queue = OperationQueue(group, SystemClock(), OperationConfig())
        results.append(queue.submit(request, [array]).wait()[0].tolist())
    assert results[0] == results[1]
