"""States of hand-written training as a worker has them: a `sync` outside of the run loop finds the process's world."""

from __future__ import annotations

from spark_elastic.state import keras_state, object_state
from spark_elastic.worker.seat import group_of_process


class ObjectState(object_state.ObjectState):
    __doc__ = object_state.ObjectState.__doc__
    group_of_process = staticmethod(group_of_process)


class KerasState(keras_state.KerasState):
    __doc__ = keras_state.KerasState.__doc__
    group_of_process = staticmethod(group_of_process)
