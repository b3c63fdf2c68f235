"""Which column belongs to which input or output of a Keras model: by keys, by names, or by place. Pure; any thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from spark_elastic.errors import InvalidInput


def ordered_features(model: Any, columns: Sequence[str]) -> list[str]:
    """In the order of the model's inputs; as they are given for a class of the user's, which takes what comes.

    Raises:
        InvalidInput: the inputs are a dict of other keys.
    """
    tensors = list(getattr(model, "inputs", None) or ())
    names = [tensor.name for tensor in tensors]
    return _ordered(
        columns, getattr(model, "input", None) if tensors else None, names, "feature_cols", "inputs"
    )


def ordered_labels(model: Any, outputs: Any, columns: Sequence[str]) -> list[str]:
    """In the order of the model's outputs. outputs: what a call of it returned, or its symbolic `output`.

    Raises:
        InvalidInput: the outputs are a dict of other keys.
    """
    names = list(getattr(model, "output_names", None) or ())
    return _ordered(columns, outputs, names, "label_cols", "outputs")


def _ordered(
    columns: Sequence[str], structure: Any, names: Sequence[str], parameter: str, what: str
) -> list[str]:
    if isinstance(structure, Mapping) and len(structure) > 1:
        places = keras.tree.pack_sequence_as(structure, list(range(len(keras.tree.flatten(structure)))))
        if set(places) != set(columns) or not all(isinstance(place, int) for place in places.values()):
            raise InvalidInput(
                f"the model's {what} are a dict of {', '.join(map(str, structure))} and {parameter} names "
                f"{', '.join(columns)}: give the columns the names of the keys, one each."
            )
        return sorted(places, key=places.__getitem__)
    named = len(names) > 1 and len(names) == len(columns) and set(names) == set(columns)
    return list(names) if named else list(columns)
