"""Elastic training of hand-written loops under Horovod's names: `hvd.elastic.run` and the states.

```
@hvd.elastic.run
def train(state): ...
train(hvd.elastic.TensorFlowKerasState(model, optimizer, batch=0, epoch=0))
```
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spark_elastic.errors import InvalidInput
from spark_elastic.handwritten.elastic_loop import run
from spark_elastic.handwritten.object_state import KerasState, ObjectState, State
from spark_elastic.protocol.types import HostUpdateResult
from spark_elastic.runs.handlers import REGISTRY, Registry, VariablesHandler
from spark_elastic.worker.session import WorkerNotificationManager, notification_manager

__all__ = [
    "HostUpdateResult",
    "ObjectState",
    "State",
    "TensorFlowKerasState",
    "TensorFlowState",
    "WorkerNotificationManager",
    "notification_manager",
    "run",
]


class _Variables(list[Any]):
    """The type by which a `TensorFlowState` recognises its variables."""


class TensorFlowState(ObjectState):
    """Variables and plain values by name, all in one snapshot. variables: of TensorFlow or Keras, in the same order on
    all workers. session: only None."""

    registry: Registry = ((_Variables, VariablesHandler), *REGISTRY)

    def __init__(self, variables: Sequence[Any] | None = None, session: object = None, **values: Any) -> None:
        if session is not None or not variables:
            raise InvalidInput(
                "TensorFlowState takes a list of variables, and no session: there are neither sessions nor global "
                "variables in TensorFlow 2."
            )
        super().__init__(variables=_Variables(variables), **values)


class TensorFlowKerasState(KerasState):
    """As `spark_elastic.keras.elastic.KerasState`. backend: not used."""

    def __init__(self, model: Any, optimizer: Any = None, backend: object = None, **values: Any) -> None:
        super().__init__(model, optimizer, **values)
