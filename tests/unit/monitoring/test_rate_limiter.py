"""A worker that prints much is cut short, counted, and heard again later; the others are not touched."""

from __future__ import annotations

from spark_elastic.monitoring.progress import LineRateLimiter


def test_lines_beyond_the_allowance_are_counted() -> None:
    limit = LineRateLimiter(rate=1.0, burst=3.0)
    shown = [limit.pass_on(0.0, "0", str(n)) for n in range(10)]
    assert shown == [("0",), ("1",), ("2",)] + [()] * 7
    assert limit.pass_on(0.0, "1", "other") == ("other",)
    assert limit.left_out() == [("0", 7)]
    assert limit.pass_on(2.0, "0", "later") == ("7 lines were left out", "later")
    assert limit.left_out() == []
