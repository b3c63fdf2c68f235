"""Keras 3 on elastic workers: `import spark_elastic.keras as hvd` speaks Horovod's Keras API. Knows no Spark.

Each name is imported when it is first used, and Keras with it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

# Public name -> the module that defines it.
_EXPORTS = {
    "Adasum": "spark_elastic.ops.reduce_op",
    "Average": "spark_elastic.ops.reduce_op",
    "Compression": "spark_elastic.keras.compression",
    "DistributedOptimizer": "spark_elastic.keras.optimizer",
    "HostsUpdatedInterrupt": "spark_elastic.state.state",
    "Max": "spark_elastic.ops.reduce_op",
    "Min": "spark_elastic.ops.reduce_op",
    "PartialDistributedOptimizer": "spark_elastic.keras.optimizer",
    "ProcessSet": "spark_elastic.ops.process_sets",
    "Product": "spark_elastic.ops.reduce_op",
    "ReduceOp": "spark_elastic.ops.reduce_op",
    "Sum": "spark_elastic.ops.reduce_op",
    "add_process_set": "spark_elastic.ops.process_sets",
    "allgather": "spark_elastic.keras.values",
    "allgather_object": "spark_elastic.ops.objects",
    "allreduce": "spark_elastic.keras.values",
    "broadcast": "spark_elastic.keras.values",
    "broadcast_global_variables": "spark_elastic.keras.values",
    "broadcast_object": "spark_elastic.ops.objects",
    "broadcast_variables": "spark_elastic.keras.values",
    "ccl_built": "spark_elastic.ops.topology",
    "cross_rank": "spark_elastic.ops.topology",
    "cross_size": "spark_elastic.ops.topology",
    "cuda_built": "spark_elastic.ops.topology",
    "ddl_built": "spark_elastic.ops.topology",
    "global_process_set": "spark_elastic.ops.process_sets",
    "gloo_built": "spark_elastic.ops.topology",
    "gloo_enabled": "spark_elastic.ops.topology",
    "init": "spark_elastic.ops.topology",
    "is_homogeneous": "spark_elastic.ops.topology",
    "is_initialized": "spark_elastic.ops.topology",
    "load_model": "spark_elastic.keras.optimizer",
    "local_rank": "spark_elastic.ops.topology",
    "local_size": "spark_elastic.ops.topology",
    "mpi_built": "spark_elastic.ops.topology",
    "mpi_enabled": "spark_elastic.ops.topology",
    "mpi_threads_supported": "spark_elastic.ops.topology",
    "nccl_built": "spark_elastic.ops.topology",
    "rank": "spark_elastic.ops.topology",
    "reducescatter": "spark_elastic.keras.values",
    "remove_process_set": "spark_elastic.ops.process_sets",
    "rocm_built": "spark_elastic.ops.topology",
    "shutdown": "spark_elastic.ops.topology",
    "size": "spark_elastic.ops.topology",
    "start_timeline": "spark_elastic.ops.channels",
    "stop_timeline": "spark_elastic.ops.channels",
}

if TYPE_CHECKING:
    from elastic_collectives import CollectiveError as HorovodInternalError
    from spark_elastic.keras import callbacks, elastic
    from spark_elastic.keras.compression import Compression
    from spark_elastic.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer, load_model
    from spark_elastic.keras.values import (
        allgather,
        allreduce,
        broadcast,
        broadcast_global_variables,
        broadcast_variables,
        reducescatter,
    )
    from spark_elastic.ops.channels import start_timeline, stop_timeline
    from spark_elastic.ops.objects import allgather_object, broadcast_object
    from spark_elastic.ops.process_sets import (
        ProcessSet,
        add_process_set,
        global_process_set,
        remove_process_set,
    )
    from spark_elastic.ops.reduce_op import Adasum, Average, Max, Min, Product, ReduceOp, Sum
    from spark_elastic.ops.topology import (
        ccl_built,
        cross_rank,
        cross_size,
        cuda_built,
        ddl_built,
        gloo_built,
        gloo_enabled,
        init,
        is_homogeneous,
        is_initialized,
        local_rank,
        local_size,
        mpi_built,
        mpi_enabled,
        mpi_threads_supported,
        nccl_built,
        rank,
        rocm_built,
        shutdown,
        size,
    )
    from spark_elastic.state.state import HostsUpdatedInterrupt

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "Max",
    "Min",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "ReduceOp",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]


def __getattr__(name: str) -> object:
    if name in ("callbacks", "elastic"):
        return importlib.import_module(f"{__name__}.{name}")
    if name == "HorovodInternalError":
        return importlib.import_module("elastic_collectives").CollectiveError
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value
