"""Programs that use other people's libraries as their documentation does, on two workers, and again through a SIGKILL.

`python tests/platforms/works_with.py [NAME ...]`. The programs are in programs/. Each name has an environment in
build/works-with/, whose packages come before those of the one that runs this; programs note their steps in a file
(programs/steps.py), by which the second run's worker of rank 1 is killed in mid-training. What was seen is in
results/works-with/NAME.json, from which docs/generate.py makes docs/works-with.md.
"""

from __future__ import annotations

import ast
import datetime
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.dirname(__file__))
from commands import ROOT, run, say

HERE = Path(__file__).resolve().parent
PROGRAMS = HERE / "programs"
RESULTS = HERE / "results" / "works-with"
BUILD = ROOT / "build" / "works-with"
KILL_AT = 12  # the step after which rank 1 is killed
RUN_SECONDS = 420.0
SAME = 1e-5  # largest relative difference of results that float rounding makes
VARIABLES = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
VARIABLES |= {"SPARK_LOCAL_IP": "127.0.0.1", "PYTHONWARNINGS": "ignore"}


@dataclass(frozen=True)
class Case:
    """A program, and what it runs beside."""

    program: str  # the program's file, without ".py", and its arguments
    shown: tuple[str, ...]  # distributions whose versions the page shows
    packages: tuple[str, ...] = ()  # arguments of pip, a call each
    options: str | None = "-np 2"  # of spark-elastic-run; None: the program starts workers on Spark
    kill_at: int = KILL_AT  # step of any rank after which rank 1 is killed
    remark: str = ""  # what the page says of the case, where something is another's fault


ELASTIC = "-np 2 --min-np 1"
HF = ("trl>=1.16,<2 peft>=0.21,<1 datasets>=5,<6",)
SENTENCES = ("sentence-transformers>=6.2,<7 datasets>=5,<6",)
TRL = ("trl", "peft", "transformers")
ACCELERATE = ("accelerate", "torch")
CASES = {
    "accelerate-script": Case("accelerate_script test_script", ACCELERATE),
    "accelerate-sync": Case("accelerate_script test_sync", ACCELERATE, kill_at=5),
    "accelerate-ops": Case("accelerate_script test_ops", ACCELERATE, kill_at=5),
    "accelerate-data-loop": Case(
        "accelerate_script test_distributed_data_loop test_can_join_uneven_inputs test_join_can_override_even_batches "
        "test_join_can_override_for_mixed_type_dataloaders "
        "test_join_raises_warning_for_iterable_when_overriding_even_batches "
        "test_join_raises_warning_for_non_ddp_distributed",
        ("accelerate", "torchdata"),
        ("torchdata>=0.11,<1",),
        kill_at=5,
        remark="Without five tests of `join_uneven_inputs`, which does nothing on CPUs in accelerate 1.15. Under "
        "torchrun the script waits until it is ended; here a sentence names the two calls that do not match.",
    ),
    "accelerate-comm-hook": Case(
        "accelerate_script test_ddp_comm_hook",
        ("accelerate", "torchdata"),
        ("torchdata>=0.11,<1",),
        kill_at=4,
        remark="The script of accelerate 1.15 gives DDP the number of a GPU, which the program leaves out. It ends at "
        "the third of its hooks, since torch 2.13 has the one for BF16 on GPUs alone, under torchrun, too.",
    ),
    "trl": Case("trl_sft", TRL, HF),
    "trl-elastic": Case("trl_sft --elastic", TRL, HF, ELASTIC),
    "trl-dpo-elastic": Case("trl_preferences", TRL, HF, ELASTIC),
    "trl-reward-elastic": Case("trl_preferences --reward", TRL, HF, ELASTIC),
    "sentence-transformers": Case("sentence_embeddings", ("sentence-transformers",), SENTENCES),
    "sentence-transformers-elastic": Case(
        "sentence_embeddings --elastic", ("sentence-transformers",), SENTENCES, ELASTIC
    ),
    "setfit-elastic": Case("setfit_pairs", ("setfit", "sentence-transformers"), ("setfit>=1.1,<2",), ELASTIC),
    "torchrec": Case(
        "torchrec_tables",
        ("torchrec", "fbgemm-gpu-cpu", "torch"),
        # torchrec requires fbgemm-gpu, of gigabytes, in whose place fbgemm-gpu-cpu stands.
        ("--no-deps torchrec==1.8.* fbgemm-gpu-cpu==1.8.*", "torchmetrics==1.0.3 tensordict pyre-extensions"),
    ),
    "pytorch-ignite": Case("ignite_parallel", ("pytorch-ignite",), ("pytorch-ignite>=0.5.5,<1",)),
    "torchmetrics": Case("torchmetrics_ddp", ("torchmetrics",)),
    "distributed-checkpoint": Case("dcp_fsdp2", ("torch",)),
    "datasets": Case("datasets_split", ("datasets",), ("datasets>=5,<6",)),
    "torchdata": Case("torchdata_stateful", ("torchdata",), ("torchdata>=0.11,<1",)),
    "optuna": Case("optuna_trials", ("optuna", "optuna-integration"), ("optuna-integration",)),
    "lightning": Case("lightning_ddp", ("lightning",)),
    "lightning-elastic": Case("lightning_ddp --elastic", ("lightning",), options=ELASTIC),
    "neuralforecast": Case(
        "neuralforecast_spark", ("neuralforecast", "lightning"), ("neuralforecast>=3.3,<4",), options=None
    ),
}


