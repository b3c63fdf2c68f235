"""Every public name of Horovod's TensorFlow and Keras interfaces is here, takes the same arguments in the same order,
and is named by the page for those who move."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest

from tests.sources import ROOT

_DEVICES = "device_dense device_sparse compression"
_FACTORS = "op gradient_predivide_factor"
_GROUPS = "num_groups groups process_set scale_local_gradients"
_SCALE = "prescale_factor postscale_factor"
_REDUCE = f"average {_DEVICES} op {_SCALE}"
OF_TENSORFLOW = {
    "allreduce": f"tensor {_REDUCE} name process_set ignore_name_scope",
    "grouped_allreduce": f"tensors {_REDUCE} process_set ignore_name_scope name",
    "allgather": "tensor name ignore_name_scope process_set",
    "grouped_allgather": "tensors name ignore_name_scope process_set",
    "broadcast": "tensor root_rank name ignore_name_scope process_set",
    "broadcast_": "variables root_rank name process_set",
    "alltoall": "tensor splits name ignore_name_scope process_set",
    "reducescatter": f"tensor device_dense compression op name process_set ignore_name_scope {_SCALE}",
    "grouped_reducescatter": f"tensors device_dense compression op process_set {_SCALE}",
    "join": "",
    "barrier": "process_set",
    "size_op": "process_set_id",
    "rank_op": "",
    "local_size_op": "",
    "local_rank_op": "",
    "process_set_included_op": "process_set_id",
    "broadcast_variables": "variables root_rank process_set inplace",
    "broadcast_global_variables": "root_rank",
    "broadcast_object": "obj root_rank session name process_set",
    "broadcast_object_fn": "root_rank session name process_set",
    "allgather_object": "obj session name process_set",
    "DistributedGradientTape": f"gradtape {_DEVICES} sparse_as_dense {_FACTORS} {_GROUPS}",
    "PartialDistributedGradientTape": "gradtape",
    "DistributedOptimizer": f"optimizer name use_locking {_DEVICES} sparse_as_dense backward_passes_per_step "
    f"{_FACTORS} average_aggregated_gradients {_GROUPS}",
    "PartialDistributedOptimizer": "optimizer",
    "SyncBatchNormalization": "",
    "elastic.run": "func",
    "elastic.TensorFlowState": "variables session",
    "elastic.TensorFlowKerasState": "model optimizer backend",
}
OF_KERAS = {
    "allreduce": f"value name average {_SCALE} op compression",
    "allgather": "value name",
    "broadcast": "value root_rank name",
    "DistributedOptimizer": f"optimizer name {_DEVICES} sparse_as_dense gradient_predivide_factor op "
    f"backward_passes_per_step average_aggregated_gradients {_GROUPS}",
    "PartialDistributedOptimizer": "optimizer",
    "broadcast_global_variables": "root_rank",
    "load_model": "filepath custom_optimizers custom_objects compression legacy_opts",
    "callbacks.BroadcastGlobalVariablesCallback": "root_rank device local_variables",
    "callbacks.MetricAverageCallback": "device",
    "callbacks.LearningRateScheduleCallback": "initial_lr multiplier start_epoch end_epoch staircase "
    "momentum_correction steps_per_epoch",
    "callbacks.LearningRateWarmupCallback": "initial_lr warmup_epochs momentum_correction steps_per_epoch verbose",
    "callbacks.BestModelCheckpoint": "monitor verbose save_weights_only mode save_freq",
    "elastic.run": "func",
    "elastic.KerasState": "model optimizer",
    "elastic.CommitStateCallback": "state batches_per_commit",
    "elastic.UpdateBatchStateCallback": "state",
    "elastic.UpdateEpochStateCallback": "state",
}


@pytest.mark.parametrize(
    ("framework", "name", "arguments"),
    [("tensorflow", *pair) for pair in OF_TENSORFLOW.items()]
    + [("keras", *pair) for pair in OF_KERAS.items()],
)
def test_arguments_are_horovods_and_the_page_has_the_name(framework: str, name: str, arguments: str) -> None:
    found: Any = importlib.import_module(f"spark_elastic.{framework}")
    for part in name.split("."):
        found = getattr(found, part)
    ours, theirs = inspect.signature(found).parameters, arguments.split()
    assert list(ours)[: len(theirs)] == theirs
    for more in list(ours.values())[len(theirs) :]:
        assert more.default is not more.empty or more.kind in (more.VAR_KEYWORD, more.VAR_POSITIONAL)
    assert f"`{name}`" in (ROOT / "docs" / "moving-from-horovod.md").read_text()


@pytest.mark.parametrize("framework", ["tensorflow", "keras"])
def test_exported_names_exist(framework: str) -> None:
    module = importlib.import_module(f"spark_elastic.{framework}")
    assert all(hasattr(module, name) for name in module.__all__)
    assert len(set(module.__all__)) == len(module.__all__), "a name of its own is among those of all faces"
