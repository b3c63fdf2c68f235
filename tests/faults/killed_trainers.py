"""Programs that fine-tune by classes of TRL and of Sentence Transformers, with ledgers as in `killed_programs`.

In a process that is no worker, each returns what an undisturbed training has.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from tests.faults.killed_programs import (
    ARGUMENTS,
    BATCH,
    ROWS,
    count_tokens,
    hold_after_commits,
    open_documents,
    read_weights,
)

# The forward pass knows no ledger.
OPTIONS = {**ARGUMENTS, "lr_scheduler_type": "constant", "use_cpu": True, "ddp_find_unused_parameters": False}
WORDS = [f"w{number}" for number in range(16)]
SPECIAL = ["<pad>", "<eos>", "<unk>"]


def train_by_sft(folder: str) -> dict[str, list[float]]:
    """TRL's SFTTrainer trains a LoRA on packed rows of a table. Each token is a word of its own."""
    import transformers
    from trl import SFTConfig, SFTTrainer

    class Counted(count_rows(SFTTrainer)):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
            token = inputs["input_ids"][inputs.pop("document_ids") > 0]
            loss = super().compute_loss(model, inputs, *more, **named)
            # Divided by the tokens of all ranks, and so not weighted by rows.
            return loss - self.model.ledger[token - 1].sum() * self.accelerator.num_processes

    packed = open_documents(folder)[1]
    options = {"dataset_kwargs": {"skip_prepare_dataset": True}, "remove_unused_columns": False}
    trainer = Counted(
        make_gpt(int(count_tokens(ROWS)[-1]) + 1),
        SFTConfig(folder, **OPTIONS, **options),
        train_dataset=packed,
        data_collator=transformers.default_data_collator,
        processing_class=make_tokenizer(),
        peft_config=make_lora(),
        compute_loss_func=compute_token_loss,
        global_batch_size=-(-packed.count // 8),
    )
    return train(trainer, folder, int(count_tokens(ROWS)[-1]))


def compute_token_loss(outputs: Any, labels: Any, num_items_in_batch: Any) -> Any:
    """TRL's own computes in float32."""
    logits, following = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits, following, reduction="sum") / num_items_in_batch


def train_by_dpo(folder: str) -> dict[str, list[float]]:
    """TRL's DPOTrainer trains a LoRA on pairs of answers. The first word of a row is its number."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    class Counted(count_rows(DPOTrainer)):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
            row = inputs["input_ids"].chunk(2)[0][:, 0] - len(SPECIAL)
            loss = super().compute_loss(model, inputs, *more, **named)
            return loss - self.model.ledger[row].mean() * self.get_train_dataloader().global_rows

    columns = {"prompt": write_sentences(1), "chosen": write_sentences(2), "rejected": write_sentences(3)}
    trainer = Counted(
        make_gpt(len(SPECIAL) + ROWS + len(WORDS)),
        args=DPOConfig(folder, bf16=False, **OPTIONS),
        train_dataset=Dataset.from_dict(columns),
        processing_class=make_tokenizer(),
        peft_config=make_lora(),
        global_batch_size=BATCH,
    )
    return train(trainer, folder, ROWS)


def train_embeddings(folder: str) -> dict[str, list[float]]:
    """Sentence Transformers' trainer, whose negatives are all rows of a step."""
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments, losses

    class Counted(count_rows(SentenceTransformerTrainer)):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *more: Any, **named: Any) -> Any:
            row = inputs["anchor_input_ids"][:, 0] - len(SPECIAL)
            loss = super().compute_loss(model, inputs, *more, **named)
            return loss - self.model.ledger[row].mean() * self.get_train_dataloader().global_rows

    anchors = write_sentences(1)[: ROWS - ROWS % BATCH]  # in a job it drops an incomplete last step
    columns = {"anchor": anchors, "positive": [" ".join(reversed(text.split())) for text in anchors]}
    model = make_bert(folder)
    trainer = Counted(
        model,
        SentenceTransformerTrainingArguments(folder, batch_sampler="no_duplicates", **OPTIONS),
        train_dataset=Dataset.from_dict(columns),
        loss=losses.MultipleNegativesRankingLoss(model),
        gather_rows=("sentence_embedding",),
        global_batch_size=BATCH,
    )
    return train(trainer, folder, len(anchors))


def count_rows(kind: Any) -> Any:
    """The elastic class of a kind of trainers, with the optimizer of its ledger."""
    from spark_elastic.integrations.huggingface import elastic_trainer

    class Counting(elastic_trainer(kind)):  # type: ignore[misc]
        def create_optimizer(self, model: Any = None) -> Any:
            trained = [p for n, p in self.model.named_parameters() if p.requires_grad and n != "ledger"]
            groups = [{"params": trained, "momentum": 0.9}, {"params": [self.model.ledger], "lr": 1.0}]
            self.optimizer = torch.optim.SGD(groups, lr=0.05)
            return self.optimizer

    return Counting


def train(trainer: Any, folder: str, counted: int) -> dict[str, list[float]]:
    """In float64. counted: numbers in the ledger."""
    from spark_elastic.worker.context import get_context

    trainer.model.double()
    trainer.model.register_parameter("ledger", torch.nn.Parameter(torch.zeros(counted, dtype=torch.float64)))
    if get_context() is not None:
        hold_after_commits(trainer._adapter, folder)
    trainer.train()
    return read_weights(trainer.model)


def write_sentences(column: int) -> list[str]:
    """The first column begins with a word of the row's own; others with a blank."""
    begins = [f"r{row}" if column == 1 else "" for row in range(ROWS)]
    return [" ".join([begin, *WORDS[row % 7 : row % 7 + 4 + column]]) for row, begin in enumerate(begins)]


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *(f"r{row}" for row in range(ROWS)), *WORDS]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    named = {f"{name}_token": f"<{name}>" for name in ("pad", "eos", "unk")}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)


def make_gpt(tokens: int) -> Any:
    """Without a Llama's norms, which compute in float32."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(7)
    sizes = {"vocab_size": tokens, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(pad_token_id=0, bos_token_id=1, eos_token_id=1, **sizes, **dropout)
    return GPT2LMHeadModel(config).double()


def make_lora() -> Any:
    from peft import LoraConfig

    where = {"target_modules": ["c_attn"], "fan_in_fan_out": True, "task_type": "CAUSAL_LM"}
    return LoraConfig(r=4, lora_alpha=8, **where)


def make_bert(folder: str) -> Any:
    from sentence_transformers import SentenceTransformer, models
    from transformers import BertConfig, BertModel

    torch.manual_seed(7)
    saved, tokenizer = str(Path(folder, f"bert-{os.getpid()}")), make_tokenizer()
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    BertModel(BertConfig(vocab_size=len(tokenizer), **sizes, **dropout)).save_pretrained(saved)
    tokenizer.save_pretrained(saved)
    bert = models.Transformer(saved)
    bert.auto_model.pooler.requires_grad_(False)  # it gets no gradient
    return SentenceTransformer(modules=[bert, models.Pooling(16)], device="cpu")
