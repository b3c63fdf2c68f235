"""A model or loss that cannot work is refused by the driver, which runs copies of them on two rows of the data."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from spark_elastic.data.manifest import Column, Manifest
from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.torch_objects import check_on_two_rows
from spark_elastic.torch.train.spec import TorchUserObjects
from tests.component.torch.job import CLASSES, WIDTH, Job, make_data

Data = tuple[Store, Manifest]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return make_data(tmp_path_factory.mktemp("data"))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def check(
    data: Data, model: torch.nn.Module, loss: Any, features: tuple[Column, ...] = (), **changes: Any
) -> None:
    job = Job(model.double(), sgd, loss)
    spec = job.task(*data)._spec
    objects = TorchUserObjects(model, sgd, (loss,))
    check_on_two_rows(replace(objects, **changes), replace(spec, features=features or spec.features))


class Fails(torch.nn.Module):
    """Raises in its forward pass."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise self.error


CROSS_ENTROPY = torch.nn.CrossEntropyLoss()
WRONG: list[tuple[Callable[[], torch.nn.Module], Any, str]] = [
    (
        lambda: torch.nn.Linear(WIDTH + 1, CLASSES),
        CROSS_ENTROPY,
        rf"'x' of float64 \(2, {WIDTH}\), 'y' of int64 \(2,\), with RuntimeError: mat1 and mat2 shapes cannot be",
    ),
    (
        lambda: torch.nn.Linear(WIDTH, 1),
        torch.nn.BCELoss(),
        "with RuntimeError: all elements of input should be between 0 and 1",
    ),
    (
        lambda: Fails(AttributeError("no attribute 'fc'")),
        CROSS_ENTROPY,
        "AttributeError: no attribute 'fc'",
    ),
    (lambda: torch.nn.Embedding(3, 2), CROSS_ENTROPY, "takes numbers of another type than it was given 'x'"),
]


@pytest.mark.parametrize(("make", "loss", "sentence"), WRONG)
def test_a_model_or_loss_that_fails_is_refused_in_one_sentence(
    data: Data, make: Callable[[], torch.nn.Module], loss: Any, sentence: str
) -> None:
    with pytest.raises(InvalidInput, match=sentence) as caught:
        check(data, make(), loss)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")


def test_a_model_that_takes_single_numbers_as_a_matrix_is_refused_with_the_shapes_to_set(data: Data) -> None:
    number = Column("w", "float64")
    with pytest.raises(InvalidInput, match=r"columns of single numbers \(w\).*set input_shapes=\[\[1\]\]"):
        check_number(data, number)
    check_number(data, replace(number, shape=(1,)))


def check_number(data: Data, number: Column) -> None:
    model, job = torch.nn.Linear(1, CLASSES).double(), Job(torch.nn.Linear(1, 1), sgd, CROSS_ENTROPY)
    spec = job.task(*data)._spec
    spec = replace(spec, config=replace(spec.config, feature_cols=("w",)), features=(number,))
    check_on_two_rows(TorchUserObjects(model, sgd, (CROSS_ENTROPY,)), spec)


def test_a_transformation_that_fails_is_refused(data: Data) -> None:
    with pytest.raises(InvalidInput, match="with KeyError: 'z'"):
        check(
            data,
            torch.nn.Linear(WIDTH, CLASSES),
            CROSS_ENTROPY,
            transformation=lambda columns: {"x": columns["z"]},
        )


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Found no NVIDIA driver on your system"),
        ValueError("Default process group has not been initialized"),
        FileNotFoundError("vocabulary.txt"),
        ImportError("no module of workers"),
    ],
)
def test_a_failure_that_may_come_from_what_only_workers_have_says_nothing(
    data: Data, error: Exception
) -> None:
    check(data, Fails(error), CROSS_ENTROPY)


def test_neither_the_model_nor_the_random_numbers_of_the_driver_change(data: Data) -> None:
    model = (
        torch.nn.Sequential(torch.nn.BatchNorm1d(WIDTH), torch.nn.Dropout(), torch.nn.Linear(WIDTH, CLASSES))
        .double()
        .eval()
    )
    before, drawn = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    check(data, model, CROSS_ENTROPY)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert not model.training
    assert all(each.grad is None for each in model.parameters())
