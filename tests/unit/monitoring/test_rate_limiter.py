"""A worker that prints much is cut short, counted, and heard again later; the others are not touched."""

from __future__ import annotations

from spark_elastic.monitoring.console import LineRateLimiter


def test_lines_beyond_the_allowance_are_counted() -> None:
    limiter = LineRateLimiter(rate=1.0, burst=3.0)
    shown = [limiter.limit(0.0, "0", str(n)) for n in range(10)]
    assert shown == [("0",), ("1",), ("2",)] + [()] * 7
    assert limiter.limit(0.0, "1", "other") == ("other",)
    assert list(limiter.final_notes()) == ["[0] 7 lines were dropped"]
    assert limiter.limit(2.0, "0", "later") == ("7 lines were dropped", "later")
    assert list(limiter.final_notes()) == []
