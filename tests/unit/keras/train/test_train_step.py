"""A step of two ranks: what travels between them, and in which format."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import pytest

from elastic_collectives import Group
from elastic_collectives.fakes import FakeFabric
from spark_elastic.protocol.types import MembershipVersion, Phase, Position
from spark_elastic.training.batch import LocalBatch
from spark_elastic.training.fit_config import FitConfig
from spark_elastic.training.keras.compiled import CompiledLosses, CompiledMetrics
from spark_elastic.training.keras.state import KerasTrainingState
from spark_elastic.training.keras.step import Structure, TrainStep
from spark_elastic.training.ledger import Ledger
from spark_elastic.training.progress import TrainingProgress

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
# The change of BatchNorm's variance is larger than what float16 holds.
X = np.random.default_rng(1).normal(scale=5e3, size=(8, 1)).astype("f")


class NoCallbacks:
    def capture(self) -> dict[str, Any]:
        return {}

    def load(self, values: Any) -> None:
        """Nothing."""


def make_model(normalizes: bool) -> Any:
    keras.utils.set_random_seed(1)
    between = [keras.layers.BatchNormalization()] if normalizes else []
    model = keras.Sequential([keras.Input((1,)), *between, keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.0), "mse", run_eagerly=True)
    return model


def take_step(model: Any, group: Group, compression: str | None) -> None:
    """With this rank's half of the rows."""
    structure = Structure(inputs=lambda arrays: arrays[0], outputs=lambda values: values[0])
    losses = CompiledLosses(model, X, model(X))
    metrics = CompiledMetrics(model, losses.names, structure.outputs, eager=True)
    metrics.build(X, model(X))
    state = KerasTrainingState(model.weights, [], NoCallbacks(), TrainingProgress())
    config = FitConfig(feature_cols=("x",), label_cols=("y",), gradient_compression=compression)
    step = TrainStep(config, model, state, losses, structure, metrics, Ledger())
    rows = np.arange(4) + 4 * group.rank
    batch = LocalBatch(len(X), rows, (X[rows],), (X[rows],), None)
    step.run(group, batch, MembershipVersion(), lambda _: Position(0, Phase.TRAIN, 1), lambda: None, False)
    step.close()


@pytest.mark.parametrize(
    ("normalizes", "compression", "formats"),
    [(True, "fp16", ["fp16", None]), (True, None, [None]), (False, "fp16", ["fp16"])],
)
def test_running_statistics_travel_uncompressed_and_on_their_own_only_beside_compressed_gradients(
    normalizes: bool, compression: str | None, formats: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    models, fabric, seen = [make_model(normalizes) for _ in range(2)], FakeFabric(2), []
    first, allreduce = fabric.group(0), fabric.group(0).allreduce

    def record(array: Any, *args: Any, **how: Any) -> None:
        seen.extend([how.get("compression")] if array.dtype == np.float32 else [])
        allreduce(array, *args, **how)

    monkeypatch.setattr(first, "allreduce", record)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(take_step, models, fabric.groups, [compression] * 2))
    assert seen == formats
    if normalizes:
        halves = X.reshape(2, 4)
        for model in models:
            _, _, mean, variance = model.layers[0].get_weights()
            np.testing.assert_allclose(mean, [0.01 * halves.mean()], rtol=1e-4)
            np.testing.assert_allclose(variance, [0.99 + 0.01 * halves.var(1).mean()], rtol=1e-4)
