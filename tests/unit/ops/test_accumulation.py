"""Which backward passes make a step, and what becomes of them when their world ends."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from spark_elastic.errors import InvalidInput
from spark_elastic.ops import distributed_optimizer
from spark_elastic.ops.distributed_optimizer import PassCounter, validate_backward_passes


def _pass(count: PassCounter) -> tuple[bool, bool]:
    return count.begin_pass(), count.complete_pass()


def test_three_passes_make_a_step() -> None:
    count = PassCounter(3)
    assert [_pass(count) for _ in range(4)] == [(True, False), (False, False), (False, True), (True, False)]


def test_a_world_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    here = SimpleNamespace(fence=(1, 1))
    monkeypatch.setattr(distributed_optimizer, "world", lambda: here)
    count = PassCounter(2)
    assert _pass(count) == (True, False)
    here.fence = (1, 2)
    assert [_pass(count), _pass(count)] == [(True, False), (False, True)]


def test_there_is_one_pass_at_least() -> None:
    assert validate_backward_passes(1) == 1
    with pytest.raises(InvalidInput, match="at least 1; got 0"):
        PassCounter(0)
