"""Hand-written TensorFlow loops on real processes: newcomers and losses in the middle of a tf.function."""

from __future__ import annotations

import sys
from itertools import groupby
from typing import Any

import cloudpickle
import numpy as np
import pytest

from tests.component.tensorflow import loops
from tests.component.torch.hand_written import Run
from tests.scenarios import Fault

pytestmark = [pytest.mark.native, pytest.mark.timeout(400)]
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2"}
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def sizes_in(worlds: list[int]) -> list[int]:
    """Without repetitions: where a newcomer traces for too long on a busy machine, its world begins again."""
    return [size for size, _ in groupby(worlds)]


def measure_difference(got: list[Any], expected: list[Any]) -> float:
    """Largest difference, relative to the largest weight."""
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(got, expected, strict=True))


def assert_replicas(results: list[Any]) -> None:
    for result in results:
        for what in ("weights", "slots"):
            assert all(map(np.array_equal, result[what], results[0][what]))


@pytest.mark.faults
@pytest.mark.scenario("G2")
def test_a_newcomer_holds_the_same_weights_and_a_loss_in_a_graph_costs_no_commit(fault: Fault) -> None:
    holds = {10: 2, 24: 3}
    run = Run(loops.train, (loops.STEPS, holds), room=2, num_workers=2, max_workers=3, env=QUIET)
    run.at(5, lambda: fault(run.cluster.add_room, 1))
    run.at(18, lambda: fault(run.cluster.kill, min(run.cluster.slots())))
    results = run.results()
    assert sizes_in(run.sizes())[:3] == [2, 3, 2]
    assert_replicas(results)
    assert measure_difference(results[0]["weights"], results[0]["plain"]) < 1e-9
    assert sizes_in(max((result["resets"] for result in results), key=len))[:2] == [3, 2]
    steps = max((result["trained"] for result in results), key=len)
    assert len(steps) - len(set(steps)) <= 1, "more than the step in flight was taken again"


@pytest.mark.faults
@pytest.mark.scenario("S9")
def test_a_planned_end_of_a_host_costs_no_step_of_a_graph(fault: Fault) -> None:
    run = Run(loops.train, (loops.STEPS, {15: 2}), room=3, num_workers=3, env=QUIET)
    run.at(6, lambda: fault(run.drain, max(run.cluster.slots())))
    results = run.results()
    assert sizes_in(run.sizes())[:2] == [3, 2]
    assert_replicas(results)
    assert measure_difference(results[0]["weights"], results[0]["plain"]) < 1e-9
    assert results[0]["trained"] == list(range(loops.STEPS))


@pytest.mark.scenario("S11")
def test_a_worker_dies_in_fit_and_another_joins_in_the_middle_of_an_epoch(fault: Fault) -> None:
    # The loop waits for the second world, which never comes where nobody dies.
    limit = {} if fault.on else {"max_runtime": 20.0}
    run = Run(loops.fit, (5, 7, 16, 24), room=2, num_workers=2, env=QUIET, **limit)
    run.at(10, lambda: fault(run.cluster.kill, max(run.cluster.slots())))
    results = run.results()
    assert_replicas(results)
    # Keras computes the loss in float32, whatever the model's type.
    assert measure_difference(results[0]["weights"], results[0]["plain"]) < 1e-5
    assert {result["position"] for result in results} == {(5, 0)}
    assert results[0]["trained"][-1] == 34
    trained = results[0]["trained"]
    assert len(trained) - len(set(trained)) <= 1, "the step in flight alone may be twice"
    assert sizes_in(run.sizes())[:3] == [2, 1, 2]
