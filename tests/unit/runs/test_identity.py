"""What tells two things of a user's apart, in whatever process, and what a run is bound to by it."""

from __future__ import annotations

import copy
import functools
import subprocess
import sys
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, SequentialLR, StepLR

from spark_elastic.runs.identity import WEIGHTS, digest
from spark_elastic.training.torch.callbacks import BestWeights, EarlyStopping, LearningRateSchedule
from spark_elastic.training.torch.spec import TorchUserObjects


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
        (NamedValue(torch.nn.ReLU, "a"), NamedValue(torch.nn.GELU, "a")),
        (NamedValue(1.0, "a").__call__, NamedValue(2.0, "a").__call__),
        (functools.cache(compute_power), functools.cache(make_scaled_loss)),
        (make_class(), make_class("* self", "+ self")),
        (make_class()(), make_class("* self", "+ self")()),
        (make_class(base=object), make_class("2.0", "3.0", base=object)),
        (make_class(), make_class("return 1.0", "return 2.0")),
        (make_scaled_loss(1.0), make_scaled_loss(2.0)),
        (lambda x: x.sin(), lambda x: x.cos()),
        (sum, max),
        (compose(make_scaled_loss(1.0)), compose(make_scaled_loss(2.0))),
        (None, compute_power),
    ],
)
def test_functions_that_do_something_else_have_different_digests(one: Any, other: Any) -> None:
    assert digest(one) != digest(other)


def test_numbers_of_the_module_are_part_of_a_function_and_its_texts_are_not() -> None:
    values = [1.0, {"a": (2.0,)}]
    module: dict[str, Any] = {"VALUE": values, "FOLDER": ["of today"]}
    exec("f = lambda x: VALUE[0] * x if FOLDER else 0", module)
    before = digest(module["f"])
    module["FOLDER"] = ["of tomorrow"]
    assert digest(module["f"]) == before
    module["VALUE"] = [1.0, {"a": (3.0,)}]
    assert digest(module["f"]) != before


def make_values() -> list[Any]:
    return [
        make_recursive(),
        make_class(),
        make_scaled_loss(1.0),
        make_weighted_loss(torch.ones(2)),
        make_weighted_loss({3, 1, 2}),
        NamedValue(1.0, "of today"),
        {"a": 1, "b": (2,)},
    ]


def test_another_process_computes_the_same_digests() -> None:
    program = (
        "from spark_elastic.runs.identity import digest\n"
        "from tests.unit.runs.test_identity import make_values\n"
        "print(*map(digest, make_values()))"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert said.stdout.split() == [digest(value) for value in make_values()]
    assert digest(NamedValue(1.0, "of today")) == digest(NamedValue(1.0, "of tomorrow"))
    assert digest({"a": 1, "b": (2,)}) == digest({"b": [2], "a": 1})


@pytest.mark.parametrize("old", ["a comment", "What it says", 'return "a"', "return 1\n"])
def test_what_is_not_trained_is_no_part_of_a_class(old: str) -> None:
    assert digest(make_class()) == digest(make_class(old, old.replace("a", "b").replace("1", "2")))


class UserNet(nn.Module):
    def __init__(self, slope: Any = 0.1) -> None:
        super().__init__()
        self.slope, self.folder, self.layer = slope, str(id(self)), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.leaky_relu(self.layer(x), self.slope)


def make_objects(seed: int = 1, **changes: Any) -> TorchUserObjects:
    torch.manual_seed(seed)
    plain = TorchUserObjects(UserNet(), lambda params: torch.optim.SGD(params, lr=0.1), (nn.MSELoss(),))
    return replace(plain, **changes)


def find_differences(one: TorchUserObjects, other: TorchUserObjects) -> list[str]:
    before = one.identity()
    return [name for name, value in other.identity().items() if before[name] != value]


def test_other_initial_weights_differ_in_the_weights_only() -> None:
    assert find_differences(make_objects(1), make_objects(2)) == [WEIGHTS]


def make_step(scale: float) -> Any:
    return lambda optimizer, closure=None: scale


ENDING = "EarlyStopping or BestWeights"


def derive_twice(base: type, method: str, one: Any, other: Any) -> list[Any]:
    """Objects of two classes of the same name, which differ in a method."""
    return [type("Own", (base,), {method: function}) for function in (one, other)]


@pytest.mark.parametrize(
    ("name", "field", "base", "method", "functions"),
    [
        ("model", "model", UserNet, "forward", (lambda s, x: s.layer(x), lambda s, x: -s.layer(x))),
        ("loss", "losses", nn.MSELoss, "forward", (lambda s, x, y: x - y, lambda s, x, y: (x - y) ** 2)),
        ("optimizer", "optimizer", torch.optim.SGD, "step", (make_step(1.0), make_step(2.0))),
        ("transformation_fn", "transformation", object, "__call__", (lambda s, c: c, lambda s, c: {**c})),
        (ENDING, "callbacks", EarlyStopping, "on_epoch_end", (lambda s, t: None, lambda s, t: 1)),
    ],
)
def test_code_of_a_class_counts(name: str, field: str, base: type, method: str, functions: Any) -> None:
    kinds = derive_twice(base, method, *functions)
    made = [kind if field == "optimizer" else kind() for kind in kinds]
    one, other = ({field: (each,) if field in ("losses", "callbacks") else each} for each in made)
    assert find_differences(make_objects(**one), make_objects(**other))[0] == name
    assert find_differences(make_objects(**one), make_objects(**copy.deepcopy(one))) == []


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("model", {"model": UserNet(slope=0.2)}),
        ("model", {"model": nn.Sequential(nn.Linear(3, 1))}),
        ("optimizer", {"optimizer": lambda params: torch.optim.SGD(params, lr=0.2)}),
        ("optimizer", {"optimizer": lambda params: torch.optim.Adam(params, lr=0.1)}),
        ("loss", {"losses": (nn.L1Loss(),)}),
        ("loss", {"losses": (nn.MSELoss(reduction="sum"),)}),
        ("loss", {"losses": (nn.MSELoss(), nn.MSELoss()), "loss_weights": (0.2, 0.8)}),
        ("train_minibatch_fn", {"train_minibatch_fn": lambda model, features, labels: model(*features)}),
        ("transformation_fn", {"transformation": lambda columns: columns}),
        (ENDING, {"callbacks": (EarlyStopping(patience=3),)}),
        (ENDING, {"callbacks": (BestWeights("loss"),)}),
        ("learning rate schedule", {"callbacks": (LearningRateSchedule(lambda o: StepLR(o, 1, 0.1)),)}),
    ],
)
def test_a_different_object_is_named(name: str, changes: dict[str, Any]) -> None:
    assert find_differences(make_objects(), make_objects(**changes))[0] == name


