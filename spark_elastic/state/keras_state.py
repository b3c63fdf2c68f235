"""The state of a Keras model and its optimizer, of whatever backend. Training thread only; imports no framework."""

from __future__ import annotations

from typing import Any

from spark_elastic.errors import InvalidInput
from spark_elastic.state.handlers import REGISTRY, Registry
from spark_elastic.state.object_state import ObjectState
from spark_elastic.state.variables import (
    KerasModelHandler,
    KerasOptimizerHandler,
    LikeKerasModel,
    LikeKerasOptimizer,
)


class KerasState(ObjectState):
    """A Keras model, its optimizer and plain values by name, all parts of one snapshot.

    model: built. optimizer: None takes the one that the model was compiled with. Further models and built optimizers
    may be among the values.

    Raises:
        InvalidInput: there is no optimizer, or the model is not built.
    """

    registry: Registry = (
        (LikeKerasModel, KerasModelHandler),
        (LikeKerasOptimizer, KerasOptimizerHandler),
        *REGISTRY,
    )

    def __init__(self, model: Any, optimizer: Any = None, **values: Any) -> None:
        optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
        if optimizer is None:
            raise InvalidInput(f"{type(self).__name__} needs an optimizer: pass one, or compile the model.")
        if not model.built:
            raise InvalidInput(
                "the model is not built: call it on a batch, or model.build(input_shape), before its state is made."
            )
        if not optimizer.built:  # a newcomer must have its slots before it takes those of others
            optimizer.build(model.trainable_variables)
        super().__init__(model=model, optimizer=optimizer, **values)
