"""`spark-elastic-run COMMAND` to its end: which Python its workers run with, a killed driver, GPUs, a page's script.

The GPUs are names here: nothing of CUDA is loaded.
"""

from __future__ import annotations

import os
import re
import site
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.component.local.watched import run_command
from tests.pages import apply_diff, blocks

pytestmark = [pytest.mark.native, pytest.mark.timeout(180)]


def _create_environment(folder: Path, *paths: str) -> str:
    """The Python of a new environment that finds packages in these folders."""
    venv.create(folder, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder), "platbase": str(folder)}))
    (packages / "given.pth").write_text("\n".join(paths))
    return str(folder / "bin" / "python")


SHOWS_PYTHON = "import os, sys\nprint('rank', os.environ['RANK'], 'runs in', sys.prefix, sys.argv[1:])\n"
TWO = ("-H", "localhost:2")


def test_workers_run_with_the_python_of_the_command_which_finds_their_module(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SHOWS_PYTHON)
    other = _create_environment(tmp_path / "other", *filter(None, sys.path), *site.getsitepackages())
    done = run_command(tmp_path, *TWO, other, "-m", "train", "--lr", "0.1")
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"rank {rank} runs in {tmp_path / 'other'} ['--lr', '0.1']" in done.stdout


def test_a_python_without_the_package_is_refused_with_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SHOWS_PYTHON)
    # An isolated one, which does not look at PYTHONPATH.
    isolated = tmp_path / "isolated-python"
    isolated.write_text(f'#!/bin/sh\nexec {_create_environment(tmp_path / "other")} -I "$@"\n')
    isolated.chmod(0o755)
    done = run_command(tmp_path, *TWO, str(isolated), "train.py")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "No module named 'spark_elastic'" in done.stderr
    assert "give a Python that has spark_elastic, or install it there" in done.stderr


STARTED = """
import os, sys
import trainer
loaded = "spark_elastic.worker.fork_server" in sys.modules, trainer.loaded_before
print("rank", os.environ["RANK"], os.environ["A"], os.nice(0), sys.flags.optimize, sys.argv[1:], *loaded)
"""


def test_the_pythons_that_a_shell_script_starts_run_on_forked_workers(tmp_path: Path) -> None:
    """What the program imports at its top, and what was asked for, is there before it begins."""
    (tmp_path / "train.py").write_text(STARTED)
    early = "'click.testing' in sys.modules and 'mailbox' in sys.modules"
    (tmp_path / "trainer.py").write_text(f"import sys\nloaded_before = {early}\nimport click.testing\n")
    (tmp_path / "train.sh").write_text("set -e\nA=b exec env nice -n 3 python -O train.py --lr $1\n")
    done = run_command(tmp_path, *TWO, "--preload", "mailbox", "bash", "train.sh", "0.1")
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert f"rank {rank} b {os.nice(0) + 3} 1 ['--lr', '0.1'] True True" in done.stdout


# One of its ranks kills the driver, the parent of its slot, before the fifth step.
KILLS_ITS_DRIVER = """
import os, signal, sys, time
from pathlib import Path
import numpy as np, psutil
from spark_elastic.handwritten.elastic_loop import elastic
from spark_elastic.handwritten.object_state import ObjectState
from spark_elastic.worker.context import get_context

steps, struck = int(sys.argv[1]), Path("struck")

def loop(state):
    while state.step < steps:
        if state.step == 5 and get_context().world.me.rank == 0 and not struck.exists():
            struck.touch()
            drivers = [p for p in psutil.Process().parents() if "spark_elastic.clusters.cli" in p.cmdline()]
            drivers[0].kill()
            time.sleep(60)
        ones = np.ones(1)
        get_context().group.allreduce(ones)
        state.total += float(ones[0]) / get_context().group.size
        state.step += 1
        print("step", state.step, flush=True)
        state.commit()

state = ObjectState(step=0, total=0.0)
elastic(loop)(state)
print("total", state.total, flush=True)
"""


