"""neuralforecast trains NHITS on a Spark DataFrame, with `spark_elastic.TorchDistributor` in place of pyspark's."""

import os
import sys
from functools import partial

import numpy as np
import pandas as pd
import pyspark.ml.torch.distributor
from lightning.pytorch.callbacks import Callback
from neuralforecast import DistributedConfig, NeuralForecast
from neuralforecast.models import NHITS
from pyspark.sql import SparkSession
from steps import finish
from toy import weigh

import spark_elastic

HERE = os.path.dirname(os.path.abspath(__file__))


class Steps(Callback):
    def on_train_batch_end(self, trainer, *_):
        sys.path.append(HERE)  # which executors do not search
        from steps import note

        note(trainer.global_step)


pyspark.ml.torch.distributor.TorchDistributor = partial(
    spark_elastic.TorchDistributor, store=os.path.abspath("results"), env={"STEPS": os.environ["STEPS"]}
)
spark = (
    SparkSession.builder.master("local-cluster[2,1,1024]").config("spark.ui.enabled", "false").getOrCreate()
)
days = pd.date_range("2026-01-01", periods=60)
table = pd.concat(
    pd.DataFrame({"unique_id": f"series-{i}", "ds": days, "y": np.sin(np.arange(60.0) / 7 * (i + 1))})
    for i in range(8)
)
model = NHITS(
    h=7, input_size=14, max_steps=30, accelerator="cpu", callbacks=[Steps()], enable_progress_bar=False
)
forecast = NeuralForecast([model], freq="D")
config = DistributedConfig(partitions_path=os.path.abspath("partitions"), num_nodes=2, devices=1)
forecast.fit(spark.createDataFrame(table), distributed_config=config)
spark.stop()
os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
finish(weigh(forecast.models[0]))
