"""What a platform must be able to do. Its last line is JSON.

`python check.py FOLDER [PART]` in an environment with the wheel. It needs pyspark, torch and the wheel, and nothing
else of this repository. The process starts itself again for Spark Connect, whose sessions and classic ones cannot live
in one process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROWS, WORKERS, EPOCHS, STEPS = 48, 3, 24, 30
STEP_SECONDS = 0.25
TOLERANCE = 1e-9  # between weights in float64
COMMAND_SECONDS = 600  # of two processes that import torch, on a busy machine
CONNECT_SECONDS = 900


class Net(torch.nn.Module):
    """Two layers in float64, one number per row. Steps of workers take their time: the training outlasts a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        layers = torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        self.layers = torch.nn.Sequential(*layers).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from spark_elastic.torch import progress

        if progress() is not None:
            time.sleep(STEP_SECONDS)
        return self.layers(x.reshape(len(x), 2).double())[:, 0]


def make_table(spark: Any) -> Any:
    draw = np.random.default_rng(5)
    x = draw.normal(size=(ROWS, 2))
    y = x @ [2.0, -1.0] + 0.5
    return spark.createDataFrame(
        [(i, x[i].tolist(), float(y[i])) for i in range(ROWS)], "id long, x array<double>, y double"
    )


def make_estimator(folder: Path, workers: int, epochs: int, **more: Any) -> Any:
    from spark_elastic import ElasticTorchEstimator

    net = Net()
    return ElasticTorchEstimator(
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9),
        loss=torch.nn.MSELoss(),
        feature_cols=["x"],
        label_cols=["y"],
        batch_size=ROWS // workers,
        epochs=epochs,
        num_workers=workers,
        min_workers=1,
        gather_timeout=120.0,
        store=str(folder / "store"),
        verbose=0,
        **more,
    )


def train_alone(df: Any, steps: int) -> list[torch.Tensor]:
    """What torch alone makes of the whole table in so many steps."""
    rows = df.orderBy("id").collect()
    x, y = (torch.tensor([row[name] for row in rows], dtype=torch.float64) for name in ("x", "y"))
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
    return [parameter.detach() for parameter in net.parameters()]


def require_same_weights(model: Any, df: Any, steps: int) -> None:
    got = [parameter.detach() for parameter in model.model.parameters()]
    for a, b in zip(got, train_alone(df, steps), strict=True):
        difference = float((a - b).abs().max() / b.abs().max())
        require(difference < TOLERANCE, f"weights differ by {difference} from those of torch alone")


def require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise SystemExit(otherwise)


def count_rows(folder: Path) -> Counter[tuple[int, int]]:
    """By the history of the final weights: (epoch, row) -> how often it was trained."""
    lines = [json.loads(line) for path in folder.rglob("*.jsonl") for line in path.read_text().splitlines()]
    final: dict[tuple[int, int], int] = {}
    for line in lines:
        if line["event"] == "applied":
            step = (line["epoch"], line["step"])
            final[step] = max(final.get(step, 0), line["generation"])
    seen: Counter[tuple[int, int]] = Counter()
    for line in lines:
        if line["event"] == "contributes" and final.get((line["epoch"], line["step"])) == line["generation"]:
            seen.update((line["epoch"], row) for row in line["rows"])
    return seen


def fit_through_a_loss(spark: Any, folder: Path, workers: int = WORKERS, whom: str = "kill executor") -> str:
    """One is killed: the weights of a plain loop, each row once an epoch; transform, save and load."""
    from spark_elastic import ElasticTorchModel
    from spark_elastic.testing import ClusterFaults, InjectedFault

    faults = ClusterFaults([InjectedFault(whom, step=0, epoch=3, rank=1)], str(folder / "faults"))
    df = make_table(spark)
    est = make_estimator(folder, workers, EPOCHS, run_id="fit", ledger=True, callbacks=[faults.callback()])
    model = est.fit(df)
    require(len(faults.read_injected()) == 1, "nobody was killed")
    sizes = [world.size for world in model.summary.worlds]
    kinds = [change.kind.value for change in model.summary.report.world_changes]
    require("loss" in kinds, f"no world came of a loss: {kinds}, {sizes}")
    require_same_weights(model, df, EPOCHS)
    once = Counter((epoch, row) for epoch in range(EPOCHS) for row in range(ROWS))
    require(count_rows(folder / "store" / "runs" / "fit" / "ledger") == once, "rows were lost or doubled")
    shown = [row.prediction for row in model.transform(df).orderBy("id").collect()]
    model.save(str(folder / "model"))
    again = ElasticTorchModel.load(str(folder / "model")).transform(df).orderBy("id").collect()
    require(shown == [row.prediction for row in again], "the loaded model predicts something else")
    return f"worlds of {sizes}"


