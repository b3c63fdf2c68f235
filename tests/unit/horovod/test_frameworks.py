"""What the operations of torch, TensorFlow and Keras promise alike: values, dtypes, process sets, gradients, errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import torch

import spark_elastic.keras
import spark_elastic.tensorflow
import spark_elastic.torch
from elastic_collectives import Group, MismatchError
from spark_elastic.errors import InvalidInput
from spark_elastic.gradients.reduction import Compressor
from tests.worlds import run_on_engine

pytestmark = pytest.mark.usefixtures("context_per_thread")


@dataclass(frozen=True)
class Framework:
    """An interface of Horovod's, and its tensors."""

    hvd: Any
    make: Callable[[Any, str], Any]  # a tensor of numbers, with the dtype of that name
    gradient: Callable[[Callable[[Any], Any], Any], Any]  # of the sum of a function's result

    def tensor(self, numbers: Any, dtype: str = "float32") -> Any:
        return self.make(numbers, dtype)

    def read(self, tensor: Any) -> list[Any]:
        """Return the numbers of a tensor, or of several ones."""
        if isinstance(tensor, list | tuple):
            return [self.read(each) for each in tensor]
        wide = tensor.double() if isinstance(tensor, torch.Tensor) else np.asarray(tensor).astype(float)
        numbers: list[Any] = wide.tolist()
        return numbers


def differentiate_in_tensorflow(function: Callable[[Any], Any], at: Any) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(at)
        loss = tf.add_n([tf.reduce_sum(each) for each in function(at)])
    return tape.gradient(loss, at)


def differentiate_in_torch(function: Callable[[Any], Any], at: Any) -> Any:
    variable = at.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(sum(each.sum() for each in function(variable)), variable)
    return gradient


TORCH = Framework(
    spark_elastic.torch, lambda n, dtype: torch.tensor(n).to(getattr(torch, dtype)), differentiate_in_torch
)
TENSORFLOW = Framework(
    spark_elastic.tensorflow, lambda n, dtype: tf.cast(tf.constant(n), dtype), differentiate_in_tensorflow
)
KERAS = Framework(
    spark_elastic.keras, lambda n, dtype: np.array(n).astype(dtype), differentiate_in_tensorflow
)
ALL = pytest.mark.parametrize("its", [TORCH, TENSORFLOW, KERAS], ids=["torch", "tensorflow", "keras"])
WITH_TENSORS = pytest.mark.parametrize("its", [TORCH, TENSORFLOW], ids=["torch", "tensorflow"])
DTYPES = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]


@ALL
def test_every_operation_with_every_dtype(its: Framework) -> None:
    def work(group: Group) -> None:
        rank, hvd = group.rank, its.hvd
        for dtype in DTYPES:
            if its is KERAS and dtype == "bfloat16":
                continue
            mine = its.tensor([[rank, 1], [1, 0], [1, 1]], dtype)
            for op in (hvd.Sum, hvd.Max, hvd.Min, hvd.Product):
                reduced = hvd.allreduce(mine, op=op, name=f"{op} {dtype}")
                assert reduced.dtype == mine.dtype
                assert its.read(reduced)[0][0] == (op in (hvd.Sum, hvd.Max)), (dtype, op, reduced)
            gathered = hvd.allgather(mine[: rank + 1])
            assert (gathered.dtype, its.read(gathered)) == (mine.dtype, [[0, 1], [1, 1], [1, 0]])
            assert its.read(hvd.broadcast(mine, 1)) == [[1, 1], [1, 0], [1, 1]]
            part = hvd.reducescatter(mine, op=hvd.Max)
            assert (part.dtype, its.read(part)) == (mine.dtype, [[[1, 1], [1, 0]], [[1, 1]]][rank])
            if its is not KERAS:
                rows, came = hvd.alltoall(mine, splits=[1, 2])
                assert (rows.dtype, its.read(came)) == (mine.dtype, [[1, 1], [2, 2]][rank])
                assert its.read(rows) == ([[1, 0], [1, 1]] * 2 if rank else [[0, 1], [1, 1]])
            assert its.read(mine) == [[rank, 1], [1, 0], [1, 1]], "the operand was changed"

    run_on_engine(2, work)


@ALL
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "int64", "uint8"])
def test_averages_sums_and_factors(its: Framework, dtype: str) -> None:
    def work(group: Group) -> Any:
        mine = its.tensor([[1, 2], [3, 4 * (group.rank + 1)]], dtype)
        how = {"average": False, "prescale_factor": 2.0, "postscale_factor": 0.5}
        halves = its.hvd.allreduce(its.tensor([-3, group.rank], dtype="int32"))
        results = (
            its.hvd.allreduce(mine),
            its.hvd.allreduce(mine, op=its.hvd.Sum),
            its.hvd.allreduce(mine, **how),
        )
        return [its.read(each) for each in (*results, halves)]

    average, total = [[1, 2], [3, 8]], [[3, 6], [9, 24]]
    assert run_on_engine(3, work) == [[average, total, total, [-3, 1]]] * 3


@ALL
def test_numbers_of_any_shape_and_objects(its: Framework) -> None:
    def work(group: Group) -> Any:
        rank, hvd = group.rank, its.hvd
        assert its.read(hvd.allreduce(its.tensor(2.0 * rank))) == 1.0
        assert its.read(hvd.allgather(its.tensor(rank))) == [0, 1]
        for operation in (hvd.allreduce, hvd.allgather):
            assert operation(its.tensor(np.zeros((0, 3)))).shape == (0, 3)
        objects = hvd.allgather_object("x" * rank), hvd.broadcast_object({"of": rank}, 1)
        assert objects == (["", "x"], {"of": 1})
        with pytest.raises(MismatchError, match=r"rank 0 has shapes \(-1, 2\), rank 1 \(-1, 3\)") as error:
            hvd.allgather(its.tensor(np.zeros((2, 2 + rank))))
        assert error.value.ranks == (1,)

    run_on_engine(2, work)


