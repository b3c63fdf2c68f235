"""What the torch backend's optimizer sums and leaves alone, without Keras, which runs on TensorFlow in this process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import pytest
import torch

from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.process_sets import ProcessSet, global_process_set
from spark_elastic.gradients.reduction import Adasum, Average, ReduceOp, ReduceOptions
from spark_elastic.horovod.keras.optimizer import TorchExchange
from spark_elastic.horovod.ops.distributed_optimizer import GradientOptions, wrap_optimizer
from spark_elastic.horovod.torch import allreduce
from spark_elastic.runs.handlers import to_array


class RecordingOptimizer:
    """Keeps what it is told to apply."""

    def __init__(self) -> None:
        self.applied: list[list[Any]] = []

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        self.applied.append([gradient.tolist() for gradient in grads])

    apply_gradients = build = apply
    built = True


def distribute(
    optimizer: Any,
    passes: int = 1,
    process_set: ProcessSet = global_process_set,
    scale_local: bool = True,
    op: ReduceOp = Average,
) -> Any:
    options = GradientOptions(ReduceOptions(op, process_set=process_set), False, 0, scale_local)
    return wrap_optimizer(optimizer, lambda: TorchExchange(options, passes, False), keras.utils)


def test_passes_are_summed_before_they_are_applied() -> None:
    optimizer = distribute(RecordingOptimizer(), passes=2)
    for value in (1.0, 10.0, 20.0):
        optimizer.apply([torch.tensor(value)], [object()])
    assert optimizer.applied == [[11.0]]


@pytest.mark.parametrize(("scaled", "expected"), [(True, [2.0, 8.0]), (False, [8.0, 8.0])])
def test_a_local_gradient_is_divided_as_an_average(
    monkeypatch: pytest.MonkeyPatch, scaled: bool, expected: list[float]
) -> None:
    monkeypatch.setattr(allreduce, "start", lambda tensors, *how, **when: lambda: tensors)
    four: Any = SimpleNamespace(size=lambda: 4, included=lambda: True)
    optimizer: Any = distribute(RecordingOptimizer(), process_set=four, scale_local=scaled)
    mine, shared = object(), object()
    optimizer.register_local_var(mine)
    optimizer.apply([torch.tensor(8.0), torch.tensor(8.0)], [mine, shared])
    assert optimizer.applied == [expected]


def test_a_rank_outside_of_the_process_set_trains_alone() -> None:
    others: Any = SimpleNamespace(size=lambda: 4, included=lambda: False)
    optimizer: Any = distribute(RecordingOptimizer(), process_set=others)
    optimizer.apply([torch.tensor(8.0)], [object()])
    assert optimizer.applied == [[8.0]]


@pytest.mark.parametrize(
    ("optimizer", "arguments", "says"),
    [
        (RecordingOptimizer(), {"op": Adasum}, "must be Average or Sum; got"),
        (RecordingOptimizer(), {"passes": 0}, "must be at least 1; got 0"),
        (distribute(RecordingOptimizer()), {}, "of Keras 3 once; got a RecordingOptimizer"),
        (torch.nn.Linear(1, 1), {}, "wraps an optimizer of Keras 3 once; got a Linear"),
    ],
)
def test_wrong_arguments_are_refused(optimizer: Any, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        distribute(optimizer, **arguments)


def test_a_variable_of_bfloat16_has_an_array() -> None:
    assert to_array(torch.tensor([1.5, -2.0], dtype=torch.bfloat16)).tolist() == [1.5, -2.0]