def fit_by_petastorm(spark: Any, folder: Path) -> str:
    """Its reader reads rows, and ours a data set that it wrote: the weights of a plain loop each time."""
    from petastorm.codecs import NdarrayCodec, ScalarCodec
    from petastorm.etl.dataset_metadata import materialize_dataset
    from petastorm.unischema import Unischema, UnischemaField, dict_to_spark_row
    from pyspark.sql.types import DoubleType, LongType

    df = make_table(spark)
    require_same_weights(make_estimator(folder, 2, 2, reader="petastorm").fit(df), df, 2)
    fields = [
        UnischemaField("id", np.int64, (), ScalarCodec(LongType()), False),
        UnischemaField("x", np.float64, (2,), NdarrayCodec(), False),
        UnischemaField("y", np.float64, (), ScalarCodec(DoubleType()), False),
    ]
    schema, written = Unischema("Rows", fields), folder / "written"
    rows = [dict_to_spark_row(schema, row.asDict() | {"x": np.array(row.x)}) for row in df.collect()]
    with materialize_dataset(spark, written.as_uri(), schema):
        spark.createDataFrame(rows, schema.as_spark_schema()).write.parquet(str(written))
    require_same_weights(make_estimator(folder, 2, 2).fit_on_parquet(str(written)), df, 2)
    return "its reader, and what it wrote"


