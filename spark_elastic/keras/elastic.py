"""States and callbacks of an elastic `model.fit`: the public name of `horovod.keras.elastic`."""

from spark_elastic.horovod.keras.elastic import (
    CommitStateCallback,
    HostUpdateResult,
    KerasState,
    ObjectState,
    State,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
    WorkerNotificationManager,
    notification_manager,
    run,
)

__all__ = [
    "CommitStateCallback",
    "HostUpdateResult",
    "KerasState",
    "ObjectState",
    "State",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "WorkerNotificationManager",
    "notification_manager",
    "run",
]
