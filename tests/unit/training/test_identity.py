"""What tells two things of a user's apart, in whatever process."""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from spark_elastic.training.identity import digest


def scaled(factor: float) -> Any:
    return lambda output, label: ((output - label) ** 2 * factor).mean()


def fallen(output: Any, label: Any, power: int = 2) -> Any:
    return abs(output - label) ** power


def weighted(factors: Any) -> Any:
    return lambda output, label: (output * factors).sum()


def composed(function: Any) -> Any:
    return lambda output, label: function(output)


def repeated() -> Any:
    """A function that is in its own closure."""

    def call(depth: int) -> int:
        return depth and call(depth - 1)

    return call


class Held:
    def __init__(self, alpha: Any, name: str) -> None:
        self.alpha, self.name = alpha, name

    def __call__(self, output: Any, label: Any) -> Any:
        return self.alpha * output


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (scaled(1.0), scaled(2.0)),
        (lambda x: x + 1, lambda x: x + 2),
        (lambda x: x.sin(), lambda x: x.cos()),
        (functools.partial(fallen, power=1), functools.partial(fallen, power=3)),
        (Held(1.0, "a"), Held(2.0, "a")),
        ({"a": 1}, {"a": 2}),
        (sum, max),
        (weighted([1.0, 2.0]), weighted([1.0, 3.0])),
        (weighted(("a", 2.0)), weighted(("b", 2.0))),
        (weighted(np.array([1.0, 2.0])), weighted(np.array([1.0, 3.0]))),
        (weighted(torch.ones(2)), weighted(torch.zeros(2))),
        (weighted(torch.ones(2)), weighted(torch.ones(2, dtype=torch.bfloat16))),
        (weighted(torch.ones(2).bfloat16()), weighted(torch.zeros(2).bfloat16())),
        (weighted({"a": {1}}), weighted({"a": {2}})),
        (composed(scaled(1.0)), composed(scaled(2.0))),
        (Held([1.0], "a"), Held([2.0], "a")),
        (Held(torch.ones(1), "a"), Held(torch.zeros(1), "a")),
        (Held(scaled(1.0), "a"), Held(scaled(2.0), "a")),
        (None, fallen),
    ],
)
def test_what_does_something_else_differs(one: Any, other: Any) -> None:
    assert digest(one) != digest(other)


def test_a_number_of_the_module_is_part_of_a_function() -> None:
    module: dict[str, Any] = {"ALPHA": 1.0, "FOLDER": "of today"}
    exec("f = lambda x: [ALPHA * y for y in x] + [FOLDER]", module)
    before = digest(module["f"])
    module["FOLDER"] = "of tomorrow"
    assert digest(module["f"]) == before
    module["ALPHA"] = 2.0
    assert digest(module["f"]) != before


def test_a_list_of_the_module_is_part_of_a_function() -> None:
    module: dict[str, Any] = {"WEIGHTS": [1.0, {"deep": (2.0,)}], "FOLDERS": ["of today"]}
    exec("f = lambda x: WEIGHTS[0] * x if FOLDERS else 0", module)
    before = digest(module["f"])
    module["FOLDERS"] = ["of tomorrow"]
    assert digest(module["f"]) == before
    module["WEIGHTS"] = [1.0, {"deep": (3.0,)}]
    assert digest(module["f"]) != before


def test_a_function_in_its_own_closure_has_a_digest() -> None:
    assert digest(repeated()) == digest(repeated())


def test_what_does_the_same_does_not() -> None:
    assert digest(scaled(1.0)) == digest(scaled(1.0))
    assert digest(weighted(torch.ones(2))) == digest(weighted(torch.ones(2)))
    assert digest(weighted({3, 1, 2})) == digest(weighted({2, 3, 1}))
    assert digest(Held(1.0, "of today")) == digest(Held(1.0, "of tomorrow"))
    assert digest({"a": 1, "b": (2,)}) == digest({"b": [2], "a": 1})


def test_another_process_finds_the_same() -> None:
    program = (
        "from spark_elastic.training.identity import digest\n"
        "from tests.unit.training.test_identity import Held, repeated, scaled, weighted\n"
        "import torch\n"
        "print(digest([scaled(1.0), Held(1.0, 'a'), weighted(torch.ones(2)), repeated()]))"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == digest([scaled(1.0), Held(1.0, "a"), weighted(torch.ones(2)), repeated()])
