"""A process that user code forks ends where that code ends, and never goes on as the worker: seen from outside."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
from spark_elastic.worker.script import Script
Script.read(sys.argv[1])()
"""
FUNCTION = """
from elastic_collectives.fakes import FakeFabric
from spark_elastic.worker.context import get_context
from spark_elastic.worker.function_program import FunctionProgram
from spark_elastic.worker.program import WorkerHandle
from tests.unit.ops.workers import become

become(FakeFabric(1).group(0))
handle = WorkerHandle(lambda: 0, lambda at: None, lambda told: None, lambda error: None)
def train():
    exec(open(sys.argv[1]).read())
FunctionProgram(train).run(get_context().world, get_context().group, handle)
"""


@pytest.mark.parametrize("program", [SCRIPT, FUNCTION])
@pytest.mark.parametrize(
    ("last_line", "code"),
    [("sys.exit(0)", 0), ("sys.exit(5)", 5), ("raise ValueError('of the fork')", 1), ("", 0)],
)
def test_a_fork_ends_where_the_program_ends(program: str, last_line: str, code: int, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "import os, sys\n"
        "forked = os.fork()\n"
        f"if forked == 0:\n    print('the fork', flush=True)\n    {last_line or 'pass'}\n"
        "else:\n    print(os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]), flush=True)\n"
    )
    worker = f"import sys\n{program}\nprint('the worker')\n"
    done = subprocess.run(
        [sys.executable, "-c", worker, str(path)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split("\n") == ["the fork", str(code), "the worker", ""]
    assert ("ValueError: of the fork" in done.stderr) is ("ValueError" in last_line)
