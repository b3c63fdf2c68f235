"""Every parameter of Horovod's estimators that has another name here, or no meaning: mapped, or refused in a sentence.

Values only. A refused parameter may be given the value that Horovod takes by itself where that asks for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol, TypeVar

from spark_elastic.errors import InvalidInput


class Refuses(Protocol):
    """refused: Horovod's names that have no meaning for the estimator, each with why."""

    refused: ClassVar[Mapping[str, str]]


T = TypeVar("T", bound=type[Refuses])

# Horovod's name -> ours.
ALIASES = {"num_proc": "num_workers", "random_seed": "seed"}

_PARTITIONS = "row groups are sized for the workers' memory, and rows are shared out one by one"
_READERS = "one thread reads ahead in each worker, bounded in bytes"
_EPOCH = "an epoch takes every row exactly once"
_FRAME = "it belongs to another framework's estimator"
# Horovod's name -> why it has no meaning here, or what to use.
REFUSED = {
    "backend": "num_workers says how many workers there are, and Spark runs them",
    "backend_env": "set spark.executorEnv.NAME in Spark's configuration",
    "categorical_cols": "index them and name them in feature_cols",
    "continuous_cols": "name them in feature_cols",
    "checkpoint_callback": "checkpoints are written by themselves (checkpoint_steps, checkpoint_seconds); the best "
    "epoch's weights are kept by callbacks=[BestWeights()]",
    "compress_sparse_cols": "sparse vectors are written as dense arrays, which compress as well",
    "custom_objects": _FRAME,
    "data_module": "rows are read from Parquet by one reader, through Arrow",
    "debug_data_loader": "the worker's messages name the step and rows of an error by themselves",
    "initial_epoch": "a fit with the same run_id goes on where the run stands",
    "loader_num_epochs": _EPOCH,
    "log_every_n_steps": "callbacks hear of every step; on_progress, on the driver, four times a second",
    "logger": "use callbacks, which hear of every step; on_progress, on the driver, hears four times a second",
    "loss_constructors": "pass the losses themselves as loss",
    "mp_start_method": _READERS,
    "num_gpus": "training runs on the CPU",
    "partitions_per_process": _PARTITIONS,
    "profiler": "use callbacks",
    "reader_pool_type": _READERS,
    "steps_per_execution": "workers exchange gradients in each step",
    "shuffle_buffer_size": "shuffle=True shuffles all rows of the table",
    "tensorflow_dataset_prefetch_buffer_size": _FRAME,
    "train_async_data_loader_queue_size": _READERS,
    "train_reader_num_workers": _READERS,
    "train_steps_per_epoch": f"{_EPOCH}; use df.limit or df.sample for less",
    "trainer_args": "there is no Trainer; the parameters of this estimator say the same",
    "transformation_edit_fields": "transformation_fn returns its columns undeclared",
    "transformation_removed_fields": "transformation_fn returns its columns undeclared",
    "use_gpu": "training runs on the CPU; use_gpu=False is understood",
    "val_async_data_loader_queue_size": _READERS,
    "val_reader_num_workers": _READERS,
    "validation_steps_per_epoch": "validation looks at every row exactly once",
}
# The same to users of the Keras estimator.
KERAS_REFUSED = REFUSED | {
    "checkpoint_callback": "checkpoints are written by themselves (checkpoint_steps, checkpoint_seconds); the best "
    "epoch's weights are kept by callbacks=[keras.callbacks.EarlyStopping(..., restore_best_weights=True)]",
    "tensorflow_dataset_prefetch_buffer_size": _READERS,
}
_NOTHING: tuple[Any, ...] = (None, False, 0)


def translated(
    values: Mapping[str, Any],
    own: Callable[[str], bool] = lambda name: False,
    refused: Mapping[str, str] = REFUSED,
) -> dict[str, Any]:
    """Parameters by our names. own: whether a name is a parameter of the estimator, whatever another thinks of it.
    refused: the estimator's own reasons.

    Raises:
        InvalidInput: one has no meaning here, or is given under both names.
    """
    ours: dict[str, Any] = {}
    for name, value in values.items():
        if name in refused and not own(name):
            if not any(value is nothing for nothing in _NOTHING):
                raise InvalidInput(f"{name} has no meaning here: {refused[name]}.")
            continue
        known = ALIASES.get(name, name)
        if known != name and values.get(known) is not None:
            raise InvalidInput(f"{name} and {known} are the same: give one of them.")
        if known in ours and value is None:
            continue
        ours[known] = value
    return ours


def with_horovod_names(owner: T) -> T:
    """Add the setters and getters of Horovod's names: those that are mapped do so, the others say why not."""
    for name in (*ALIASES, *owner.refused):
        camel = "".join(part.capitalize() for part in name.split("_"))
        setattr(owner, f"set{camel}", _setter(name, owner.refused))
        if name in ALIASES:
            setattr(owner, f"get{camel}", lambda self, ours=ALIASES[name]: self.getOrDefault(ours))
    return owner


def _setter(name: str, refused: Mapping[str, str]) -> Any:
    def set_param(self: Any, value: Any) -> Any:
        return self.setParams(**{name: value})

    set_param.__doc__ = f"Horovod's `{name}`: {ALIASES.get(name) or refused[name]}."
    return set_param
