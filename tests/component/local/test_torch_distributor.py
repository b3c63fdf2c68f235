"""A program that imports Horovod and pyspark's class, on processes of this machine, through the loss of a worker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.native, pytest.mark.timeout(120)]

PROGRAM = """
import os
import spark_elastic.as_horovod
import horovod.torch as hvd
from horovod.common.exceptions import HorovodInternalError
from horovod.spark.common.backend import SparkBackend
from horovod.spark.common.store import Store
from horovod.spark.lightning import TorchEstimator
import pyspark.ml.torch.distributor
import spark_elastic
pyspark.ml.torch.distributor.TorchDistributor = spark_elastic.TorchDistributor


def train(size, killed):
    import torch
    from horovod.torch.elastic import ElasticSampler

    hvd.init()
    if hvd.rank() == 1 and not os.path.exists(killed):
        open(killed, "w").close()
        os.kill(os.getpid(), 9)
    total = float(hvd.allreduce(torch.ones(1), op=hvd.Sum))
    seen = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT")}
    return bytes(size), total, seen, type(ElasticSampler([])).__module__


if __name__ == "__main__":
    from pyspark.ml.torch.distributor import TorchDistributor

    result = TorchDistributor(num_processes=2, local_mode=True, use_gpu=False).run(train, 6 << 20, killed="killed")
    assert len(result[0]) == 6 << 20
    print("result", *result[1:])
    estimator = TorchEstimator(backend=SparkBackend(num_proc=3), store=Store.create("/a/store"))
    print("estimator", estimator.getNumWorkers(), estimator.getStore(), HorovodInternalError.__name__)
    try:
        import horovod.runner
    except ImportError as error:
        print(error)
"""


def test_p3_a_function_begins_again_in_new_processes_and_returns_what_rank_0_does(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    how: Any = {"capture_output": True, "text": True, "env": {**os.environ, "TMPDIR": str(tmp_path)}}
    command = [sys.executable, "program.py"]
    done = subprocess.run(command, cwd=tmp_path, timeout=100, check=False, **how)
    assert done.returncode == 0, done.stderr[-3000:]
    told = done.stdout
    seen = "{'RANK': '0', 'LOCAL_RANK': '0', 'TORCHELASTIC_RESTART_COUNT': '1'}"
    assert f"result 2.0 {seen} spark_elastic.handwritten.torch_state" in told
    assert "estimator 3 /a/store CollectiveError" in told
    assert "No module named 'horovod.runner'" in told


def test_horovods_names_are_not_given_after_horovod_itself() -> None:
    program = "import sys, types; sys.modules['horovod'] = types.ModuleType('horovod'); import spark_elastic.as_horovod"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.rstrip().splitlines()[-1] == (
        "spark_elastic.errors.InvalidInput: horovod itself is imported already: write `import "
        "spark_elastic.as_horovod` before what imports horovod."
    )
