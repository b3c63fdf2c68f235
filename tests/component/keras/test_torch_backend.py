"""`spark_elastic.keras` with Keras on torch, in real processes: one is killed in the middle of an epoch of `model.fit`.

Each rank trains its share of every step's rows, so that only exchanged gradients give the weights of the plain loop.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch

from tests.component.torch.hand_written import Run
from tests.scenarios import Fault

pytestmark = [pytest.mark.native, pytest.mark.faults, pytest.mark.timeout(600)]
cloudpickle.register_pickle_by_value(sys.modules[__name__])

EPOCHS, STEPS, ROWS = 3, 8, 12
RATE, MOMENTUM = 0.0625, 0.875
FAULT_STEP, JOINED = 12, 16  # steps, both in the second epoch: nobody takes them before that has happened


def batch_of(step: int) -> tuple[Any, Any]:
    draw = np.random.default_rng(step)
    return draw.normal(size=(ROWS, 4)), draw.normal(size=(ROWS, 1))


def iterate_shares(step: int, rank: int, size: int) -> Any:
    """That rank's rows of all batches from `step` on."""
    while True:
        x, y = batch_of(step)
        yield x[rank::size], y[rank::size]
        step += 1


def net(seed: int) -> Any:
    """Two layers in float64, by torch's own operations: on torch Keras computes its own in float32."""
    import keras

    class Net(keras.Model):  # type: ignore[misc] # untyped
        def __init__(self) -> None:
            super().__init__(dtype="float64")
            first = keras.initializers.RandomNormal(stddev=0.5, seed=keras.random.SeedGenerator(seed))
            self.parts = [self.add_weight(shape=s, initializer=first) for s in ((4, 3), (3,), (3, 1), (1,))]

        def call(self, x: Any) -> Any:
            return compute_output(x, [part.value for part in self.parts])

        def compute_loss(self, x: Any, y: Any, y_pred: Any, *rest: Any, **how: Any) -> Any:
            return (y - y_pred).square().mean()

    model = Net()
    model(batch_of(0)[0])
    return model


def compute_output(x: Any, weights: list[Any]) -> Any:
    return torch.tanh(x @ weights[0] + weights[1]) @ weights[2] + weights[3]


def values(variables: Any) -> list[Any]:
    import keras

    return [keras.ops.convert_to_numpy(variable.value) for variable in variables]


def train(folder: str) -> dict[str, Any]:
    """The elastic training, then one whose ranks begin with weights of their own."""
    import keras

    import spark_elastic.keras as hvd
    from tests.component.torch.hand_written import await_size, hold

    hvd.init()
    model = net(7 + hvd.rank())  # what rank 0 begins with counts, for newcomers too
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(RATE, MOMENTUM)))
    state: Any = hvd.elastic.KerasState(model, batch=0, epoch=0, initial=model.get_weights())
    told: dict[str, list[Any]] = {"trained": [], "rates": [], "own": [], "average": []}

    class SlowSteps(keras.callbacks.Callback):  # type: ignore[misc] # untyped
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            step = state.epoch * STEPS + state.batch
            hold(state, 2 if step == FAULT_STEP else None)
            await_size(state, 2 if step >= JOINED else 1)
            told["rates"].append(float(model.optimizer.learning_rate))

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            told["trained"].append(state.epoch * STEPS + state.batch)
            print(f"step {told['trained'][-1] + 1}", flush=True)  # noqa: T201 - what the test waits for

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            told["own"].append(logs["loss"])

    @hvd.elastic.run
    def loop(state: Any) -> None:
        first = state.epoch * STEPS + state.batch
        history = model.fit(
            iterate_shares(first, hvd.rank(), hvd.size()),
            initial_epoch=state.epoch,
            epochs=EPOCHS,
            steps_per_epoch=STEPS,
            verbose=0,
            callbacks=[
                hvd.callbacks.LearningRateWarmupCallback(RATE, warmup_epochs=1),
                SlowSteps(),
                hvd.callbacks.MetricAverageCallback(),
                hvd.elastic.UpdateBatchStateCallback(state),
                hvd.elastic.UpdateEpochStateCallback(state),
                hvd.elastic.CommitStateCallback(state),
            ],
        )
        told["average"] = history.history["loss"]

    loop(state)
    return told | {
        "initial": state.initial,
        "position": (state.epoch, state.batch),
        "weights": values(model.weights),
        "slots": values(model.optimizer.variables),
        "second": train_twice(hvd, Path(folder, f"{hvd.rank()}.keras")),
        "tensorflow": "spark_elastic.tensorflow" in sys.modules,
    }


