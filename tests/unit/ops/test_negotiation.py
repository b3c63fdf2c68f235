"""The order of operations: the same on all ranks whatever order each asks in, and errors that name ranks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, strategies

from elastic_collectives import MismatchError
from spark_elastic.horovod.ops import negotiation
from spark_elastic.horovod.ops.negotiation import Message, Negotiation, OperationRequest, RoundResult


def reduction(name: str | None, length: int = 4, op: str = "sum") -> OperationRequest:
    return OperationRequest("allreduce", name, ("float32",), ((length,),), op)


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