class Environment:
    """A virtual environment whose packages come before those of the one that runs this."""

    def __init__(self, packages: tuple[str, ...]) -> None:
        name = packages[-1].split()[0] if packages else "base"
        self.folder = BUILD / "".join(letter for letter in name if letter.isalnum() or letter == "-")
        self.python = self.folder / "bin" / "python"
        self._packages = packages

    def make(self) -> None:
        """Nothing if it is there."""
        ready, wanted = self.folder / ".ready", json.dumps([sys.executable, *self._packages])
        if ready.exists() and ready.read_text() == wanted:
            return
        run(sys.executable, "-m", "venv", "--clear", "--without-pip", self.folder)
        (packages,) = self.folder.glob("lib/python3*/site-packages")
        line = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
        (packages / "borrowed.pth").write_text(line)
        for group in self._packages:
            options = ("-qq", "--disable-pip-version-check", "--no-compile")
            run(self.python, "-m", "pip", "install", *options, *group.split())
        ready.write_text(wanted)

    def versions(self, names: Iterable[str]) -> dict[str, str]:
        code = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
        return dict(zip(names, run(self.python, "-c", code, *names).split(), strict=True))


class Run:
    """A case in a folder of its own. If `killing`, its worker of rank 1 is killed once, in the step of the case."""

    def __init__(self, case: Case, folder: Path, killing: bool) -> None:
        self._case = case
        self._folder = folder
        self._killing = killing
        self.killed_at = math.inf  # the time of the kill; infinity: nothing was killed
        self.code: int | None = None  # its exit code; None: it took longer than RUN_SECONDS
        self.seconds = 0.0

    @property
    def output(self) -> str:
        return (self._folder / "output").read_text(errors="replace")

    def read_lines(self) -> list[dict[str, Any]]:
        """What the processes noted, without a line that is being written."""
        path = self._folder / "steps"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def execute(self, python: Path) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        name, *arguments = self._case.program.split()
        command = [python, PROGRAMS / f"{name}.py", *arguments]
        if self._case.options is not None:
            options = [*self._case.options.split(), "-H", "localhost:2"]
            command = [python, "-m", "spark_elastic.clusters.cli", *options, *command]
        own = {"STEPS": str(self._folder / "steps"), "HF_HOME": str(self._folder)}
        own["PYSPARK_PYTHON"] = str(python)
        began = time.monotonic()
        with open(self._folder / "output", "w") as output:
            to = {"stdout": output, "stderr": subprocess.STDOUT, "start_new_session": True}
            process = subprocess.Popen(command, env=os.environ | VARIABLES | own, cwd=self._folder, **to)
            try:
                while process.poll() is None and time.monotonic() < began + RUN_SECONDS:
                    if self._killing and self.killed_at == math.inf:
                        self._kill_rank_1()
                    time.sleep(0.01)
                self.code = process.returncode
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)  # of a stuck job, whose workers end with it
                    process.wait()
        self.seconds = time.monotonic() - began

    def _kill_rank_1(self) -> None:
        lines = [line for line in self.read_lines() if "step" in line]
        pids = [line["pid"] for line in lines if line["rank"] == 1]
        if pids and max(line["step"] for line in lines) >= self._case.kill_at:
            self.killed_at = time.time()
            os.kill(pids[-1], signal.SIGKILL)

    def judge(self) -> dict[str, Any]:
        """How it ended."""
        results = [line["result"] for line in self.read_lines() if "result" in line]
        seen: dict[str, Any] = {"seconds": round(self.seconds, 1)}
        if self.code == 0 and results:
            return seen | {"result": results[-1]}
        reason = "it took too long" if self.code is None else f"exit code {self.code}"
        said = [line for line in self.output.splitlines() if line.strip()]
        return seen | {"failed": reason, "output": said[-3:]}

    def judge_loss(self) -> dict[str, Any]:
        """What the kill cost: from it to the first step of the next world, and to one that is new."""
        if self.killed_at == math.inf:
            return {"failed": "it ended before a worker could be killed"}
        lines = [line for line in self.read_lines() if "step" in line]
        taken = {line["pid"]: line["step"] for line in lines if line["time"] <= self.killed_at}
        reached = max(line["step"] for line in lines if line["time"] <= self.killed_at)
        later = []
        for line in lines:
            if line["time"] > self.killed_at:
                is_next = line["pid"] not in taken or line["size"] != 2 or line["step"] <= taken[line["pid"]]
                if later or is_next:
                    later.append(line)
                else:
                    taken[line["pid"]] = line["step"]  # the survivor had not noticed yet
                    reached = max(reached, line["step"])
        seen = {"reached": reached}
        if later:
            seen |= {"resumed": later[0]["step"], "pause": round(later[0]["time"] - self.killed_at, 2)}
        beyond = [line["time"] for line in later if line["step"] > reached]
        return seen | ({"caught_up": round(beyond[0] - self.killed_at, 2)} if beyond else {})


