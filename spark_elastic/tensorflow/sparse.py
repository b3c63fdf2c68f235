"""IndexedSlices of all ranks, concatenated: their sum or average, without the rows that nobody has."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from elastic_collectives.group import Array
from spark_elastic.errors import InvalidInput
from spark_elastic.ops.arrays import as_engine_array
from spark_elastic.ops.channels import get_queue
from spark_elastic.ops.process_sets import is_single_process
from spark_elastic.ops.reduction import Average, ReduceOptions, Sum
from spark_elastic.ops.rounds import negotiation as kinds
from spark_elastic.ops.rounds.negotiation import Request
from spark_elastic.tensorflow.arrays import call, name_of


def allreduce_slices(slices: Any, name: str | None, how: ReduceOptions, alone: bool = False) -> Any:
    """IndexedSlices with the rows of all ranks, each listed once; they travel as they are, whatever the compression.

    alone: ranks that are not in the set keep their own.

    Raises:
        InvalidInput: the reduction is neither Average nor Sum.
    """
    if how.op not in (Average, Sum):
        raise InvalidInput(
            f"IndexedSlices take Average and Sum, not {how.op.name}: use tf.convert_to_tensor first."
        )
    given = [slices.values, slices.indices]
    names = tuple(name_of(tensor.dtype) for tensor in given)

    def body(arrays: list[Array]) -> list[Array]:
        if alone and is_single_process(how.process_set):
            return _each_once(arrays[0], arrays[1])
        request = Request(
            kinds.ALLGATHER,
            kinds.qualify_name("slices", name),
            names,
            tuple((-1, *array.shape[1:]) for array in arrays),
        )
        rows = [as_engine_array(array) for array in arrays]
        channel = get_queue(how.process_set)
        values, indices = channel.submit(request, rows, awaited=True).wait()
        factor = how.scale[0] * how.scale[1] / (how.process_set.size() if how.op is Average else 1)
        return _each_once(values.view(arrays[0].dtype), indices, factor)

    shapes = [[None, *tensor.shape[1:]] for tensor in given]
    values, indices = call(body, given, [tensor.dtype for tensor in given], shapes)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def _each_once(values: Array, indices: Array, factor: float = 1.0) -> list[Array]:
    """(values times `factor`, indices), the values of an index summed.

    Keras squares what is listed: with an index listed twice, Adam would depend on how rows are spread over ranks.
    """
    rows, places = np.unique(indices, return_inverse=True)
    wide = np.float32 if values.dtype.itemsize < 4 else values.dtype
    summed = np.zeros((len(rows), *values.shape[1:]), wide)
    np.add.at(summed, places.reshape(-1), values.astype(wide, copy=False))
    return [(summed * summed.dtype.type(factor)).astype(values.dtype, copy=False), rows]
