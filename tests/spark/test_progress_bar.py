"""Spark's own progress bar on a terminal that our progress uses too."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sources import ROOT
from tests.spark.cluster import cluster_environment

pytestmark = [pytest.mark.spark, pytest.mark.native, pytest.mark.slow]

# A Spark job, a job of ours and a Spark job again. Spark shows its bar after half a second.
PROGRAM = """
import time
import spark_elastic
from pyspark.sql import SparkSession

def sleep(seconds):
    time.sleep(seconds)

spark = SparkSession.builder.master("local[2]").config("spark.ui.showConsoleProgress", "true").getOrCreate()
spark.sparkContext.parallelize([1.5], 1).map(sleep).collect()
spark_elastic.run(sleep, (1.5,), num_workers=1)
print("the job has ended", flush=True)
spark.sparkContext.parallelize([1.5], 1).map(sleep).collect()
"""


def test_spark_shows_its_progress_bar_before_and_after_our_job_but_not_during_it(tmp_path: Path) -> None:
    terminal, program_side = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | cluster_environment(tmp_path),
        cwd=ROOT,
        stdin=program_side,
        stdout=program_side,
        stderr=program_side,
    ) as process:
        os.close(program_side)
        screen = read_to_end(terminal)
    os.close(terminal)
    assert process.returncode == 0, screen[-3000:]
    before, rest = screen.split("the status page of")
    during, after = rest.split("the job has ended")
    shown = ["[Stage" in part for part in (before, during, after)]
    assert shown == [True, False, True], screen


def read_to_end(terminal: int) -> str:
    """What the program wrote until it ended."""
    parts = []
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # how a terminal says that nobody has its other side open
            part = b""
        if not part:
            return b"".join(parts).decode(errors="replace")
        parts.append(part)