def test_the_digest_of_an_optimizer_does_not_copy_it() -> None:
    objects = make_objects()
    rates = [torch.optim.SGD(objects.model.parameters(), lr=rate) for rate in (0.1, 0.1, 0.3)]
    first, same, other = (replace(objects, optimizer=optimizer) for optimizer in rates)
    assert find_differences(first, same) == []
    assert find_differences(first, other) == ["optimizer"]


class Scheduled(UserNet):
    """As a LightningModule has it."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self._factor = factor

    def configure_optimizers(self) -> Any:
        optimizer, factor = torch.optim.SGD(self.parameters(), lr=0.1), self._factor
        parts: list[LRScheduler] = [LambdaLR(optimizer, lambda e: factor**e), StepLR(optimizer, 2)]
        return [optimizer], [SequentialLR(optimizer, parts, [2])]


def test_the_digest_covers_schedules_that_a_module_makes() -> None:
    first, same, other = (
        make_objects(model=model, optimizer=None, losses=())
        for model in (Scheduled(0.5), Scheduled(0.5), Scheduled(0.9))
    )
    assert find_differences(first, same) == [WEIGHTS]
    assert find_differences(first, other) == ["learning rate schedule", WEIGHTS]


class Reduction(Enum):
    SUM, MEAN = 1, 2


@dataclass
class Margin:
    width: float
    folder: str = ""


class Scale:
    """A user's callable object, without a dictionary."""

    __slots__ = ("factor",)

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, x: Any) -> Any:
        return x * self.factor


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Reduction.SUM, Reduction.MEAN),
        (Margin(1.0), Margin(2.0)),
        (Scale(1.0), Scale(2.0)),
        (SimpleNamespace(a=1), SimpleNamespace(a=2)),
        (range(3), range(4)),
        (torch.tensor([1.0, 1.0]), torch.tensor([1.0, 2.0])),  # as weights of classes
        (torch.float32, torch.float64),
        (np.float32(1.0), np.float32(2.0)),
        ({"file": "x", "slope": 1}, {"file": "x", "slope": 2}),
        ([Margin(1.0)], [Margin(2.0)]),
        ([1.0, 2.0], [1.0, 3.0]),
        ({"a": {1}}, {"a": {2}}),
        (np.array([1.0, 2.0]), np.array([1.0, 3.0])),
        (torch.ones(2).bfloat16(), torch.zeros(2).bfloat16()),
        (torch.tanh, torch.relu),
        (np.tanh, np.exp),
    ],
)
def test_settings_of_any_kind_are_compared_wherever_they_are(one: Any, other: Any) -> None:
    def close_over(value: Any) -> Any:
        return lambda output, label: (output - label) * value

    def use_global(value: Any) -> Any:
        module: dict[str, Any] = {"value": value, "__name__": "user"}
        code = "def helper(x): return x * value\ndef loss(output, label): return helper(output - label)"
        exec(code, module)
        return module["loss"]

    for put in (UserNet, close_over, use_global, partial(partial, torch.add)):
        name = "model" if put is UserNet else "loss"
        objects = [
            make_objects(**({"model": put(value)} if put is UserNet else {"losses": (put(value),)}))
            for value in (one, copy.deepcopy(one), other)
        ]
        assert set(find_differences(objects[0], objects[1])) <= {WEIGHTS}
        assert find_differences(objects[0], objects[2])[0] == name


def test_a_helper_with_other_code_is_another_loss_and_a_folder_is_not() -> None:
    def make(power: int) -> Any:
        module: dict[str, Any] = {"__name__": "user"}
        code = f"def helper(x): return x ** {power}\ndef loss(output, label): return helper(output - label)"
        exec(code, module)
        return make_objects(losses=(module["loss"],))

    assert find_differences(make(2), make(2)) == []
    assert find_differences(make(2), make(4)) == ["loss"]
    one, other = (make_objects(model=UserNet(Margin(1.0, folder))) for folder in ("a", "b"))
    assert find_differences(one, other) == []
