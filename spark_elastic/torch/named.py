"""An optimizer's parameters under the names that the user gave them. Looks only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from spark_elastic.errors import InvalidInput


def named_parameters_of(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, torch.nn.Parameter]] | None
) -> list[tuple[str, torch.nn.Parameter]]:
    """The optimizer's parameters with their names, in the order of the names given."""
    mine = [
        (f"{i}.{j}", parameter)
        for i, group in enumerate(optimizer.param_groups)
        for j, parameter in enumerate(group["params"])
    ]
    if named is None:
        return mine
    pairs: list[Any] = list(named)
    if not all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs):
        raise InvalidInput(
            "named_parameters must be pairs of name and parameter, as model.named_parameters() gives."
        )
    for what, keys in (("name", [name for name, _ in pairs]), ("parameter", [id(p) for _, p in pairs])):
        times = Counter(keys)
        twice = sorted({pair[0] for pair, key in zip(pairs, keys, strict=True) if times[key] > 1})
        if twice:
            raise InvalidInput(f"named_parameters holds a {what} twice: {', '.join(twice)}; give each once.")
    names = {id(parameter) for _, parameter in pairs}
    unnamed = [place for place, parameter in mine if id(parameter) not in names and parameter.requires_grad]
    if unnamed:
        raise InvalidInput(
            f"named_parameters lacks {len(unnamed)} of the optimizer's parameters (group.number {unnamed[0]} first): "
            "pass the named_parameters() of every module that it trains, or leave the argument out."
        )
    held = {id(parameter) for _, parameter in mine}
    return [(name, parameter) for name, parameter in pairs if id(parameter) in held]
