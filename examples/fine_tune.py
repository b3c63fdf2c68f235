"""Hugging Face's Trainer that fine-tunes a small language model, loses a worker, and continues with the step in flight.

    spark-elastic-run -np 3 --min-np 1 python examples/fine_tune.py

The model is a Llama of random weights and the text is made here, so nothing is downloaded. Take `ElasticTrainer` in
place of `Trainer`, and give the global batch: that is all. In the first world, rank 1 kills itself in a step.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

import spark_elastic.torch as hvd
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


def make_text() -> list[dict[str, torch.Tensor]]:
    """Rows of words that count upwards from a random one."""
    first = torch.randint(WORDS, (ROWS, 1), generator=torch.Generator().manual_seed(1))
    words = (first + torch.arange(LENGTH)) % WORDS
    return [{"input_ids": row, "labels": row} for row in words]


def train() -> None:
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
            model, args, train_dataset=make_text(), callbacks=[Loss()], global_batch_size=BATCH_SIZE
        )
        output = trainer.train()
    if hvd.rank() == 0:
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        print(f"{output.global_step} steps; the loss fell from {losses[0]} to {losses[-1]}", flush=True)


if __name__ == "__main__":
    train()
