"""Hugging Face's Trainer that fine-tunes a small language model, loses a worker, and continues with the step in flight.

    python examples/fine_tune.py

The model is a Llama of random weights and the text is a table that is made here, so nothing is downloaded. Take
`ElasticTrainer` in place of `Trainer`, give the global batch and the table's rows: that is all. In the first world,
rank 1 kills itself in a step.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from typing import Any

import torch
from pyspark.sql import SparkSession
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

import spark_elastic
import spark_elastic.torch as hvd
from spark_elastic import Rows
from spark_elastic.torch.huggingface import ElasticTrainer

EPOCHS = 4
BATCH_SIZE = 32  # rows of a step over all workers
WORDS, LENGTH, ROWS = 64, 16, 500
LOST_AT = 20  # the step in which a worker dies


class Loss(TrainerCallback):
    """Loses a worker, and says what that cost."""

    def __init__(self) -> None:
        self.first_size = hvd.size()
        self.size, self.time = hvd.size(), time.time()  # at the newest step

    def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if state.global_step == LOST_AT and hvd.size() == self.first_size > 1 and hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if hvd.size() != self.size and hvd.rank() == 0:
            seconds = time.time() - self.time
            print(
                f"{self.size} workers became {hvd.size()}: step {state.global_step} came {seconds:.2f} s after the one "
                "before",
                flush=True,
            )
        self.size, self.time = hvd.size(), time.time()


def train(rows: Rows) -> None:
    hvd.init()
    torch.manual_seed(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            num_train_epochs=EPOCHS,
            learning_rate=0.01,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            logging_steps=16,
        )
        trainer = ElasticTrainer(
            model, args, train_dataset=rows, callbacks=[Loss()], global_batch_size=BATCH_SIZE
        )
        output = trainer.train()
    if hvd.rank() == 0:
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        print(f"{output.global_step} steps; the loss fell from {losses[0]} to {losses[-1]}", flush=True)


def write_text(folder: str) -> Rows:
    """Rows of a DataFrame, of words that count upwards from a random one."""
    spark = SparkSession.builder.master("local[3]").getOrCreate()
    words = f"transform(sequence(0, {LENGTH - 1}), k -> pmod(hash(id) + k, {WORDS}))"
    df = spark.range(ROWS).selectExpr(f"{words} as input_ids")
    return Rows.from_dataframe(df.selectExpr("input_ids", "input_ids as labels"), folder)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as store:  # on a cluster, a folder that all hosts see
        spark_elastic.run(train, (write_text(store),), num_workers=3, min_workers=1)
