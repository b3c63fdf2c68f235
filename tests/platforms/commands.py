"""Runs commands that know nothing of this repository or of the environment that its tests run in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMAND_SECONDS = 1800


def run(*command: str | Path, seconds: float = COMMAND_SECONDS, cwd: str | Path = "/") -> str:
    """What a command prints; SystemExit with the end of it if it fails."""
    left_out = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYSPARK_PYTHON", "SPARK_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=cwd, env=environment, timeout=seconds
    )
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
    return done.stdout


def say(text: str) -> None:
    sys.stdout.write(f"== {text}\n")
    sys.stdout.flush()