class HalvingCompressor(Compressor):
    """A user's own."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        return (tensor / 2, 2) if "float" in str(tensor.dtype) else (tensor, 1)

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        return tensor * ctx


@WITH_TENSORS
@pytest.mark.parametrize("compression", ["fp16", "bf16", "of the user"])
def test_operations_take_compression(its: Framework, compression: str) -> None:
    def work(group: Group) -> None:
        how = {"compression": getattr(its.hvd.Compression, compression, HalvingCompressor), "op": its.hvd.Sum}
        for dtype in ("float32", "float64", "float16", "int32"):
            mine = its.tensor([3 + group.rank] * 4, dtype)
            total = its.hvd.allreduce(mine, **how)
            assert (total.dtype, its.read(total)) == (mine.dtype, [7] * 4)
            assert its.read(its.hvd.grouped_allreduce([mine, mine], **how)) == [[7] * 4] * 2
            assert its.read(its.hvd.reducescatter(mine, **how)) == [7, 7]

    run_on_engine(2, work)


@WITH_TENSORS
def test_operations_take_groups(its: Framework) -> None:
    def work(group: Group) -> None:
        hvd, rank = its.hvd, group.rank
        pair = [its.tensor([rank + 1.0] * 3, "float32"), its.tensor([rank + 1.0] * 3, "int64")]
        summed = hvd.grouped_allreduce(pair, op=hvd.Sum)
        assert [each.dtype for each in summed] == [each.dtype for each in pair]
        assert its.read(summed) == [[3] * 3] * 2
        assert its.read(hvd.grouped_allgather([each[:1] for each in pair])) == [[1, 2]] * 2
        assert its.read(hvd.grouped_reducescatter(pair, op=hvd.Sum)) == [[3, 3][rank:]] * 2
        assert its.read(hvd.join()) in (0, 1) if its is TENSORFLOW else hvd.join() in (0, 1)

    run_on_engine(2, work)


@WITH_TENSORS
def test_process_sets_and_roots_by_rank_of_the_world(its: Framework) -> None:
    def work(group: Group) -> Any:
        hvd = its.hvd
        hvd.init(process_sets=[[1, 2]])
        late = hvd.add_process_set(hvd.ProcessSet([0, 1, 2]))
        assert hvd.remove_process_set(late)
        pair = hvd.ProcessSet([1, 2])
        pair.process_set_id = 1
        if not pair.included():
            return None
        mine = its.tensor([float(group.rank)])
        with pytest.raises(InvalidInput, match=r"root_rank must be one of \[1, 2\]"):
            hvd.broadcast(mine, 0, process_set=pair)
        average = its.read(hvd.allreduce(mine, process_set=pair))
        sent = its.read(hvd.broadcast(mine, 2, process_set=pair))
        hvd.barrier(process_set=pair)
        return average, sent, hvd.allgather_object(f"of {group.rank}", process_set=pair)

    result = ([1.5], [2.0], ["of 1", "of 2"])
    assert run_on_engine(3, work) == [None, result, result]


@WITH_TENSORS
def test_gradients_have_the_factors_of_horovod(its: Framework) -> None:
    def work(group: Group) -> list[Any]:
        hvd, factor = its.hvd, group.rank + 1.0
        weights, rows = its.tensor([1.0, 10.0], "float64"), its.tensor([0.0, 1.0, 2.0, 3.0], "float64")
        losses = [
            lambda x: [hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0) * factor],
            lambda x: [each * factor for each in hvd.grouped_allreduce([x, x])],
            lambda x: [hvd.allgather(x) * rows],
            lambda x: [each * factor for each in hvd.grouped_allgather([x])],
            lambda x: [hvd.broadcast(x, 1) * factor],
            lambda x: [hvd.alltoall(x) * weights * factor],
            lambda x: [hvd.reducescatter(x, op=hvd.Average) * factor],
            lambda x: [hvd.reducescatter(x, op=hvd.Sum) * factor],
        ]
        return [its.read(its.gradient(loss, its.tensor([1.0, 1.0], "float64"))) for loss in losses]

    first, second = run_on_engine(2, work)
    assert first == [[6, 6], [3, 3], [0, 1], [1.5, 1.5], [0, 0], [1, 2], [1, 2], [2, 4]]
    assert second == [[6, 6], [3, 3], [2, 3], [1.5, 1.5], [1.5, 1.5], [10, 20], [1, 2], [2, 4]]


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("allreduce", {"average": True, "op": spark_elastic.torch.Sum}, "average or op"),
        ("allreduce", {"op": "sum"}, "op must be"),
        ("allreduce", {"compression": 3}, "a Compressor of your own"),
        ("grouped_allreduce", {"tensors": []}, "at least one"),
        ("grouped_allgather", {"tensors": []}, "at least one"),
        ("grouped_reducescatter", {"tensors": []}, "takes tensors, and Average"),
        ("alltoall", {}, "first dimension"),
        ("allgather", {"process_set": object()}, "process_set must be a ProcessSet; got object"),
        ("init", {"comm": object()}, "no communicator"),
    ],
)
@WITH_TENSORS
def test_wrong_arguments_are_refused(its: Framework, name: str, arguments: Any, says: str) -> None:
    tensor = {} if arguments.keys() & {"tensors", "comm"} else {"tensor": its.tensor(1.0)}
    with pytest.raises(InvalidInput, match=says):
        getattr(its.hvd, name)(**tensor, **arguments)
