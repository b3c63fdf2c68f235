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
@pytest.mark.parametrize("backend", ["tensorflow", pytest.param("torch", marks=pytest.mark.faults)])
def test_a_worker_dies_in_fit_and_another_joins_in_the_middle_of_an_epoch(backend: str, fault: Fault) -> None:
    # The loop waits for the second world, which never comes where nobody dies.
    options: dict[str, Any] = {} if fault.on else {"max_runtime": 20.0}
    epochs, steps, lost, joined = 3, 8, 12, 16
    options |= {"env": QUIET | {"KERAS_BACKEND": backend}, "modules": ("keras",)}
    run = Run(loops.fit, (epochs, steps, lost, joined), room=2, num_workers=2, **options)
    run.at(lost - 2, lambda: fault(run.workers()[0].kill))
    leader, joiner = results = run.results()
    assert sizes_in(run.sizes())[:3] == [2, 1, 2]
    assert_replicas(results)
    # Keras computes the loss in float32, whatever the model's type, and on torch all else.
    assert measure_difference(leader["weights"], leader["plain"]) < 1e-5
    assert set(leader["trained"]) == set(range(epochs * steps))
    assert len(leader["trained"]) <= epochs * steps + 1, "the step in flight alone may be twice"
    assert joiner["trained"][0] > lost, "the second one is no joiner"
    warm = [0.05 * (step / steps + 1) / 2 for step in range(1, steps + 1)]
    assert leader["rates"][:steps] == pytest.approx(warm, rel=1e-6)
    assert leader["own"][-1] != joiner["own"][-1]
    assert leader["average"][-1] == joiner["average"][-1]
    assert leader["average"][-1] == pytest.approx((leader["own"][-1] + joiner["own"][-1]) / 2)
    for result in results:
        assert result["position"] == (epochs, 0)
        assert backend == "tensorflow" or not result["tensorflow"]
