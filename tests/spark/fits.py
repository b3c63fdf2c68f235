"""A real fit that is met in mid-run, for tests of what happens to one: it dawdles until a file is there."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import cloudpickle
import torch
from pyspark.sql import SparkSession

from spark_elastic.estimators.torch_estimator import ElasticTorchEstimator
from spark_elastic.estimators.torch_model import ElasticTorchModel
from spark_elastic.monitoring.report import WorldChangeKind
from spark_elastic.torch import progress
from tests.component.torch.job import ledger_of
from tests.scenarios import Fault
from tests.spark.cluster import StandaloneCluster
from tests.spark.estimators import ROWS, Net, compute_mse, estimator, is_close, table, train_plain

EPOCHS = 150  # of one step each; with the gate shut they take minutes, open seconds


class GatedNet(Net):
    """Its steps in a worker take their time as long as the file `gate` is not there.

    numbers: how many it carries besides its weights.
    """

    def __init__(self, gate: Path, numbers: int = 0) -> None:
        super().__init__()
        self.gate = str(gate)
        if numbers:
            self.register_buffer("carried", torch.rand(numbers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if progress() is not None and not Path(self.gate).exists():
            time.sleep(0.8)
        return super().forward(x)


class KillOneExecutor:
    """Listens to a fit: kills an executor once the world is whole; opens the gate thereupon, or when it is so again.

    first: what happens before, each time that the world is whole.
    """

    def __init__(
        self,
        cluster: StandaloneCluster,
        fault: Fault,
        workers: int,
        gate: Path,
        again: bool,
        first: Sequence[Callable[[], object]] = (),
    ) -> None:
        self._cluster = cluster
        self._fault = fault
        self._workers = workers
        self._gate = gate
        self._again = again
        self._blows = [*first, self._kill]
        self._due = True  # the world has not been whole since the last blow

    def __call__(self, numbers: Mapping[str, Any]) -> None:
        whole = numbers["world"] == self._workers
        if self._due and whole and self._blows:
            Thread(target=self._blows.pop(0), name="killer").start()
            self._due = False
        self._due = self._due or not whole
        is_over = self._due and not self._blows
        if not self._fault.on or (is_over and (whole or not self._again)):
            self._gate.touch()

    def _kill(self) -> None:
        self._fault(self._cluster.kill_executor, self._cluster.busy_executors()[-1])


def fit_through_a_loss(
    spark: SparkSession,
    cluster: StandaloneCluster,
    fault: Fault,
    folder: Path,
    workers: int,
    again: bool = False,
    numbers: int = 0,
    fit: Callable[[ElasticTorchEstimator], ElasticTorchModel] | None = None,
    first: Sequence[Callable[[], object]] = (),
    meanwhile: Callable[[Mapping[str, Any]], object] = lambda numbers: None,
    **settings: Any,
) -> tuple[ElasticTorchEstimator, ElasticTorchModel]:
    """An executor is lost: the weights of a plain loop (P2), and each row once an epoch (P1).

    Args:
        again: not before the world is whole again does it end.
        numbers: that the model carries besides its weights.
        fit: in place of `fit` on the table.
        first: what happens before, each time that the world is whole.
        meanwhile: called with what the job reports.
    """
    for module in (__name__, Net.__module__):
        cloudpickle.register_pickle_by_value(sys.modules[module])
    folder.mkdir(exist_ok=True)
    loses_one = KillOneExecutor(cluster, fault, workers, folder / "gate", again, first)

    def on_progress(reported: Mapping[str, Any]) -> None:
        meanwhile(reported)
        loses_one(reported)

    gate, store, epochs = folder / "gate", folder / "store", EPOCHS if again else EPOCHS // 3
    df, net = table(spark), GatedNet(gate, numbers)
    est = estimator(
        store,
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9),
        epochs=epochs,
        num_workers=workers,
        batch_size=ROWS // workers,
        min_workers=1,
        run_id="mine",
        ledger=True,
        on_progress=on_progress,
        **settings,
    )
    model = fit(est) if fit else est.fit(df)
    sizes = [world.size for world in model.summary.worlds]
    # Where a core is free, the next world may be whole already.
    changes = model.summary.report.world_changes
    assert any(change.kind is WorldChangeKind.LOSS for change in changes), "no executor was lost"
    assert max(sizes) == workers
    assert sizes[-1] == workers or not again
    assert is_close(model, train_plain(df, epochs, compute_mse))
    assert all(torch.equal(model.model.state_dict()[name], value) for name, value in net.named_buffers())
    (ledger,) = {path.parent for path in store.rglob("*.jsonl")}
    assert ledger_of(ledger) == Counter((epoch, row) for epoch in range(epochs) for row in range(ROWS))
    return est, model
