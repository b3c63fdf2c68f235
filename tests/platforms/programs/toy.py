"""What the programs of this folder train on: a regression with noise, words without meaning, and a sum of weights."""

from __future__ import annotations

import os
import random
from typing import Any

import torch

WORDS = [f"w{number}" for number in range(64)]
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def make_rows(count: int = 320) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(3)
    x = torch.randn(count, 8, generator=drawn)
    return x, (x @ torch.arange(8.0) + torch.randn(count, generator=drawn))[:, None]


def make_net() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def make_sentences(count: int = 320) -> list[str]:
    dice = random.Random(5)
    return [" ".join(dice.choices(WORDS, k=12)) for _ in range(count)]


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def make_llama(tokenizer: Any, kind: Any = None, **options: Any) -> Any:
    """A Llama of random weights. kind: of transformers' classes; None: the language model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    options |= {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = LlamaConfig(vocab_size=len(tokenizer), **SIZES, **options)
    return (kind or LlamaForCausalLM)(config)


def make_bert() -> Any:
    """A SentenceTransformer of random weights."""
    from sentence_transformers import SentenceTransformer, models
    from transformers import BertConfig, BertModel

    folder = f"bert-{os.getpid()}"
    tokenizer = make_tokenizer()
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=len(tokenizer), **SIZES, **dropout)
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return SentenceTransformer(modules=[models.Transformer(folder), models.Pooling(32)], device="cpu")


def weigh(model: torch.nn.Module) -> float:
    """The sum of all weights' squares: two trainings that agree in it have gone the same way."""
    return float(sum(parameter.detach().double().square().sum() for parameter in model.parameters()))
