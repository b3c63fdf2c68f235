"""The programs that newcomers run first: those of the pages, and the loop under spark-submit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyspark
import pytest
from pyspark.sql import SparkSession

from spark_elastic.worker.function_program import find_free_port
from tests.pages import apply_diff, blocks
from tests.sources import ROOT
from tests.spark.cluster import StandaloneCluster, cluster_environment

pytestmark = [pytest.mark.spark, pytest.mark.native, pytest.mark.slow]

HOW_TO = sorted(page for page in (ROOT / "docs" / "how-to").glob("*.md") if page.stem != "standalone")


def without_session(program: str) -> str:
    return "\n".join(line for line in program.splitlines() if not line.startswith("spark = "))


def test_the_example_of_the_readme_runs(
    spark: SparkSession, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (program,) = blocks("index.md", "python")
    monkeypatch.setattr("tempfile.mkdtemp", lambda: str(tmp_path / "store"))
    names: dict[str, Any] = {"__name__": "__main__", "spark": spark}
    exec(compile(without_session(program), "index.md", "exec"), names)
    assert names["model"].summary.report.epochs[-1].seen == 1000
    said = capsys.readouterr()
    assert "no worker was lost" in said.out
    phases = re.findall(r"writing the rows to|wrote 1,000 rows|starting [\d to]+ wor", said.err + said.out)
    assert [phase.split()[0] for phase in phases] == ["writing", "wrote", "starting"], said
    program, loop = blocks("README.md", "python")
    exec(compile(without_session(program), "<README.md>", "exec"), names)
    losses = [entry["loss"] for entry in names["model"].history]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert names["model"].transform(names["df"]).filter("prediction is null").count() == 0
    names["df"] = spark.range(520).selectExpr("array_repeat(id / 520, 20) as x", "id / 260 as y")
    monkeypatch.setenv("SPARK_ELASTIC_GATHER_TIMEOUT", "1")  # there is no room for the fourth worker
    loop = loop.replace("/path/that/all/hosts/see", str(tmp_path / "seen"))
    exec(compile(loop, "<README.md>", "exec"), names)


@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.faults)])
def test_a_program_for_torchdistributor_runs_with_its_diffs(spark: SparkSession, number: int) -> None:
    before, _ = blocks("moving-from-torchdistributor.md", "python")
    program = apply_diff(before, blocks("moving-from-torchdistributor.md", "diff")[number])
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(program, "moving.py", "exec"), names)
    assert [size for size, _ in names["results"]] == [2] * len(names["results"]) or number == 2
    assert len(names["results"]) >= 2
    assert all(loss < 0.1 for _, loss in names["results"])


@pytest.mark.faults  # of the long run
@pytest.mark.parametrize("page", HOW_TO, ids=lambda page: page.stem)
def test_each_program_of_a_how_to_runs(
    page: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In one go, as a reader's session would; in a file, since workers get functions of it by value."""
    monkeypatch.setattr("tempfile.mkdtemp", lambda: str(tmp_path / "store"))
    names: dict[str, Any] = {"__name__": "__main__", "spark": spark}
    for program in blocks(f"how-to/{page.name}", "python"):
        exec(compile(program, page.name, "exec"), names)
    if "history" in names.get("model", object()).__dir__():
        assert all(epoch["loss"] > 0 for epoch in names["model"].history)
    if page.stem == "resume":
        assert names["again"].history == names["model"].history
    if page.stem == "plain-pytorch":
        assert len(set(names["losses"])) == 1


@pytest.mark.faults
@pytest.mark.timeout(400)
def test_the_cluster_from_nothing_loses_a_host_and_takes_in_another(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(*blocks("how-to/standalone.md", "python"))
    words = "\n".join([*blocks("how-to/standalone.md", "bash"), "kill $(jobs -p)", "wait"])
    port = find_free_port("127.0.0.1", (20000, 30000))
    (tmp_path / "words.sh").write_text(words.replace("7077", str(port)))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, **cluster_environment(), "PATH": path}
    how: Any = {"capture_output": True, "text": True, "timeout": 360, "env": environment}
    run = subprocess.run(["bash", "words.sh"], check=False, cwd=tmp_path, **how)
    log = (tmp_path / "job.log").read_text()
    worlds = [int(size) for size in re.findall(r"world of (\d+)", log)]
    assert worlds[:3] == [2, 1, 2], f"{run.stdout}{run.stderr}{log[-3000:]}"


@pytest.mark.faults
def test_the_hand_written_loop_runs_under_spark_submit(free_cluster: StandaloneCluster) -> None:
    run = submit(free_cluster, "elastic_loop.py")
    assert len(json.loads(run.stdout.splitlines()[-1])) == 2, run.stdout


@pytest.mark.ci
@pytest.mark.faults
def test_a_job_loses_an_executor_and_no_row(free_cluster: StandaloneCluster, tmp_path: Path) -> None:
    run = submit(free_cluster, "train_job.py", "--store", tmp_path / "store", "--epochs", "4")
    verdict = json.loads(run.stdout.splitlines()[-1])
    assert verdict["worlds"][:2] == [3, 2], run.stdout
    assert (verdict["rows_missing"], verdict["rows_doubled"]) == (0, 0)
    assert verdict["accuracy"] > 0.9


@pytest.mark.faults
def test_a_submitted_job_without_a_store_ends_with_one_sentence(free_cluster: StandaloneCluster) -> None:
    run = submit(free_cluster, "train_job.py", status=1)
    # spark-submit sends both streams of the program there.
    assert run.stdout.startswith("On a cluster the job needs --store"), run.stdout


@pytest.mark.faults
@pytest.mark.timeout(600)
def test_the_sales_example_loses_an_executor_and_no_row(tmp_path: Path) -> None:
    words = "--stores", "20", "--epochs", "12", "--batch-size", "64"
    verdict = run_example(tmp_path, "store_sales.py", *words)
    assert verdict["killed"]
    assert verdict["worlds"][:2] == [3, 2]
    assert len(set(verdict["rows_trained"])) == 1, "every epoch has all rows"
    assert verdict["rmspe"] < 0.6


def submit(
    cluster: StandaloneCluster, program: str, *arguments: object, status: int = 0
) -> subprocess.CompletedProcess[str]:
    """The end of an example that spark-submit runs on the cluster."""
    command = [str(Path(pyspark.__file__).parent / "bin" / "spark-submit"), "--master", cluster.url]
    settings = ["--conf", "spark.executor.memory=512m", "--conf", "spark.driver.memory=512m"]
    command += [*settings, str(ROOT / "examples" / program), *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == status, run.stderr[-3000:]
    return run


def run_example(folder: Path, program: str, *arguments: str) -> dict[str, Any]:
    """The last line that an example prints, run by plain python on the cluster that it embeds."""
    command = [sys.executable, str(ROOT / "examples" / program), *arguments]
    environment = {**os.environ, **cluster_environment(folder / "scratch")}
    how: Any = {"capture_output": True, "text": True, "timeout": 500, "env": environment}
    run = subprocess.run(command, check=False, cwd=folder, **how)
    assert run.returncode == 0, run.stderr[-3000:]
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found
