"""Which shares are checked by whom, and what is concluded from what the ranks found."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spark_elastic.data.plan import DataPlan, Division
from spark_elastic.protocol.types import Phase, Position
from spark_elastic.training.torch.share_step import GradientDigest, ShareCheck, ShareChecker
from spark_elastic.training.trainer import StepDisputed

SHARES = 8
PLAN = DataPlan((400,), 32, 3, 1, shares=SHARES)
SPEC: Any = SimpleNamespace(plan=PLAN, rows=None, open_reader=lambda rows: (None, None))


def checker(every: int = 1) -> ShareChecker:
    return ShareChecker(SPEC, every, None, lambda rows, rank: None)  # type: ignore[arg-type, return-value]


def at(step: int, epoch: int = 0) -> Position:
    return Position(epoch, Phase.TRAIN, step)


def digest_of(*numbers: float) -> GradientDigest:
    made = GradientDigest()
    made.add(0, torch.tensor(numbers))
    made.add(1, None)
    return made


def judge(check: ShareCheck, *found: GradientDigest | None) -> None:
    blobs = [b"" if each is None else each.digest() for each in found]
    answers = iter((blobs, [b"h"] * len(found)))  # their digests, then their hosts
    group: Any = SimpleNamespace(size=len(found), allgather_bytes=lambda own: next(answers))
    checker().judge(check, group, None)


def test_each_share_and_each_rank_is_checked_by_and_by() -> None:
    division = Division((0, 1, 3, 8))
    found = [checker().draw(at(step, epoch), division) for epoch in range(20) for step in range(PLAN.steps)]
    checks = [check for check in found if check is not None]
    assert {check.share for check in checks} == set(range(SHARES))
    for check in checks:
        first, past = division.get_rank_parts(check.owner)
        assert first <= check.share < past
        assert sorted((check.owner, *check.witnesses)) == [0, 1, 2]
    pairs = Counter(
        rank
        for check in (checker().draw(at(step), Division.equal(5, SHARES)) for step in range(PLAN.steps))
        if check is not None
        for rank in check.witnesses
    )
    assert set(pairs) == set(range(5))


def test_only_every_so_many_steps_and_only_with_others_is_there_a_check() -> None:
    division = Division.equal(2, SHARES)
    checked = [step for step in range(PLAN.steps) if checker(4).draw(at(step), division) is not None]
    assert checked == list(range(0, PLAN.steps, 4))
    assert checker().draw(at(0), Division.equal(1, SHARES)) is None


ONE, OTHER = digest_of(1.0), digest_of(1.0000001)


@pytest.mark.parametrize(
    ("check", "found", "says", "suspects"),
    [
        (ShareCheck(1, 0, (2,)), [ONE, None, ONE], None, ()),
        (
            ShareCheck(1, 0, (2, 1)),
            [ONE, ONE, OTHER],
            r"share 1: rank 2 on host h.* other bits than the 2 others",
            (2,),
        ),
        (
            ShareCheck(1, 1, (0,)),
            [ONE, OTHER],
            "which of them is wrong cannot be said: with three workers",
            (1, 0),
        ),
    ],
)
def test_a_third_decides_who_is_wrong(
    check: ShareCheck, found: list[Any], says: str | None, suspects: tuple[int, ...]
) -> None:
    if says is None:
        judge(check, *found)
        return
    with pytest.raises(StepDisputed, match=says) as caught:
        judge(check, *found)
    assert caught.value.suspects == suspects


def test_every_bit_counts() -> None:
    assert digest_of(0.0).digest() != digest_of(-0.0).digest()
    assert digest_of(1.0).digest() == digest_of(1.0).digest()
    other = digest_of(1.0)
    other.loss = (1.0, 2.0)
    assert other.digest() != digest_of(1.0).digest()
    sparse, half = GradientDigest(), GradientDigest()
    sparse.add(0, torch.tensor([1.0]).to_sparse())
    half.add(0, torch.tensor(1.0, dtype=torch.bfloat16))
    assert sparse.digest() != half.digest()