def loop(folder: str, whom: str) -> tuple[list[int], float]:
    """A loop around DDP without any configuration, whose rank 1 is lost in a step: the sizes of the worlds, and how
    far the weights are from those of a plain loop."""
    import torch.distributed as dist

    import spark_elastic.torch as hvd
    from spark_elastic.testing import ClusterFaults, InjectedFault

    hvd.init()
    faults = ClusterFaults([InjectedFault(whom, step=STEPS // 3, rank=1)], folder)
    sizes: list[int] = []

    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(11)
        net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
        return net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        drawn = torch.Generator().manual_seed(number)
        optimizer.zero_grad()
        model(torch.randn(6, 4, generator=drawn, dtype=torch.float64)).square().mean().backward()
        optimizer.step()

    net, optimizer = build()

    @hvd.elastic.run
    def train(state: Any) -> None:
        dist.init_process_group()
        ddp = torch.nn.parallel.DistributedDataParallel(net)
        sizes.append(dist.get_world_size())
        while state.step < STEPS:
            if hvd.size() > 1:
                faults.inject(state.step, hvd.rank(), hvd.size())
            time.sleep(STEP_SECONDS)
            step(ddp, optimizer, state.step)
            state.step += 1
            state.commit()

    train(hvd.elastic.TorchState(net, optimizer, step=0))
    alone, its_optimizer = build()
    for number in range(STEPS):
        step(alone, its_optimizer, number)
    pairs = zip(net.parameters(), alone.parameters(), strict=True)
    return sizes, max(float((a - b).detach().abs().max()) for a, b in pairs)


def run_loop(folder: Path, whom: str) -> str:
    import spark_elastic

    given = (str(folder), whom)
    results = spark_elastic.run(loop, given, num_workers=2, min_workers=1, gather_timeout=120.0)
    require(any(folder.rglob("*.json")), "no worker was lost")
    require(all(gap < TOLERANCE for _, gap in results), f"DDP's weights differ from torch alone: {results}")
    worlds = max((sizes for sizes, _ in results), key=len)
    require(len(worlds) > 1, f"no world came after the loss: {results}")
    return f"worlds of {worlds}"


def fit_over_connect(spark: Any, folder: Path) -> str:
    df = make_table(spark)
    model = make_estimator(folder, 2, 2).fit(df)
    require_same_weights(model, df, 2)
    count = model.transform(df).where("prediction is not null").count()
    require(count == ROWS, "not all rows were predicted")
    return run_loop(folder / "faults", "kill worker")


def find_connect() -> str | None:
    """Why there is no Spark Connect in this environment, or None."""
    import pyspark

    if not any(Path(pyspark.__file__).parent.rglob("spark-connect_*.jar")):
        return "pyspark from PyPI brings no Spark Connect server"
    try:
        import pyspark.sql.connect.session
    except ImportError as error:
        return f"the platform's list lacks a package: {str(error).splitlines()[0]}"
    return None


def check_command(folder: Path) -> str:
    """Without Spark: processes of this machine, by the command that the wheel brings."""
    script = folder / "sum.py"
    script.write_text(
        "import numpy as np\nimport spark_elastic.torch as hvd, torch\nhvd.init()\n"
        "print('sum', float(hvd.allreduce(torch.ones(1), op=hvd.Sum)))\n"
    )
    command = [Path(sysconfig.get_path("scripts"), "spark-elastic-run"), "-np", "2", "-H", "localhost:2"]
    command += [sys.executable, script]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=COMMAND_SECONDS)
    require(done.stdout.count("sum 2.0") == 2, f"spark-elastic-run said {done.stdout} {done.stderr[-2000:]}")
    return "sum of two ranks"


def check_classic(folder: Path) -> dict[str, str]:
    spark = start_executors()
    try:
        fit = fit_through_a_loss(spark, folder)
        ddp = run_loop(folder / "ddp-faults", "kill worker")
        return {"fit": fit, "ddp": ddp, "loop": run_loop(folder / "loop-faults", "kill executor")}
    finally:
        spark.stop()


def check_fit(folder: Path) -> dict[str, str]:
    """The part for platforms whose check is to be short."""
    spark = start_executors()
    try:
        seen = {"fit": fit_through_a_loss(spark, folder)}
        if importlib.util.find_spec("petastorm"):
            seen["petastorm"] = fit_by_petastorm(spark, folder / "petastorm")
        return seen
    finally:
        spark.stop()


def check_local(folder: Path) -> dict[str, str]:
    """The part that the normal test run has time for: in one JVM, whose executor is the driver's."""
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.master("local[2]").getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    try:
        return {"fit": fit_through_a_loss(spark, folder, 2, "kill worker")}
    finally:
        spark.stop()


def start_executors() -> Any:
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(f"local-cluster[{WORKERS},1,512]")
    spark = builder.config("spark.executor.memory", "512m").getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    return spark


def check_connect(folder: Path) -> dict[str, str]:
    from pyspark.sql import SparkSession

    spark = SparkSession.builder.remote("local[2]").getOrCreate()
    try:
        return {"connect": fit_over_connect(spark, folder)}
    finally:
        spark.stop()


def main(folder: Path, part: str = "all") -> None:
    import spark_elastic

    place = Path(spark_elastic.__file__)
    require(place.is_relative_to(sys.prefix), f"spark_elastic is not the wheel's, but in {place.parent}")
    os.environ |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    parts = {"all": check_all, "fit": check_fit, "local": check_local, "connect": check_connect}
    sys.stdout.write("\n" + json.dumps(parts[part](folder)) + "\n")


def check_all(folder: Path) -> dict[str, str]:
    seen = {"command": check_command(folder)} | check_classic(folder)
    reason = find_connect()
    if reason is not None:
        return seen | {"no_connect": reason}
    command = [sys.executable, __file__, str(folder / "connect"), "connect"]
    environment = os.environ | {"SPARK_TESTING": "1"}  # the server's port, which is a fixed one otherwise
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, timeout=CONNECT_SECONDS, check=False
    )
    require(done.returncode == 0, "the check on Spark Connect failed")
    of_connect: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return seen | of_connect


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
