"""Clients of a session that this process cannot have: each a program of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.sources import ROOT
from tests.spark.cluster import cluster_environment


def client(script: str, master: str, folder: Path, seconds: float = 400) -> Any:
    """What a client says with its last line. script: the name of a module."""
    ephemeral = {"SPARK_TESTING": "1"}  # the server's port, which is a fixed one otherwise
    done = subprocess.run(
        [sys.executable, "-m", script, master, str(folder)],
        env=os.environ | cluster_environment(folder) | ephemeral,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
