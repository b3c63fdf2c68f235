"""The models of benchmarks/ give what arithmetic gives in cases where it can be done by hand."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest

from benchmarks.parts.job_model import Fault, Job, simulate

RATE, PAUSE, SECONDS = 1 / 50, 12.0, 300_000.0


def fail_at_random() -> Iterator[Fault]:
    dice, at = random.Random(1), 0.0
    while True:
        at += dice.expovariate(RATE)
        yield Fault(at, lambda: PAUSE)


def test_a_job_that_loses_no_step_works_while_no_pause_lasts() -> None:
    job = Job(1, pace=lambda members: 2.0, window=math.inf)
    outcome = simulate(job, fail_at_random(), seconds=SECONDS)
    assert outcome.steps / (2.0 * SECONDS) == pytest.approx(math.exp(-RATE * PAUSE), rel=0.01)


def test_a_job_with_checkpoints_takes_the_time_of_dalys_formula() -> None:
    job = Job(1, pace=lambda members: 2.0, checkpoint=40, window=math.inf)
    outcome = simulate(job, fail_at_random(), seconds=SECONDS)
    between = math.exp(RATE * PAUSE) * math.expm1(RATE * 20.0) / RATE
    assert outcome.steps / 40 == pytest.approx(SECONDS / between, rel=0.02)
    assert outcome.repeated > 0


def test_a_job_that_goes_on_with_fewer_workers_counts_each_second_of_each() -> None:
    faults = [Fault(10.0, lambda: 1.0, lost=1, away=20.0), Fault(15.0, lambda: 2.0, lost=1, away=20.0)]
    job = Job(4, pace=float, delay=lambda: 5.0, join=lambda: 0.5)
    # 10 s of four, 4 s of three, 18 s of two, 4.5 s of three, and again four.
    done = 10 * 4 + 4 * 3 + 18 * 2 + 4.5 * 3
    assert simulate(job, faults, steps=done + 4.0).seconds == pytest.approx(40.5 + 1.0)


def test_a_job_that_needs_all_waits_for_the_host_that_comes_back() -> None:
    job = Job(2, pace=lambda members: 1.0, join=lambda: 3.0, checkpoint=4, lag=1, fewest=2)
    outcome = simulate(job, [Fault(10.0, lambda: 0.0, lost=1, away=20.0)], steps=12)
    assert outcome.repeated == pytest.approx(6.0)  # from the tenth step to the fourth
    assert outcome.seconds == pytest.approx(30 + 3 + 8)
