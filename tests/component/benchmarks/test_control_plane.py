"""The benchmark's clients are a program of their own: this fails once they no longer speak the server's wire."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_clients_of_the_benchmark_speak_the_wire_of_the_server() -> None:
    command = ["-m", "benchmarks.run", "control_plane", "--small", "--set", "store_until=0", "c10d_until=0"]
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"2 workers: next world after a loss +\d", done.stdout)