def test_r23_a_killed_driver_is_started_again_and_continues_at_the_step(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(KILLS_ITS_DRIVER)
    options = (*TWO, "--restarts", "2", "--run-id", "mine", "--store", str(tmp_path / "store"))
    done = run_command(tmp_path, *options, "python", "train.py", "12")
    assert done.returncode == 0, done.stderr
    again = "the driver was killed by SIGKILL; it starts again and continues the run (1 restarts left)"
    assert again in done.stderr
    assert done.stderr.count("starts again") == 1
    assert done.stdout.count("total 12.0") == 2
    assert len(re.findall(r"step \d+\n", done.stdout)) <= 2 * 12, "a step was repeated"
    assert done.stdout.count("step 6\n") == 2


SHOWS_GPUS = """
import os, spark_elastic
print("sees", os.environ["CUDA_VISIBLE_DEVICES"], spark_elastic.task_resources())
"""
GPUS = [f"GPU-{os.getpid()}-{number}" for number in range(2)]  # which no other test takes


def run_on_gpus(folder: Path, gpus: list[str], *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SHOWS_GPUS)
    settings = {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "SPARK_ELASTIC_FAILURE_BUDGET": "0"}
    return run_command(folder, *options, "train.py", **settings)


@pytest.mark.parametrize(
    ("gpus", "options", "seen"),
    [
        (GPUS, ("--min-np", "2", "--device", "cuda"), GPUS),
        # Nothing has failed: a slot without a GPU says so, and takes no part.
        (GPUS[:1], ("--min-np", "1", "--start-timeout", "1", "--device", "cuda"), GPUS[:1]),
        (GPUS, ("--device", "cpu"), ["", ""]),
    ],
    ids=["a GPU each", "as many workers as there are GPUs", "on the CPU"],
)
def test_workers_of_a_machine_see_a_gpu_each_or_none(
    tmp_path: Path, gpus: list[str], options: tuple[str, ...], seen: list[str]
) -> None:
    done = run_on_gpus(tmp_path, gpus, *options)
    assert done.returncode == 0, done.stderr
    lines = [line.partition("sees ")[2] for line in done.stdout.splitlines() if "sees " in line]
    assert sorted(lines) == sorted(f"{gpu} {{'gpu': ('{gpu}',)}}" if gpu else " {}" for gpu in seen)
    taken = "device='cuda', and its GPU is taken by another slot of this host: lower num_workers"
    assert (taken in done.stderr) == (len(seen) == 1)


def test_fewer_gpus_on_hosts_that_come_later_are_named_when_time_is_up(tmp_path: Path) -> None:
    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\necho localhost:2\n")
    script.chmod(0o755)
    done = run_on_gpus(
        tmp_path, GPUS[:1], "--min-np", "2", "--elastic-timeout", "6", "--device", "cuda",
        "--host-discovery-script", str(script),
    )  # fmt: skip
    assert done.returncode == 1
    # On a busy machine the worker with the GPU may not have come either.
    assert re.search(r"NotEnoughWorkers: [01] workers came within 6 s and 2 are needed", done.stderr)
    assert "said: device='cuda', and its GPU is taken by another slot of this host" in done.stderr


@pytest.mark.parametrize("form", ["one line", pytest.param("elastic", marks=pytest.mark.faults)])
def test_an_unchanged_script_of_horovod_runs(tmp_path: Path, form: str) -> None:
    _, before = blocks("moving-from-horovod.md", "python")
    one_line, diff = blocks("moving-from-horovod.md", "diff")
    script = tmp_path / "train.py"
    script.write_text(apply_diff(before, one_line if form == "one line" else diff))
    done = run_command(tmp_path, "python", str(script))
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[-4]) for line in done.stdout.splitlines() if "on 2 workers" in line]
    assert len(losses) == 8
    assert min(losses[-3:]) < 46  # a third of what the labels vary by
