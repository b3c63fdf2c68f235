"""Every public name of Horovod's interfaces is here and takes the same arguments in the same order; those of torch with
the same defaults. What differs beyond that is in docs/horovod-names*.md, which must name each of them, too."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import torch

import spark_elastic.torch as hvd
from elastic_collectives import CollectiveError
from spark_elastic import data
from spark_elastic.errors import PreflightError
from tests.sources import ROOT

_REDUCE = "average=None, name=None, op=None, prescale_factor=1.0, postscale_factor=1.0, process_set=all"
_SQUEEZED = _REDUCE.replace("op=None", "compression=none, op=None")
_SCATTER = (
    "name=None, compression=none, op=Average, process_set=all, prescale_factor=1.0, postscale_factor=1.0"
)
_SCATTER_ASYNC = "name=None, op=Average, process_set=all, prescale_factor=1.0, postscale_factor=1.0"

_ALIKE = {
    "init": "comm=None, process_sets=None",
    "start_timeline": "file_path, mark_cycles=False",
    "shutdown is_initialized stop_timeline size local_size cross_size rank local_rank cross_rank is_homogeneous": "",
    "mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built ccl_built": "",
    "cuda_built rocm_built sycl_built get_process_set_ids_and_ranks elastic.get_handler_registry": "",
    "allreduce": f"tensor, {_SQUEEZED}",
    "allreduce_async allreduce_ allreduce_async_": f"tensor, {_REDUCE}",
    "grouped_allreduce": f"tensors, {_SQUEEZED}",
    "grouped_allreduce_async grouped_allreduce_ grouped_allreduce_async_": f"tensors, {_REDUCE}",
    "sparse_allreduce_async": "tensor, name, op, process_set=all",
    "allgather allgather_async": "tensor, name=None, process_set=all",
    "grouped_allgather grouped_allgather_async": "tensors, name=None, process_set=all",
    "broadcast broadcast_async broadcast_ broadcast_async_": "tensor, root_rank, name=None, process_set=all",
    "alltoall alltoall_async": "tensor, splits=None, name=None, process_set=all",
    "reducescatter": f"tensor, {_SCATTER}",
    "reducescatter_async": f"tensor, {_SCATTER_ASYNC}",
    "grouped_reducescatter": f"tensors, {_SCATTER}",
    "grouped_reducescatter_async": f"tensors, {_SCATTER_ASYNC}",
    "poll synchronize": "handle",
    "barrier": "process_set=all",
    "join": "device=-1",
    "DistributedOptimizer": (
        "optimizer, named_parameters=None, compression=none, backward_passes_per_step=1, op=Average, "
        "gradient_predivide_factor=1.0, num_groups=0, groups=None, sparse_as_dense=False, process_set=all"
    ),
    "SyncBatchNorm": "num_features, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True",
    "broadcast_parameters": "params, root_rank",
    "broadcast_optimizer_state": "optimizer, root_rank, model=None",
    "broadcast_object": "obj, root_rank=0, name=None, process_set=all",
    "allgather_object": "obj, name=None",
    "ProcessSet": "ranks_or_comm",
    "add_process_set remove_process_set": "process_set",
    "is_process_set_included": "process_set_id",
    "check_extension": "ext_name, ext_env_var, pkg_path, *args",
    "elastic.run": "func",
    "elastic.TorchState": "model=None, optimizer=None, **kwargs",
    "elastic.ObjectState": "bcast_object, get_rank, **kwargs",
    "elastic.State": "bcast_object, get_rank",
    "elastic.ElasticSampler": "dataset, shuffle=True, seed=0",
    "elastic.set_handler_registry": "registry",
}
OF_TORCH = {name: arguments for names, arguments in _ALIKE.items() for name in names.split()}
_DEVICES = "device_dense device_sparse compression"
_FACTORS = "op gradient_predivide_factor"
_GROUPS = "num_groups groups process_set scale_local_gradients"
_SCALE = "prescale_factor postscale_factor"
_ALLREDUCE = f"average {_DEVICES} op {_SCALE}"
OF_TENSORFLOW = {
    "allreduce": f"tensor {_ALLREDUCE} name process_set ignore_name_scope",
    "grouped_allreduce": f"tensors {_ALLREDUCE} process_set ignore_name_scope name",
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
VALUES = [
    "Average", "Sum", "Adasum", "Min", "Max", "Product", "Compression", "HorovodInternalError", "global_process_set",
    "elastic.StateHandler", "elastic.ModelStateHandler", "elastic.OptimizerStateHandler", "elastic.SamplerStateHandler",
    "HorovodVersionMismatchError",
]  # fmt: skip
# Of Horovod's other modules: what is in `spark_elastic.data`, and what something else takes the place of.
DATA = ["BaseDataLoader", "AsyncDataLoaderMixin"]
REPLACED = ["HostDiscovery", "HostDiscoveryScript", "FixedHosts", "HostUpdateResult"]
# What ours may have instead of Horovod's default: None stands for it.
_DEFAULTS: dict[str, Any] = {
    "none": hvd.Compression.none,
    "all": hvd.global_process_set,
    "Average": hvd.Average,
}


TABLES = {
    "torch": OF_TORCH,
    **{
        framework: {name: ", ".join(arguments.split()) for name, arguments in table.items()}
        for framework, table in (("tensorflow", OF_TENSORFLOW), ("keras", OF_KERAS))
    },
}


def look_up(framework: str, name: str) -> Any:
    here: Any = importlib.import_module(f"spark_elastic.{framework}")
    for part in name.split("."):
        here = getattr(here, part)
    return here


@pytest.mark.parametrize(
    ("framework", "name"), [(framework, name) for framework, table in TABLES.items() for name in table]
)
def test_arguments_are_horovods(framework: str, name: str) -> None:
    ours = list(inspect.signature(look_up(framework, name)).parameters.values())
    theirs = [part.strip() for part in TABLES[framework][name].split(",") if part.strip()]
    for mine, told in zip(ours, theirs, strict=False):
        wanted, equals, default = told.partition("=")
        if wanted.startswith("*"):
            assert mine.kind in (mine.VAR_POSITIONAL, mine.VAR_KEYWORD)
            continue
        assert mine.name == wanted
        if equals:
            expected = _DEFAULTS[default] if default in _DEFAULTS else eval(default)
            assert mine.default == expected or (mine.default is None and default in ("none", "all")), wanted
    assert len(ours) >= len(theirs)
    for more in ours[len(theirs) :]:
        assert more.default is not more.empty or more.kind in (more.VAR_KEYWORD, more.VAR_POSITIONAL)


def test_the_page_for_movers_has_every_name() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("horovod-names*.md"))
    names = {*OF_TORCH, *OF_TENSORFLOW, *OF_KERAS, *VALUES, *DATA, *REPLACED}
    lacking = [name for name in names if f"`{name}`" not in pages]
    assert not lacking, "add a line to a table of docs/horovod-names*.md for each"


@pytest.mark.parametrize("framework", TABLES)
def test_exported_names_exist(framework: str) -> None:
    module = importlib.import_module(f"spark_elastic.{framework}")
    assert all(hasattr(module, name) for name in module.__all__)
    assert len(set(module.__all__)) == len(module.__all__), "a name of its own is among those of all faces"
    assert {name.split(".")[0] for name in TABLES[framework]} <= set(module.__all__)


def test_the_other_names_of_horovod_exist() -> None:
    for name in VALUES:
        look_up("torch", name)
    assert {*DATA} <= {*data.__all__}


def test_build_queries_answer_as_horovods() -> None:
    assert hvd.HorovodInternalError is CollectiveError
    assert hvd.HorovodVersionMismatchError is PreflightError
    assert hvd.gloo_built()
    assert hvd.gloo_enabled()
    no = (hvd.mpi_built, hvd.mpi_enabled, hvd.mpi_threads_supported, hvd.ddl_built, hvd.ccl_built)
    assert not any(ask() for ask in (*no, hvd.cuda_built, hvd.rocm_built, hvd.sycl_built))
    assert (hvd.nccl_built() > 0) == torch.distributed.is_nccl_available()
    assert hvd.is_homogeneous()
    hvd.check_extension("spark_elastic.torch", "HOROVOD_WITH_PYTORCH", __file__, "x")


def test_compressors_work_by_themselves() -> None:
    for compressor, dtype in ((hvd.Compression.fp16, torch.float16), (hvd.Compression.bf16, torch.bfloat16)):
        squeezed, ctx = compressor.compress(torch.ones(2, dtype=torch.float64))
        assert squeezed.dtype == dtype
        assert compressor.decompress(squeezed, ctx).dtype == torch.float64
        whole, ctx = compressor.compress(torch.ones(2, dtype=torch.int32))
        assert compressor.decompress(whole, ctx).dtype == torch.int32
    same = torch.ones(1)
    assert hvd.Compression.none.decompress(*hvd.Compression.none.compress(same)) is same