def train_twice(hvd: Any, saved: Path) -> list[Any]:
    """All variables after a fit that begins with rank 0's, and a fit of what was saved of it."""
    import keras

    first = keras.initializers.RandomNormal(seed=100 + hvd.rank())
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer=first)])
    adam = hvd.DistributedOptimizer(
        keras.optimizers.Adam(0.01), backward_passes_per_step=2, average_aggregated_gradients=True
    )
    model.compile(adam, "mse")
    begin = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    model.fit(iterate_shares(0, hvd.rank(), hvd.size()), steps_per_epoch=4, verbose=0, callbacks=begin)
    model.save(saved)
    loaded = hvd.load_model(saved)
    loaded.fit(iterate_shares(4, hvd.rank(), hvd.size()), steps_per_epoch=2, verbose=0)
    return [*values(model.weights), *values(loaded.weights), *values(loaded.optimizer.variables)]


def train_plain(initial: list[Any]) -> list[torch.Tensor]:
    """The first training in one process, by torch alone: SGD with momentum, at rates that warm up for two workers."""
    weights = [torch.tensor(array, requires_grad=True) for array in initial]
    velocities = [torch.zeros_like(weight) for weight in weights]
    rate = RATE
    for step in range(EPOCHS * STEPS):
        x, y = map(torch.from_numpy, batch_of(step))
        before, rate = rate, RATE * (min((step + 1) / STEPS, 1.0) + 1) / 2
        loss = (y - compute_output(x, weights)).square().mean()
        gradients = torch.autograd.grad(loss, weights)
        with torch.no_grad():
            for weight, velocity, gradient in zip(weights, velocities, gradients, strict=True):
                velocity *= rate / before * MOMENTUM
                velocity -= rate * gradient
                weight += velocity
    return [weight.detach() for weight in weights]


@pytest.mark.scenario("S11")
def test_a_worker_dies_in_the_middle_of_an_epoch_and_another_takes_its_place(
    fault: Fault, tmp_path: Path
) -> None:
    run = Run(train, (str(tmp_path),), room=2, num_workers=2, env={"KERAS_BACKEND": "torch"})
    run.at(FAULT_STEP - 2, lambda: fault(run.workers()[0].kill))
    leader, joiner = run.results()
    sizes = run.sizes()
    assert (sizes[0], min(sizes), sizes[-1]) == (2, 1, 2)
    assert joiner["trained"][0] > FAULT_STEP, "the second one is no joiner"
    assert set(leader["trained"]) == set(range(EPOCHS * STEPS))
    assert len(leader["trained"]) <= EPOCHS * STEPS + 1, "more than the step in flight was taken again"
    for what in ("weights", "slots", "second"):
        assert all(map(np.array_equal, leader[what], joiner[what])), f"replicas differ in {what}"
    for got, expected in zip(leader["weights"], train_plain(leader["initial"]), strict=True):
        assert np.abs(got - expected.numpy()).max() / np.abs(got).max() < 1e-9
    assert leader["rates"][:STEPS] == [RATE * (step / STEPS + 1) / 2 for step in range(1, STEPS + 1)]
    assert leader["own"][-1] != joiner["own"][-1]
    assert leader["average"][-1] == joiner["average"][-1]
    assert leader["average"][-1] == pytest.approx((leader["own"][-1] + joiner["own"][-1]) / 2)
    for result in (leader, joiner):
        assert result["position"] == (EPOCHS, 0)
        assert not result["tensorflow"]
