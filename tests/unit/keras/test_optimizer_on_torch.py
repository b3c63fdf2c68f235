"""Keras on torch: the optimizer exchanges through the torch half, and the state takes torch's tensors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sources import PYTHONPATH

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
assert int(loaded.optimizer.iterations) == 2, "it sums three passes as before"
sys.exit("spark_elastic.tensorflow" in sys.modules)
"""


@pytest.mark.timeout(150)
def test_keras_on_torch_uses_the_torch_half(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": PYTHONPATH, "KERAS_BACKEND": "torch"}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path / "model.keras")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=140, env=environment)
    assert done.returncode == 0, done.stderr
