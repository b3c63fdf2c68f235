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


def make_scaled_loss(factor: float) -> Any:
    return lambda output, label: ((output - label) ** 2 * factor).mean()


def compute_power(output: Any, label: Any, power: int = 2) -> Any:
    return abs(output - label) ** power


def make_weighted_loss(factors: Any) -> Any:
    return lambda output, label: (output * factors).sum()


def compose(function: Any) -> Any:
    return lambda output, label: function(output)


def make_recursive() -> Any:
    """A function that is in its own closure."""

    def call(depth: int) -> int:
        return depth and call(depth - 1)

    return call


class NamedValue:
    def __init__(self, alpha: Any, name: str) -> None:
        self.alpha, self.name = alpha, name

    def __call__(self, output: Any, label: Any) -> Any:
        return self.alpha * output


CLASS = """
class Loss(Base):
    factor = 2.0  # a comment

    def forward(self, output):
        \"\"\"What it says.\"\"\"
        return self.scale(output) + self.shift

    __call__ = forward

    def scale(self, output):
        return super().__hash__() and output * self.factor

    @property
    def shift(self):
        return 1.0

    def unused(self):
        return 1

    def extra_repr(self):
        return "a"
"""


def make_class(old: str = "", new: str = "", base: type = torch.nn.Module) -> Any:
    """CLASS in a script, with a part of its text replaced."""
    assert old in CLASS
    script: dict[str, Any] = {"__name__": "__main__", "Base": base}
    exec(CLASS.replace(old, new) if old else CLASS, script)
    return script["Loss"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (NamedValue(torch.tanh, "a"), NamedValue(torch.relu, "a")),
        (NamedValue(np.tanh, "a"), NamedValue(np.exp, "a")),
        (NamedValue({"f": torch.tanh}, "a"), NamedValue({"f": torch.relu}, "a")),
        (NamedValue(torch.nn.functional.relu, "a"), NamedValue(torch.nn.functional.gelu, "a")),
        (NamedValue(torch.nn.ReLU, "a"), NamedValue(torch.nn.GELU, "a")),
        (
            NamedValue(functools.partial(compute_power, power=1), "a"),
            NamedValue(functools.partial(compute_power, power=3), "a"),
        ),
        (NamedValue(1.0, "a").__call__, NamedValue(2.0, "a").__call__),
        (compose(torch.tanh), compose(torch.relu)),
        (functools.cache(compute_power), functools.cache(make_scaled_loss)),
        (make_class(), make_class("* self", "+ self")),
        (make_class()(), make_class("* self", "+ self")()),
        (make_class()().forward, make_class("+ self.shift", "- self.shift")().forward),
        (make_class(base=object), make_class("2.0", "3.0", base=object)),
        (make_class(), make_class("return 1.0", "return 2.0")),
        (make_scaled_loss(1.0), make_scaled_loss(2.0)),
        (lambda x: x + 1, lambda x: x + 2),
        (lambda x: x.sin(), lambda x: x.cos()),
        (functools.partial(compute_power, power=1), functools.partial(compute_power, power=3)),
        (NamedValue(1.0, "a"), NamedValue(2.0, "a")),
        ({"a": 1}, {"a": 2}),
        (sum, max),
        (make_weighted_loss([1.0, 2.0]), make_weighted_loss([1.0, 3.0])),
        (make_weighted_loss(("a", 2.0)), make_weighted_loss(("b", 2.0))),
        (make_weighted_loss(np.array([1.0, 2.0])), make_weighted_loss(np.array([1.0, 3.0]))),
        (make_weighted_loss(torch.ones(2)), make_weighted_loss(torch.zeros(2))),
        (make_weighted_loss(torch.ones(2)), make_weighted_loss(torch.ones(2, dtype=torch.bfloat16))),
        (make_weighted_loss(torch.ones(2).bfloat16()), make_weighted_loss(torch.zeros(2).bfloat16())),
        (make_weighted_loss({"a": {1}}), make_weighted_loss({"a": {2}})),
        (compose(make_scaled_loss(1.0)), compose(make_scaled_loss(2.0))),
        (NamedValue([1.0], "a"), NamedValue([2.0], "a")),
        (NamedValue(torch.ones(1), "a"), NamedValue(torch.zeros(1), "a")),
        (NamedValue(make_scaled_loss(1.0), "a"), NamedValue(make_scaled_loss(2.0), "a")),
        (None, compute_power),
    ],
)
def test_functions_that_do_something_else_have_different_digests(one: Any, other: Any) -> None:
    assert digest(one) != digest(other)


@pytest.mark.parametrize(
    ("code", "values", "text", "other"),
    [
        ("lambda x: [VALUE * y for y in x] + [FOLDER]", 1.0, "of today", 2.0),
        (
            "lambda x: VALUE[0] * x if FOLDER else 0",
            [1.0, {"deep": (2.0,)}],
            ["of today"],
            [1.0, {"deep": (3.0,)}],
        ),
    ],
)
def test_numbers_of_the_module_are_part_of_a_function(code: str, values: Any, text: Any, other: Any) -> None:
    module: dict[str, Any] = {"VALUE": values, "FOLDER": text}
    exec(f"f = {code}", module)
    before = digest(module["f"])
    module["FOLDER"] = type(text)(["of tomorrow"])
    assert digest(module["f"]) == before
    module["VALUE"] = other
    assert digest(module["f"]) != before


def test_functions_that_do_the_same_have_equal_digests() -> None:
    assert digest(make_recursive()) == digest(make_recursive())
    assert digest(make_scaled_loss(1.0)) == digest(make_scaled_loss(1.0))
    assert digest(make_weighted_loss(torch.ones(2))) == digest(make_weighted_loss(torch.ones(2)))
    assert digest(make_weighted_loss({3, 1, 2})) == digest(make_weighted_loss({2, 3, 1}))
    assert digest(NamedValue(1.0, "of today")) == digest(NamedValue(1.0, "of tomorrow"))
    assert digest({"a": 1, "b": (2,)}) == digest({"b": [2], "a": 1})


@pytest.mark.parametrize("old", ["a comment", "What it says", 'return "a"', "return 1\n"])
def test_what_is_not_trained_is_no_part_of_a_class(old: str) -> None:
    assert digest(make_class()) == digest(make_class(old, old.replace("a", "b").replace("1", "2")))


def test_another_process_computes_the_same_digest() -> None:
    program = (
        "from spark_elastic.training.identity import digest\n"
        "from tests.unit.training import test_identity as here\n"
        "import torch\n"
        "values = [here.make_scaled_loss(1.0), here.NamedValue(1.0, 'a'), here.make_weighted_loss(torch.ones(2))]\n"
        "print(digest([*values, here.make_recursive(), here.make_class()]))"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == digest(
        [
            make_scaled_loss(1.0),
            NamedValue(1.0, "a"),
            make_weighted_loss(torch.ones(2)),
            make_recursive(),
            make_class(),
        ]
    )
