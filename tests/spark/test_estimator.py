"""`fit` on a real cluster: what it trains, what it leaves alone, what it leaves behind.

With a global batch of the whole table an epoch is one step, whatever the order of rows: then plain torch gives the
weights to compare with.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.feature import VectorAssembler

from spark_elastic.errors import InvalidInput, WorkerFailed
from spark_elastic.estimators.fitted_model import ElasticTorchModel
from spark_elastic.estimators.torch_estimator import ElasticTorchEstimator

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow]

ROWS = 48
WORKERS = 3


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
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        ).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.reshape(len(x), 2).double())[:, 0]


def estimator(store: Path, **changes: Any) -> ElasticTorchEstimator:
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


def plain(
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


def close_to(model: ElasticTorchModel, expected: list[torch.Tensor]) -> bool:
    got = [parameter.detach() for parameter in model.model.parameters()]
    return all(float((a - b).abs().max() / b.abs().max()) < 1e-9 for a, b in zip(got, expected, strict=True))


def mse(output: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(output, y)


def weighted_mse(output: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return ((output - y) ** 2 * w).sum() / w.sum()


def state_of(est: ElasticTorchEstimator) -> str:
    """Everything that a fit could change: parameters, the model's and the optimizer's state, shared storage."""
    model, optimizer = est.getModel(), est.getOptimizer()
    params = {
        p.name: v for p, v in est.extractParamMap().items() if p.name not in ("model", "optimizer", "loss")
    }
    tensors = list(model.state_dict().values())
    content = (
        [t.numpy().tobytes() for t in tensors],
        [t.data_ptr() for t in tensors],
        [p.grad is None for p in model.parameters()],
        model.training,
        repr(optimizer.state_dict()),
        repr(params),
        cloudpickle.dumps((model, optimizer)),
    )
    return hashlib.sha256(repr(content).encode()).hexdigest()


def test_fit_trains_and_two_fits_agree_and_change_nothing(spark: SparkSession, tmp_path: Path) -> None:
    df, heard = table(spark), []
    est = estimator(tmp_path, on_progress=heard.append)
    before = state_of(est)
    first = est.fit(df)
    assert state_of(est) == before
    assert close_to(first, plain(df, 4, mse))
    second = est.fit(df)
    assert state_of(est) == before
    pairs = zip(first.model.state_dict().values(), second.model.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert first.summary.digest == second.summary.digest != ""
    assert [epoch["epoch"] for epoch in first.history] == [0, 1, 2, 3]
    assert first.summary.rows_per_epoch == [ROWS] * 4
    losses = [epoch["loss"] for epoch in first.history]
    assert losses == sorted(losses, reverse=True)
    assert [world.size for world in first.summary.worlds] == [WORKERS]
    # Nothing of the data is kept, the models are.
    assert list(tmp_path.rglob("*.parquet")) == []
    rows = first.transform(df).collect()
    with torch.no_grad():
        expected = first.model(torch.tensor([row.x for row in rows], dtype=torch.float64)).tolist()
    assert [row.prediction for row in rows] == pytest.approx(expected)


def test_weights_of_rows_clipping_shapes_and_a_factory_reach_the_workers(
    spark: SparkSession, tmp_path: Path
) -> None:
    df = table(spark)
    est = estimator(
        tmp_path,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        sample_weight_col="w",
        gradient_clip_norm=0.25,
        input_shapes=[(1, 2)],
    )
    model = est.fit(df)
    assert close_to(model, plain(df, 4, weighted_mse, clip=0.25))
    assert not close_to(model, plain(df, 4, weighted_mse))
    assert not close_to(model, plain(df, 4, mse, clip=0.25))


def test_a_pipeline_of_vectors_fits_with_other_epochs_and_keeps_its_data(
    spark: SparkSession, tmp_path: Path
) -> None:
    df = table(spark)
    est = estimator(tmp_path / "store", feature_cols="v", keep_data=True, ledger=True, run_id="mine")
    assembler = VectorAssembler(inputCols=["a", "b"], outputCol="v")
    fitted = Pipeline(stages=[assembler, est]).fit(df, {est.epochs: 2})
    assert len(fitted.stages[-1].history) == 2
    fitted.write().save(str(tmp_path / "saved"))
    back = PipelineModel.load(str(tmp_path / "saved"))
    assert back.transform(df).orderBy("id").collect() == fitted.transform(df).orderBy("id").collect()
    assert list((tmp_path / "store" / "data").rglob("*.parquet"))
    lines = [
        json.loads(line)
        for file in (tmp_path / "store" / "runs" / "mine" / "ledger").iterdir()
        for line in file.read_text().splitlines()
    ]
    for epoch in range(2):
        contributed = [line for line in lines if line["event"] == "contributes" and line["epoch"] == epoch]
        assert sorted(row for line in contributed for row in line["rows"]) == list(range(ROWS))


def test_an_error_in_user_code_comes_back_with_its_traceback(spark: SparkSession, tmp_path: Path) -> None:
    def broken_loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("the loss is out of order")

    est = estimator(tmp_path, loss=broken_loss)
    with pytest.raises(WorkerFailed, match="the loss is out of order") as caught:
        est.fit(table(spark))
    assert "in broken_loss" in str(caught.value)
    assert copy.deepcopy(est.getModel()) is not None


def test_files_that_nobody_here_wrote_are_trained_on_where_they_lie(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Row groups of 5 rows, a column too many, the label in the folders' names."""
    x = np.random.default_rng(5).normal(size=(ROWS, 2))
    for part in range(3):
        folder = tmp_path / "rows" / f"y={part}"
        folder.mkdir(parents=True)
        columns = {"x": list(x[part::3]), "unused": [None] * (ROWS // 3)}
        pq.write_table(pa.table(columns), folder / "0.parquet", row_group_size=5)
    before = sorted(tmp_path.rglob("*"))
    est = estimator(tmp_path / "store", ledger=True, run_id="mine", epochs=2)
    model = est.fit_on_parquet(str(tmp_path / "rows"), validation_paths=str(tmp_path / "rows" / "y=1"))
    assert [epoch["rows"] for epoch in model.history] == [ROWS, ROWS]
    assert [epoch["val_rows"] for epoch in model.history] == [ROWS // 3] * 2
    assert [path for path in before if not path.exists()] == []
    assert not list((tmp_path / "store").rglob("*.parquet"))
    net, y = Net(), torch.tensor(np.repeat([0.0, 1.0, 2.0], ROWS // 3))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for _ in range(2):
        optimizer.zero_grad()
        rows = torch.tensor(np.concatenate([x[part::3] for part in range(3)]))
        torch.nn.functional.mse_loss(net(rows), y).backward()
        optimizer.step()
    assert close_to(model, [parameter.detach() for parameter in net.parameters()])
    pq.write_table(pa.table({"x": [[1.0, 2.0], None]}), tmp_path / "rows" / "y=1" / "1.parquet")
    with pytest.raises(InvalidInput, match="column 'x' has 1 nulls in 50 rows"):
        est.copy({est.run_id: "other"}).fit_on_parquet(str(tmp_path / "rows"))
