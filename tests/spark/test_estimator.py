"""`fit` on a real cluster: what it trains, what it leaves alone, what it leaves behind.

With a global batch of the whole table an epoch is one step, whatever the order of rows: then plain torch gives the
weights to compare with.
"""

from __future__ import annotations

import copy
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.feature import VectorAssembler
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from spark_elastic import Rows
from spark_elastic.errors import ElasticError, InvalidInput, WorkerFailed
from spark_elastic.estimators.torch_estimator import ElasticTorchEstimator
from spark_elastic.handwritten.torch_state import ElasticDataLoader
from spark_elastic.torch import progress
from tests.spark.estimators import ROWS, WORKERS, Net, estimator, is_close, table, train_plain

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def state_of(est: ElasticTorchEstimator) -> str:
    """Everything that a fit could change: parameters, the model's and the optimizer's state, shared storage."""
    model, optimizer, objects = est.getModel(), est.getOptimizer(), ("model", "optimizer", "loss")
    params = {p.name: v for p, v in est.extractParamMap().items() if p.name not in objects}
    tensors = [(tensor.data_ptr(), tensor.tolist()) for tensor in model.state_dict().values()]
    grads = [p.grad is None for p in model.parameters()]
    return repr((tensors, grads, model.training, optimizer.state_dict(), params))