def try_case(name: str, case: Case) -> dict[str, Any]:
    environment = Environment(case.packages)
    environment.make()
    undisturbed = Run(case, BUILD / "runs" / name / "undisturbed", killing=False)
    undisturbed.execute(environment.python)
    seen = undisturbed.judge()
    loss: dict[str, Any] = {}
    if "failed" not in seen:
        killed = Run(case, BUILD / "runs" / name / "killed", killing=True)
        killed.execute(environment.python)
        loss = killed.judge() | killed.judge_loss()
        if "failed" not in loss:
            loss["same"] = is_same(loss["result"], seen["result"])
    return {
        "name": name,
        "date": datetime.date.today().isoformat(),
        "versions": environment.versions(case.shown),
        "program": case.program,
        "what": describe(case),
        "options": case.options,
        "undisturbed": seen,
        "loss": loss,
        "remark": case.remark,
    }


def is_same(a: float | str, b: float | str) -> bool:
    if isinstance(a, str) or isinstance(b, str):
        return a == b
    return math.isclose(a, b, rel_tol=SAME)


def describe(case: Case) -> str:
    """The first paragraph of the program's docstring, or of an elastic one the second."""
    source = (PROGRAMS / f"{case.program.split()[0]}.py").read_text()
    paragraphs = (ast.get_docstring(ast.parse(source)) or "").split("\n\n")
    return paragraphs["--elastic" in case.program].replace("\n", " ")


def main(names: list[str]) -> int:
    for name in names:
        if name not in CASES:
            raise SystemExit(f"works-with knows no {name!r}: choose from {', '.join(CASES)}.")
    RESULTS.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in names or CASES:
        say(name)
        result = try_case(name, CASES[name])
        (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        say(f"{name}: {json.dumps({key: result[key] for key in ('undisturbed', 'loss')})}")
        if "failed" in result["undisturbed"] or "failed" in result["loss"]:
            failed.append(name)
    if failed:
        say(f"failed: {', '.join(failed)}; their output is in {BUILD / 'runs'}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
