"""Keras on torch: what the optimizer sums and leaves alone, what a state and a file keep.

Keras runs on TensorFlow in this process, so that the last test starts one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import pytest
import torch

from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.process_sets import ProcessSet, global_process_set
from spark_elastic.gradients.reduction import Adasum, Average, ReduceOp, ReduceOptions
from spark_elastic.horovod.keras.optimizer import TorchExchange
from spark_elastic.horovod.ops.distributed_optimizer import GradientOptions, wrap_optimizer
from spark_elastic.horovod.torch import operations
from tests.sources import PYTHONPATH


class RecordingOptimizer:
    """Keeps what it is told to apply."""

    def __init__(self) -> None:
        self.applied: list[list[Any]] = []

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        self.applied.append([gradient.tolist() for gradient in grads])

    apply_gradients = build = apply
    built = True


def distribute(
    optimizer: Any,
    passes: int = 1,
    process_set: ProcessSet = global_process_set,
    scale_local: bool = True,
    op: ReduceOp = Average,
) -> Any:
    options = GradientOptions(ReduceOptions(op, process_set=process_set), False, 0, scale_local)
    return wrap_optimizer(optimizer, lambda: TorchExchange(options, passes, False), keras.utils)


@pytest.mark.parametrize(("scaled", "expected"), [(True, [2.0, 8.0]), (False, [8.0, 8.0])])
def test_local_sums_are_divided(monkeypatch: pytest.MonkeyPatch, scaled: bool, expected: list[float]) -> None:
    monkeypatch.setattr(operations, "start", lambda tensors, *how, **when: lambda: tensors)
    four: Any = SimpleNamespace(size=lambda: 4, included=lambda: True)
    optimizer: Any = distribute(RecordingOptimizer(), process_set=four, scale_local=scaled)
    mine, shared = object(), object()
    optimizer.register_local_var(mine)
    optimizer.apply([torch.tensor(8.0), torch.tensor(8.0)], [mine, shared])
    assert optimizer.applied == [expected]


def test_a_rank_outside_of_the_process_set_trains_alone() -> None:
    others: Any = SimpleNamespace(size=lambda: 4, included=lambda: False)
    optimizer: Any = distribute(RecordingOptimizer(), process_set=others)
    optimizer.apply([torch.tensor(8.0)], [object()])
    assert optimizer.applied == [[8.0]]


@pytest.mark.parametrize(
    ("optimizer", "arguments", "says"),
    [
        (RecordingOptimizer(), {"op": Adasum}, "must be Average or Sum; got"),
        (RecordingOptimizer(), {"passes": 0}, "must be at least 1; got 0"),
        (distribute(RecordingOptimizer()), {}, "of Keras 3 once; got a RecordingOptimizer"),
        (torch.nn.Linear(1, 1), {}, "wraps an optimizer of Keras 3 once; got a Linear"),
    ],
)
def test_wrong_arguments_are_refused(optimizer: Any, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        distribute(optimizer, **arguments)


PROGRAM = """
import sys
import keras, numpy as np
import spark_elastic.keras as hvd

def trained(optimizer, batch_size):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    x = np.random.default_rng(0).normal(size=(12, 3)).astype("float32")
    model.fit(x, x.sum(1), batch_size=batch_size, shuffle=False, verbose=0)
    return model

plain = trained(keras.optimizers.Adam(0.1), 12)
ours = trained(
    hvd.DistributedOptimizer(
        keras.optimizers.Adam(0.1), backward_passes_per_step=3, average_aggregated_gradients=True,
        name="n", compression=hvd.Compression.none, sparse_as_dense=True, groups=2,
    ),
    4,
)
weights = [keras.ops.convert_to_numpy(w.value) for w in ours.weights]
for a, w in zip(weights, plain.weights, strict=True):
    np.testing.assert_allclose(a, keras.ops.convert_to_numpy(w.value), rtol=1e-4)
state = hvd.elastic.KerasState(ours, batch=3)
state.save()
for w in ours.weights:
    w.assign(w * 0)
state.batch = 9
state.restore()
assert state.batch == 3
for a, w in zip(weights, ours.weights, strict=True):
    assert np.array_equal(a, keras.ops.convert_to_numpy(w.value))
ours.save(sys.argv[1])
loaded = hvd.load_model(sys.argv[1])
loaded.fit(np.ones((12, 3)), np.ones(12), batch_size=4, verbose=0)
assert int(keras.ops.convert_to_numpy(loaded.optimizer.iterations.value)) == 4, "a step for each batch"
sys.exit("spark_elastic.tensorflow" in sys.modules)
"""


@pytest.mark.timeout(150)
def test_keras_on_torch_uses_the_torch_half(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": PYTHONPATH, "KERAS_BACKEND": "torch"}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path / "model.keras")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=140, env=environment)
    assert done.returncode == 0, done.stderr
