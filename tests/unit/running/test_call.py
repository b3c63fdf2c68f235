"""A checked call: what it asks the driver for."""

from __future__ import annotations

from spark_elastic.running.call import prepare


def test_r15_a_call_needs_the_result_of_every_worker() -> None:
    call = prepare(print, (), {"num_workers": 3, "regroup_timeout": 45.0})
    limits = call.limits(2)
    assert (limits.num_workers, limits.all_results, limits.regroup_timeout) == (3, True, 45.0)