def test_p2_fits_of_a_dataframe_and_of_its_rows_agree_take_the_steps_of_a_loop_and_change_nothing(
    spark: SparkSession, tmp_path: Path
) -> None:
    df = table(spark)
    rows = Rows.from_dataframe(df, tmp_path, columns=["x", "y"])
    est = estimator(tmp_path, batch_size=4, epochs=2, ledger=True, run_id="mine")
    before = state_of(est)
    first = est.fit(rows)
    assert state_of(est) == before
    second = est.copy({est.run_id: "other"}).fit(df)
    assert state_of(est) == before
    pairs = zip(first.model.state_dict().values(), second.model.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert first.summary.digest == second.summary.digest != ""
    assert [epoch["epoch"] for epoch in second.history] == [0, 1]
    assert second.summary.rows_per_epoch == [ROWS] * 2
    losses = [epoch["loss"] for epoch in second.history]
    assert losses == sorted(losses, reverse=True)
    assert [world.size for world in second.summary.worlds] == [WORKERS]
    # Of the DataFrame's fit nothing is kept, of the rows what they were written to.
    kept = set(map(rows.store.path, rows.manifest.files))
    assert {str(path) for path in tmp_path.rglob("*.parquet")} == kept
    seen = second.transform(df).collect()
    with torch.no_grad():
        expected = second.model(torch.tensor([row.x for row in seen], dtype=torch.float64)).tolist()
    assert [row.prediction for row in seen] == pytest.approx(expected)
    check_steps(rows, read_steps(tmp_path / "runs" / "mine" / "ledger"))
    held_out = est.copy({est.run_id: "validated", est.validation: 0.25}).fit(rows)
    assert held_out.history[0]["rows"] + held_out.history[0]["val_rows"] == ROWS
    df.write.parquet(str(tmp_path / "plain"))
    files = spark.read.parquet(str(tmp_path / "plain"))
    in_place = Rows.from_dataframe(files, row_order="table", missing={"nans": "keep"})
    assert "files of Parquet in " in in_place.source
    assert in_place.count == ROWS
    for wrong, says in (
        (lambda: est.fit(in_place), "run_id 'mine' began with other files"),
        (lambda: Rows.from_dataframe(df), "store is missing"),
        (lambda: Rows.from_dataframe(df, tmp_path, materialize="never"), "takes rows of files that"),
        (lambda: Rows.from_dataframe(df, tmp_path, columns=["z"]), "columns names 'z'"),
        (lambda: estimator(tmp_path, feature_cols=["v"]).fit(rows), "no column 'v'"),
    ):
        with pytest.raises(InvalidInput, match=says):
            wrong()


def read_steps(ledger: Path) -> dict[tuple[int, int], list[int]]:
    """(epoch, step) -> the rows that all ranks contributed."""
    steps: dict[tuple[int, int], list[int]] = {}
    for file in ledger.iterdir():
        for line in map(json.loads, file.read_text().splitlines()):
            if line["event"] == "contributes":
                steps.setdefault((line["epoch"], line["step"]), []).extend(line["rows"])
    return steps


def check_steps(rows: Rows, steps: dict[tuple[int, int], list[int]]) -> None:
    """A loop takes the same rows in each step."""
    loader = ElasticDataLoader(rows, 4 * WORKERS)
    for epoch in range(2):
        for step, batch in enumerate(loader):
            trained = torch.stack([rows.dataset()[row]["x"] for row in sorted(steps[epoch, step])])
            assert sorted(batch["x"].tolist()) == sorted(trained.tolist())


def test_a_pipeline_of_vectors_fits_as_asked_and_keeps_its_data(spark: SparkSession, tmp_path: Path) -> None:
    """Weights of rows, clipping, shapes, a loss of the step, a factory and other epochs reach the workers."""

    def compare_rows(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Each row with all others."""
        return (output[:, None] - output - y[:, None] + y).abs().mean(1)

    def compare_weighted(output: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (compare_rows(output, y) * w).sum() / w.sum()

    df, run_id = table(spark), "m[i]n*: {é}%20#?"
    est = estimator(
        tmp_path / "store[1]*",
        feature_cols="v",
        loss=compare_rows,
        loss_scope="step",
        batch_size=ROWS // WORKERS // 2,
        backward_passes_per_step=2,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        sample_weight_col="w",
        gradient_clip_norm=0.25,
        input_shapes=[(1, 2)],
        keep_data=True,
        ledger=True,
        run_id=run_id,
    )
    assembler = VectorAssembler(inputCols=["a", "b"], outputCol="v")
    fitted = Pipeline(stages=[assembler, est]).fit(df, {est.epochs: 2})
    model = fitted.stages[-1]
    assert len(model.history) == 2
    assert is_close(model, train_plain(df, 2, compare_weighted, clip=0.25))
    assert not is_close(model, train_plain(df, 2, compare_weighted))
    assert not is_close(model, train_plain(df, 2, lambda *given: compare_rows(*given[:2]).mean(), clip=0.25))
    fitted.write().save(str(tmp_path / "saved"))
    back = PipelineModel.load(str(tmp_path / "saved"))
    assert back.transform(df).orderBy("id").collect() == fitted.transform(df).orderBy("id").collect()
    assert list((tmp_path / "store[1]*" / "data").rglob("*.parquet"))
    steps = read_steps(tmp_path / "store[1]*" / "runs" / run_id / "ledger")
    for epoch in range(2):
        assert sorted(row for at, rows in steps.items() if at[0] == epoch for row in rows) == [*range(ROWS)]


def test_an_error_in_user_code_comes_back_with_its_traceback(spark: SparkSession, tmp_path: Path) -> None:
    def raise_in_loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        if progress() is not None:  # in a worker
            raise RuntimeError("the loss is out of order")
        return ((output - label) ** 2).mean()

    est = estimator(tmp_path, loss=raise_in_loss, num_workers=1)
    with pytest.raises(WorkerFailed, match="the loss is out of order") as caught:
        est.fit(table(spark))
    assert "in raise_in_loss" in str(caught.value)
    assert copy.deepcopy(est.getModel()) is not None


def test_existing_parquet_files_are_trained_on_in_place(spark: SparkSession, tmp_path: Path) -> None:
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
    assert is_close(model, [parameter.detach() for parameter in net.parameters()])
    pq.write_table(pa.table({"x": [[1.0, 2.0], None]}), tmp_path / "rows" / "y=1" / "1.parquet")
    with pytest.raises(InvalidInput, match="column 'x' has 1 nulls in 50 rows"):
        est.copy({est.run_id: "other"}).fit_on_parquet(str(tmp_path / "rows"))


# ---- bad input: one sentence, before any Spark job unless only the data itself can tell


@pytest.fixture
def job_group(spark: SparkSession) -> Iterator[str]:
    """Jobs of this thread, and of threads that carry on its properties, belong to it."""
    name = uuid.uuid4().hex
    spark.sparkContext.setJobGroup(name, "bad input")
    yield name
    spark.sparkContext.setLocalProperty("spark.jobGroup.id", None)


WIDE = {"model": torch.nn.Linear(3, 1).double(), "optimizer": lambda params: torch.optim.SGD(params, lr=0.1)}
# (changes, sentence, whether only the data tells)
WRONG: list[tuple[dict[str, Any], str, bool]] = [
    ({"feature_cols": ["s"]}, "feature column 's' is string, which cannot be trained on", False),
    ({"batch_size": 0}, "batch_size must be a whole number of 1 or more; got 0", False),
    ({"model": Net()}, "the optimizer holds 4 of 4 parameters that are not the model's", False),
    ({"store": None}, "store is missing: executors of spark://", False),
    ({"store": "/proc/store"}, "Cannot write .* in the store", False),
    ({"feature_cols": ["r"]}, "column 'r' have different lengths, 2 and 3: the row with y=", True),
    (WIDE, r"two rows of the data, 'x' of .* with RuntimeError: mat1 and", True),
    ({"input_shapes": [(3, 1)], "run_id": "mine"}, "input_shapes says .* 'x', whose rows have 2", True),
]


@pytest.mark.parametrize(("changes", "sentence", "runs"), WRONG, ids=[says[:40] for _, says, _ in WRONG])
def test_what_is_wrong_is_one_sentence_and_leaves_nothing_in_the_store(
    spark: SparkSession, job_group: str, tmp_path: Path, changes: dict[str, Any], sentence: str, runs: bool
) -> None:
    df = table(spark).withColumns({"s": F.lit("a"), "r": F.expr("array_repeat(1.0, if(id = 4, 3, 2))")})
    with pytest.raises(ElasticError, match=sentence) as caught:
        estimator(tmp_path).setParams(**changes).fit(df)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")
    assert bool(spark.sparkContext.statusTracker().getJobIdsForGroup(job_group)) is runs
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
