"""The models of benchmarks/ give what arithmetic gives in cases where it can be done by hand."""

from __future__ import annotations

import math
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.parts.job_model import Fault, Job, simulate
from benchmarks.parts.loggp import Network, fit, predict_bcube, predict_ring

ROOT = Path(__file__).parents[3]
RATE, PAUSE, SECONDS = 1 / 50, 12.0, 300_000.0


def fail_at_random() -> Iterator[Fault]:
    dice, at = random.Random(1), 0.0
    while True:
        at += dice.expovariate(RATE)
        yield Fault(at, lambda: PAUSE)


def test_a_job_that_loses_no_step_works_while_no_pause_lasts() -> None:
    job = Job(1, pace=lambda members, age: 2.0, window=math.inf)
    outcome = simulate(job, fail_at_random(), seconds=SECONDS)
    assert outcome.steps / (2.0 * SECONDS) == pytest.approx(math.exp(-RATE * PAUSE), rel=0.01)


def test_a_job_with_checkpoints_takes_the_time_of_dalys_formula() -> None:
    job = Job(1, pace=lambda members, age: 2.0, checkpoint=40, window=math.inf)
    outcome = simulate(job, fail_at_random(), seconds=SECONDS)
    between = math.exp(RATE * PAUSE) * math.expm1(RATE * 20.0) / RATE
    assert outcome.steps / 40 == pytest.approx(SECONDS / between, rel=0.02)
    assert outcome.repeated > 0


def test_steps_of_an_elastic_job_are_in_proportion_to_its_workers() -> None:
    faults = [Fault(10.0, lambda: 1.0, lost=1, away=20.0), Fault(15.0, lambda: 2.0, lost=1, away=20.0)]
    job = Job(4, pace=lambda members, age: float(members), delay=lambda: 5.0, join=lambda: 0.5)
    # 10 s of four, 4 s of three, 18 s of two, 4.5 s of three, and again four.
    done = 10 * 4 + 4 * 3 + 18 * 2 + 4.5 * 3
    assert simulate(job, faults, steps=done + 4.0).seconds == pytest.approx(40.5 + 1.0)


def test_a_job_that_needs_all_waits_for_the_host_that_comes_back() -> None:
    job = Job(2, pace=lambda members, age: 1.0, join=lambda: 3.0, checkpoint=4, lag=1, fewest=2)
    outcome = simulate(job, [Fault(10.0, lambda: 0.0, lost=1, away=20.0)], steps=12)
    assert outcome.repeated == pytest.approx(6.0)  # from the tenth step to the fourth
    assert outcome.seconds == pytest.approx(30 + 3 + 8)


def test_a_ring_of_two_takes_two_latencies_and_its_bytes_once_each_way() -> None:
    network = Network(latency=3.0, overhead=0.0, gap=0.5, sum=0.25)
    nbytes = 64  # four segments of 16; of the first sums only the last one is not hidden
    assert predict_ring(network, 2, nbytes) == pytest.approx(2 * (3.0 + 32 * 0.5) + 16 * 0.25)


def test_bcube_of_four_takes_four_latencies_and_eight_overheads() -> None:
    network = Network(latency=3.0, overhead=0.125, gap=0.5, sum=0.25)
    moved = 64 / 2 + 64 / 4
    assert predict_bcube(network, 4, 64) == pytest.approx(
        4 * 3.0 + 8 * 0.125 + 2 * moved * 0.5 + moved * 0.25
    )


def test_in_a_group_of_three_the_last_host_gets_its_messages_late() -> None:
    assert predict_bcube(Network(0.0, 0.0, 1.0, 0.0), 3, 30) == pytest.approx(5 * 10.0)


def test_a_fit_finds_the_network_that_made_the_times() -> None:
    made = Network(latency=0.02, overhead=4e-5, gap=1e-9, sum=1e-10)
    points = [
        (ranks, n, predict_ring(made, ranks, n)) for ranks in (2, 4, 8) for n in (1 << 12, 1 << 20, 1 << 23)
    ]
    found = fit("ring", points, Network(0.01, 1e-4, 8e-9, 1e-10))
    assert predict_ring(found, 6, 1 << 22) == pytest.approx(predict_ring(made, 6, 1 << 22), rel=0.01)


@pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/dev/net/tun").exists() or not shutil.which("ip"),
    reason="needs root, /dev/net/tun and iproute2",
)
def test_hosts_of_a_link_of_20_ms_take_that_long_and_leave_nothing_behind() -> None:
    command = [sys.executable, "-m", "benchmarks.run", "collectives", "--small"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as running:
        report, _ = running.communicate(timeout=90)
    assert running.returncode == 0
    # A number that ends in zeros is written without them, in a column of one width; a machine may be busy.
    measured = re.search(r"bcube, 2 ranks, 4 KB, (?:fitted|processors busy) +[\d.]+ +([\d.]+) +ms", report)
    assert measured is not None, report
    assert float(measured[1]) > 40.0  # there and back
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"spark-elastic-{running.pid}-" not in spaces
