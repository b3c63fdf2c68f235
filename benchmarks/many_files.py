"""How long does a driver take, and how much memory, to plan a training on 100,000 Parquet files?

The files lie on this machine's disk, 10 small row groups in each. Each figure is of a process of its own, which
describes the files, writes the manifest as the run's record does and reads it again, and permutes the first epoch.
Ours: the footers read by a Spark job on local[*] and, for comparison, by the driver alone. Peer: the same calls of
an earlier checkout of this repository (`before`), which reads footers one by one. Memory: how much the driver's Python
process grew at its peak. Processor: of that process, which is what is left of a driver's time on a busy machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.parts.report import Row

GROUPS, GROUP_ROWS = 10, 20
# What is measured -> its unit.
FIGURES = {"describe": "s", "manifest": "s", "epoch": "s", "processor of the driver": "s", "memory": "MB"}
# Runs in the process that is measured: with the package of the checkout that PYTHONPATH names.
CHILD = """
import json, resource, sys, time
from spark_elastic.tables.existing_parquet import describe_parquet
from spark_elastic.data.manifest import Manifest
from spark_elastic.data.plan import DataPlan
from spark_elastic.data.store import Store

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

folder, on_executors = sys.argv[1], sys.argv[2] == "executors"
options = {}
if on_executors:
    from pyspark.sql import SparkSession
    from spark_elastic.estimators.dataframes.file_footers import make_footer_collector
    session = SparkSession.builder.master("local[*]").config("spark.ui.enabled", "false").getOrCreate()
    session.sparkContext.parallelize(range(8), 8).map(lambda x: x).collect()
    options["collect"] = make_footer_collector(session)
store = Store.open(folder)
before, times, cpu = peak(), [time.perf_counter()], time.process_time()
manifest = describe_parquet(store, ["x", "y"], **options)
times.append(time.perf_counter())
assert Manifest.from_json(manifest.to_json()) == manifest
times.append(time.perf_counter())
plan = DataPlan.for_run(manifest.group_rows, 1024, 3, 4, manifest.max_decoded_group_bytes(), 128 << 20)
len(plan.permute_epoch(0).assign_rows(0, 0, 1))
times.append(time.perf_counter())
steps = [end - begin for begin, end in zip(times, times[1:])]
print(json.dumps([*steps, time.process_time() - cpu, peak() - before]))
"""


def write_files(folder: Path, count: int) -> None:
    """The same content in each: only footers are read."""
    rows = GROUPS * GROUP_ROWS
    table = pa.table({"x": np.arange(rows, dtype=np.float32), "y": np.arange(rows)})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=GROUP_ROWS)
    content = sink.getvalue().to_pybytes()
    for number in range(count):
        (folder / f"part-{number:06d}.parquet").write_bytes(content)


def run_planner(checkout: Path, folder: Path, how: str) -> dict[str, float]:
    """One figure for each of FIGURES."""
    environment = os.environ | {"PYTHONPATH": f"{checkout}:{checkout / 'python'}"}
    command = [sys.executable, "-c", CHILD, str(folder), how]
    done = subprocess.run(
        command, env=environment, cwd=folder.parent, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return dict(zip(FIGURES, json.loads(done.stdout.splitlines()[-1]), strict=True))


def measure(files: int = 100_000, before: str = "") -> list[Row]:
    """before: a checkout of an earlier commit."""
    here = Path(__file__).resolve().parent.parent
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "files"
        folder.mkdir()
        write_files(folder, files)
        ours = {how: run_planner(here, folder, how) for how in ("the driver", "executors")}
        peer = run_planner(Path(before).resolve(), folder, "the driver") if before else {}
    return [
        Row(f"{files:,} files, footers by {how}: {name}", value, peer.get(name), FIGURES[name])
        for how, figures in ours.items()
        for name, value in figures.items()
    ]
