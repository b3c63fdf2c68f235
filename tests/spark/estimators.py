"""A small table, an estimator that trains on it, and what torch alone makes of both.

Workers import this module for `Net`, each of them anew: it imports nothing that they do not have.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from spark_elastic.estimators.torch_estimator import ElasticTorchEstimator
    from spark_elastic.estimators.torch_model import ElasticTorchModel

ROWS = 48
WORKERS = 2


def table(spark: SparkSession) -> DataFrame:
    """ids, two float64 features, their target and a weight per row."""
    draw = np.random.default_rng(5)
    x = draw.normal(size=(ROWS, 2))
    y = x @ [2.0, -1.0] + 0.5 + 0.1 * draw.normal(size=ROWS)
    rows = [(i, x[i].tolist(), float(x[i, 0]), float(x[i, 1]), float(y[i]), 1.0 + i % 3) for i in range(ROWS)]
    schema = "id long, x array<double>, a double, b double, y double, w double"
    return spark.createDataFrame(rows, schema)


class Net(torch.nn.Module):
    """Two layers in float64, one number per row."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        first, last = torch.nn.Linear(2, 8), torch.nn.Linear(8, 1)
        self.layers = torch.nn.Sequential(first, torch.nn.Tanh(), last).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.reshape(len(x), 2).double())[:, 0]


def estimator(store: Path | str, **changes: Any) -> ElasticTorchEstimator:
    from spark_elastic.estimators.torch_estimator import ElasticTorchEstimator

    net = Net()
    values: dict[str, Any] = {
        "model": net,
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9),
        "loss": torch.nn.MSELoss(),
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": ROWS // WORKERS,
        "epochs": 4,
        "num_workers": WORKERS,
        "gather_timeout": 60.0,  # the first world is whole on a busy machine, too
        "store": str(store),
        "verbose": 0,
    }
    return ElasticTorchEstimator(**(values | changes))


def train_plain(
    df: DataFrame, steps: int, loss: Callable[..., torch.Tensor], clip: float | None = None
) -> list[torch.Tensor]:
    """What torch alone makes of the whole table in so many steps; loss(output, y, w)."""
    rows = df.orderBy("id").collect()
    x, y, w = (torch.tensor([row[name] for row in rows], dtype=torch.float64) for name in ("x", "y", "w"))
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(net(x), y, w).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]


def is_close(model: ElasticTorchModel, expected: list[torch.Tensor]) -> bool:
    got = [parameter.detach() for parameter in model.model.parameters()]
    return all(float((a - b).abs().max() / b.abs().max()) < 1e-9 for a, b in zip(got, expected, strict=True))


def compute_mse(output: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(output, y)


def fit_through_a_kill(spark: SparkSession, folder: Path, epochs: int = 6, **settings: Any) -> dict[str, Any]:
    """What a program sees of a fit of two workers, one of which is killed, and of the model that it saves and loads."""
    from spark_elastic.testing import ClusterFaults, InjectedFault

    df = table(spark)
    faults = ClusterFaults([InjectedFault("kill worker", step=0, epoch=2, rank=1)], str(folder / "faults"))
    how = {"num_workers": 2, "batch_size": ROWS // 2, "epochs": epochs, "callbacks": [faults.callback()]}
    model = estimator(folder / "store", **how, **settings).fit(df)
    for _ in range(2):
        model.write().overwrite().save(str(folder / "model"))
    loaded = type(model).load(str(folder / "model"))
    tables = (each.transform(df).orderBy("id").collect() for each in (model, loaded))
    shown, again = ([row.prediction for row in rows] for rows in tables)
    return {
        "exact": is_close(model, train_plain(df, epochs, compute_mse)),
        "injected": len(faults.read_injected()),
        "recovered": bool(model.summary.report.recoveries),
        "same": again == shown,
        "shown": len(shown),
    }


SEEN = {"exact": True, "injected": 1, "recovered": True, "same": True, "shown": ROWS}
