"""What the programs of this folder train on: a regression with noise, words without meaning, and a sum of weights."""

from __future__ import annotations

import random
from typing import Any

import torch

WORDS = [f"w{number}" for number in range(64)]


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


def weigh(model: torch.nn.Module) -> float:
    """The sum of all weights' squares: two trainings that agree in it have gone the same way."""
    return float(sum(parameter.detach().double().square().sum() for parameter in model.parameters()))
