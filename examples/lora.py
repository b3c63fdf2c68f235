"""TRL's SFTTrainer that fine-tunes a LoRA of PEFT on rows of a Delta table, loses a worker, and logs to MLflow.

    pip install trl peft deltalake mlflow
    python examples/lora.py

The model is a Llama of random weights, and the table is written here, so nothing is downloaded. `elastic_trainer` makes
the class elastic: a commit holds the LoRA and names the frozen base by its content. In the first world, rank 1 kills
itself in a step. MLflow gets the numbers of the training, what the loss of a worker cost, and the LoRA.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import mlflow
import torch
from deltalake import write_deltalake
from peft import LoraConfig
from pyspark.sql import SparkSession
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

import spark_elastic
import spark_elastic.torch as hvd
from spark_elastic import Packing, Rows
from spark_elastic.torch.huggingface import elastic_trainer

EPOCHS = 4
BATCH_SIZE = 16  # sequences of a step over all workers
WORDS, LENGTH, DOCUMENTS = 64, 32, 1200
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
            mlflow.log_metric("seconds_of_the_loss", seconds, state.global_step)
        self.size, self.time = hvd.size(), time.time()


def make_model() -> LlamaForCausalLM:
    """On real data: `AutoModelForCausalLM.from_pretrained(...)`; each worker process loads it once."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, pad_token_id=0, eos_token_id=1, **sizes))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """On real data: `AutoTokenizer.from_pretrained(...)`."""
    from tokenizers import Tokenizer, models

    vocabulary = {f"w{number}": number for number in range(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w2"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", eos_token="w1")


def train(rows: Rows, tracking: str) -> None:
    hvd.init()
    mlflow.set_tracking_uri(tracking)
    args = SFTConfig(
        tempfile.gettempdir(),
        num_train_epochs=EPOCHS,
        learning_rate=0.05,
        max_length=LENGTH,
        dataset_kwargs={"skip_prepare_dataset": True},  # the table has tokens
        report_to="mlflow",
        save_strategy="no",
        logging_steps=16,
        disable_tqdm=True,
        bf16=False,
    )
    trainer = elastic_trainer(SFTTrainer)(
        make_model(),
        args,
        train_dataset=rows.pack(Packing("input_ids", LENGTH)),
        processing_class=make_tokenizer(),
        peft_config=LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"),
        callbacks=[Loss()],
        global_batch_size=BATCH_SIZE,
    )
    output = trainer.train()
    if hvd.rank() == 0:
        with tempfile.TemporaryDirectory() as folder:
            trainer.model.save_pretrained(folder)  # the LoRA alone
            mlflow.log_artifacts(folder, "lora")
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        print(f"{output.global_step} steps; the loss fell from {losses[0]} to {losses[-1]}", flush=True)


def write_tokens(folder: str) -> str:
    """A Delta table of documents of several lengths. Returns its path.

    With Delta Lake in Spark: `df.write.format("delta").save(path)`.
    """
    spark = SparkSession.builder.master("local[3]").getOrCreate()
    tokens = f"transform(sequence(0, 3 + pmod(hash(id, 1), {LENGTH - 4})), k -> pmod(hash(id) + k, {WORDS}))"
    df = spark.range(DOCUMENTS).selectExpr(f"{tokens} as input_ids")
    write_deltalake(f"{folder}/tokens", df.toArrow())
    return f"{folder}/tokens"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:  # on a cluster, places that all hosts see
        table = Rows.from_table(write_tokens(folder))
        tracking = os.environ.get("MLFLOW_TRACKING_URI", Path(folder, "mlflow").as_uri())
        env = {"MLFLOW_ALLOW_FILE_STORE": "true"}  # where no server is named
        spark_elastic.run(train, (table, tracking), num_workers=3, min_workers=1, env=env)
