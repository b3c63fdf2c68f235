"""What goes into a model and comes out of it: the inputs' dtype, the outputs.

Training and predictions share these rules. Knows no framework and no engine: a process that only predicts needs
neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from spark_elastic.errors import InvalidInput


def refuse_large_numbers(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array, whose whole numbers become int64. Raises InvalidInput for those that would become others."""
    if array.dtype == np.uint64 and array.size and array.max() > np.iinfo(np.int64).max:
        raise InvalidInput(
            f"a column of uint64 has {array.max()}, and the model's whole numbers are int64: give numbers below 2**63, "
            "or cast the column to double."
        )
    return array


def check_numbers(name: str, array: npt.NDArray[Any]) -> None:
    """Raise InvalidInput for a column of which a transformation has not made numbers.

    name: of the column.
    """
    if array.dtype.kind in "OSUMm":
        first = type(array.flat[0]).__name__ if array.dtype == object and array.size else str(array.dtype)
        raise InvalidInput(
            f"transformation_fn returned column {name!r} as {first}, of which no tensor can be made: return numbers "
            "for it, as many in each row (StringIndexer numbers the classes of a label)."
        )


def find_input_dtype(parameters: Iterable[Any], default: Any) -> Any:
    """The dtype in which a model is given its columns: that of the first parameter that is trained, since a frozen one
    may have fewer bits.

    Args:
        default: for models without floating point parameters.
    """
    floats = [parameter for parameter in parameters if parameter.is_floating_point()]
    trained = [parameter for parameter in floats if parameter.requires_grad]
    return next((parameter.dtype for parameter in trained or floats), default)


def list_output_parts(output: Any) -> tuple[Any, ...]:
    """A model's outputs in order: each member of a tuple, list or dict (as transformers' models return)."""
    if isinstance(output, Mapping):
        return tuple(output.values())
    return tuple(output) if isinstance(output, tuple | list) else (output,)
