"""Writes params.md from the Params, benchmarks.md from benchmarks/results, platforms.md and works-with.md from
tests/platforms/results, conformance.md from tests/conformance, and the tables and figures that other pages have from
benchmarks/results: `python docs/generate.py`. Names records that are old.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.ml.param import Param, Params

from spark_elastic.config import PREFIX, ElasticConfig, OperationConfig
from spark_elastic.estimators.keras_estimator import ElasticKerasEstimator
from spark_elastic.estimators.torch_estimator import ElasticTorchEstimator

FOLDER = Path(__file__).parent
TESTS = FOLDER.parent / "tests"
RESULTS = FOLDER.parent / "benchmarks" / "results"
OLD = 300  # commits to the product since a record, which then is named
HEAD = """# Every parameter

Made from the sources by `python docs/generate.py`. A parameter is a keyword of the constructor, of `setParams`, and has
`setBatchSize(...)` and `getBatchSize()` as Spark ML's own do.

## ElasticTorchEstimator

| parameter | default | |
|---|---|---|
"""
KERAS = """
## ElasticKerasEstimator

It has the parameters above, but for the following, which it has alone or with another meaning or default.

| parameter | default | |
|---|---|---|
"""
WITHOUT = """
It does not have: {}.
"""
SETTINGS = """
## ElasticConfig

Each is also a keyword of the estimators and of `spark_elastic.run`, and, where it is a number, text or truth value, a
variable of the driver's environment; there `none` stands for None. Times are in seconds.

| setting | default | environment | |
|---|---|---|---|
"""
OPERATIONS = """
## Variables of training processes

Each process reads them itself: set them in the environment of `spark-elastic-run`, give them as `env` of
`spark_elastic.run`, or, for an estimator, set `spark.executorEnv.NAME`. Times are in seconds.

| variable | default | |
|---|---|---|
"""
MEASURED = """# Benchmarks

Made from `benchmarks/results/` by `python docs/generate.py`; that folder's README says how each file was made, and
how to read it. `python -m benchmarks.run NAME` repeats one of its table. The peers: torch's Gloo (allreduce,
torch_distributed, two_hosts), its DDP over Gloo (training_step), our own step without bitwise mode (bitwise_step),
one with a loss of each backward pass (step_loss), TensorFlow's MultiWorkerMirroredStrategy
(training_step_tensorflow), a plain loop in one process, with the better of one and two threads, or DDP (estimator),
torchrun (recovery), pyspark's TorchDistributor (starts), a deepcopy of the state (commit),
torch's TCPStore and torchrun's rendezvous (control_plane),
pyarrow's reads of row groups (reader), torch's DataLoader (images) and other loaders (row_loader), the table's own
order (row_order), rows shuffled one by one, or 16 lanes (mixing), the same calls before footers became arrays
(many_files), a plain loop on the same GPU (gpu) or device (host_step),
the engine alone (bulk_recovery), float32 where a row says so; ours and the peer ran in turns.
Beside memory and loop_memory stands their bound.

| benchmark | case | ours | peer | ratio |
|---|---|---|---|---|
"""
RECORDS = """
## The records

| record | machine | commit | date |
|---|---|---|---|
"""
PLATFORMS = """# Platforms and versions

Made from `tests/platforms/results/` by `python docs/generate.py`. `python tests/platforms/matrix.py [row ...]` makes
an environment of the versions that each platform ships (`tests/platforms/*.txt`), installs the wheel with `pip
install --constraint` and fails if pip moves any of them. Then, in that environment: `spark-elastic-run` with two
ranks; a `fit` on three executors, one of which is killed, to the weights of a plain loop (1e-9 in float64) with each
row trained once per epoch; `transform`, saving and loading; a loop over `DistributedDataParallel` that loses a
worker, and another loop that loses an executor; and on Spark Connect a `fit` and a loop that loses a worker. Spark is
Apache Spark of PyPI on one machine, and torch runs on its CPU: what platforms change in Spark, and GPUs, were not
tried. `./build.sh test` runs only the `fit` with a loss, beside Databricks Runtime 15.4 and beside the newest Spark.

| platform | Python | Spark | torch | numpy | pandas | pyarrow | Spark Connect | |
|---|---|---|---|---|---|---|---|---|
"""
NOT_SUPPORTED = """
The wheel accepts Python 3.10 to 3.14 (pip refuses others), Spark 3.5 to 4.3, and from torch 2.2, numpy 1.23.5, pandas
1.5.3 and pyarrow 14 on. Not supported: Databricks Runtime 14.3 and serverless environment 1 (pyarrow 8), Fabric 1.2
(Spark 3.4), Python 3.9 of EMR 7 (choose its 3.11). Not tried, because PyPI has no pandas 1.5.3 for Python 3.12:
Databricks Runtime 16.4.
"""
CONFORMANCE = """# torch's conformance suite

Made from `tests/conformance/results.json` by `python docs/generate.py`. `python tests/conformance/suite.py` runs the
suite by which torch tests its own process groups (`torch/testing/_internal/distributed/distributed_test.py`, in its
wheel), in the ranks of `spark-elastic-run` and beside it over Gloo. In a worker the name `gloo` means the backend
[`elastic`](torch-distributed.md). Run with torch {torch} on {date}, on a machine without GPUs: what needs one is
skipped over both. `./build.sh test` runs one or more tests of each collective with 3 workers.

| workers | tests that run over Gloo | pass over Gloo | of these over elastic |
|---|---|---|---|
"""
GLOO_ALONE = """
What passes over Gloo alone:

| test | why |
|---|---|
"""
WORKS_WITH = """# Programs of other libraries

Made from `tests/platforms/results/works-with/` by `python docs/generate.py`. `python tests/platforms/works_with.py
[name ...]` makes an environment for each name and runs a program (`tests/platforms/programs/`) that uses the library
as its documentation does, on two workers; then again, and sends SIGKILL to the worker of rank 1 in mid-training.
Models have random weights, and nothing is downloaded. Each step takes at least 0.1 s. Unless "elastic" stands behind
the name, the program knows nothing of this package, and a loss makes it begin again, at its own newest checkpoint if
it writes some.

- **without a step**: from the kill to the first step of the next world.
- **repeated**: steps that had been taken before and were taken again.
- **same result**: the run with the kill ends with the weights, or what else the program computes, of the other one.

| name | versions | on two workers | after SIGKILL | without a step | repeated | same result |
|---|---|---|---|---|---|---|
"""
CASES = (
    ("allreduce", "4 KB, 2 ranks, shared memory"),
    ("allreduce", "4 MB, 2 ranks, sockets"),
    ("allreduce", "4 MB, 2 ranks, sockets with TLS"),
    ("allreduce", "4 MB, 2 ranks, in shared memory"),
    ("training_step", "25 M parameters in 160 tensors, 2 ranks: step"),
    ("training_step", "25 M parameters in 160 tensors, 2 ranks: added"),
    ("torch_distributed", "25 M parameters in 160 tensors, 2 ranks: DDP, added"),
    ("torch_distributed", "25 M parameters in 160 tensors, 4 ranks: DDP, added"),
    ("torch_distributed", "25 M parameters in 160 tensors, 2 ranks: FSDP2, step"),
    ("torch_distributed", "25 M parameters in 160 tensors, 4 ranks: FSDP2, step"),
    (
        "torch_distributed",
        "25 M parameters in 160 tensors, 4 ranks: FSDP2, step without an exchange, beside Gloo's",
    ),
    ("torch_distributed", "all_reduce, 4 MB, 4 ranks"),
    ("torch_distributed", "send and recv, 4 KB, 4 ranks"),
    (
        "bitwise_step",
        "25 M parameters in 160 tensors, 2 ranks, 32 rows each: in 8 virtual shares, beside the step",
    ),
    (
        "bitwise_step",
        "25 M parameters in 160 tensors, 2 ranks, 128 rows each: in 8 virtual shares, beside the step",
    ),
    ("step_loss", "2 ranks, 1 passes of 32 rows each: step"),
    ("step_loss", "2 ranks, 4 passes of 32 rows each: step"),
    ("step_loss", "2 ranks, 4 passes of 32 rows each: memory"),
    ("training_step_tensorflow", "25 M parameters in 160 tensors, 2 ranks: added"),
    ("estimator", "MLP of 3,329 parameters: training, against DistributedDataParallel"),
    ("estimator", "MLP of 1,053,001 parameters: training, against DistributedDataParallel"),
    ("estimator", "MLP of 3,329 parameters: training"),
    ("estimator", "MLP of 1,053,001 parameters: training"),
    ("estimator", "MLP of 3,329 parameters: 2 plain loops that exchange nothing"),
    ("estimator", "MLP of 1,053,001 parameters: 2 plain loops that exchange nothing"),
    ("estimator", "MLP of 3,329 parameters: 2 plain loops that sum one flat gradient a step"),
    ("estimator", "MLP of 3,329 parameters: workers start"),
    ("many_files", "100,000 files, footers by the driver: describe"),
    ("many_files", "100,000 files, footers by the driver: memory"),
    ("row_order", "1,000,000 rows of 11 numbers: written in the order of their hash"),
    ("row_order", "333,333 rows of a vector of 50: written in the order of their hash"),
    ("row_order", "1,000,000 rows, nearly all copies: written in the order of their hash"),
    ("mixing", "sorted by label, 16 lanes (default): distance of a step's classes"),
    ("mixing", "sorted by label, 64 lanes: distance of a step's classes"),
    ("mixing", "sorted by label, 16 lanes (default): accuracy after an epoch"),
    ("mixing", "sorted by label, 64 lanes: accuracy after an epoch"),
    ("mixing", "row groups of 128 MB, 64 lanes: loader, beside 16"),
    ("mixing", "row groups of 128 MB, 256 lanes: loader, beside 16"),
    ("transform", "transform, against predict_batch_udf"),
    ("transform", "transform, against a row at a time"),
    ("loop_memory", "10,240 MB in row groups of 64 MB: a loop of DDP: peak of a worker"),
    ("loop_memory", "10,240 MB in row groups of 4 MB: a loop of DDP: peak of a worker"),
    ("packing", "padding, spread 1.0"),
    ("packing", "tokens"),
    ("memory", "10,240 MB in row groups of 64 MB: peak of a worker"),
    ("memory", "10,240 MB in row groups of 64 MB: training"),
    ("memory", "10,240 MB in row groups of 64 MB: outside of training"),
    ("memory", "1,024 MB in one row group: peak of a worker"),
    ("two_hosts", "64 MB, 2 hosts x 1: float32, beside torch gloo"),
    ("two_hosts", "64 MB, 2 hosts x 2: float32, beside torch gloo"),
    ("two_hosts", "64 MB, 2 hosts x 2: as bfloat16, beside float32"),
    ("reader", "row groups of 10,000, against pyarrow"),
    *(
        ("row_loader", f"{n} worker processes, beside {peer}{what}")
        for n, peer in (
            (0, "torch's DataLoader over pyarrow"),
            (0, "litData"),
            (0, "Lance"),
            (1, "torch's DataLoader over pyarrow"),
        )
        for what in ("", ": peak of memory")
    ),
    ("row_loader", "an epoch of 3 ranks, beside torch's DataLoader over pyarrow: rows missing"),
    ("row_loader", "an epoch of 3 ranks, beside torch's DataLoader over pyarrow: rows twice"),
    ("row_loader", "an epoch of 3 ranks, beside litData: rows missing"),
    ("row_loader", "an epoch of 3 ranks, beside litData: rows twice"),
    ("row_loader", "an epoch of 3 ranks, beside Lance: rows missing"),
    ("row_loader", "an epoch of 3 ranks, beside Lance: rows twice"),
    ("row_loader", "3 ranks become 2, beside torch's DataLoader over pyarrow: rows missing"),
    ("row_loader", "3 ranks become 2, beside torch's DataLoader over pyarrow: rows twice"),
    ("row_loader", "3 ranks become 2, beside litData: rows missing"),
    ("row_loader", "3 ranks become 2, beside litData: rows twice"),
    ("row_loader", "3 ranks become 2, beside Lance: rows missing"),
    ("row_loader", "3 ranks become 2, beside Lance: rows twice"),
    ("images", "50,000 JPEGs of 64 x 64, 2 processes, against DataLoader row by row"),
    ("images", "50,000 JPEGs of 64 x 64, 2 processes, against DataLoader in whole batches"),
    ("stragglers", "one worker with 25 % of a core, beside the bound"),
    ("stragglers", "one worker with 25 % of a core, beside the bound with an exchange"),
    ("stragglers", "one worker with 25 % of a core, beside an equal division"),
    ("recovery", "child killed: p50 to the next step"),
    ("recovery", "executor killed: p50 to the next step"),
    ("recovery", "executor killed: p99 to the next step"),
    ("starts", "a function without imports, first job: to its first line"),
    ("starts", "a function without imports, second job: to its first line"),
    ("starts", "a function that imports torch, first job: to its first line"),
    ("starts", "a function that imports torch, second job: to its first line"),
    ("starts", "a worker with a spare is killed: to a warm one in its place"),
    (
        "bulk_recovery",
        "a worker killed, a communicator takes 30 s: p50 to the next step, beside the engine alone",
    ),
    ("gpu", "transformer of 19 M parameters, bf16, 128 rows"),
    ("gpu", "transformer of 19 M parameters, bf16, 128 rows, compiled"),
    ("gpu", "transformer of 19 M parameters, float32, 64 rows"),
    ("gpu", "commit of a transformer of 19 M parameters with AdamW"),
    ("gpu", "convolutions and BatchNorm, float32, 256 rows"),
    ("host_step", "three linear layers, float32, 8 rows: the host's time of a step"),
    ("gpu", "three linear layers, float32, 1024 rows"),
    ("commit", "pause of the training thread per commit"),
    *(
        ("control_plane", f"{n} workers: rendezvous (peer: TCPStore, a GET a pair)")
        for n in (2, 8, 32, 128, 512, 2000)
    ),
    *(
        ("control_plane", f"{n} workers: {what}")
        for n in (2, 8, 32, 128, 512, 2000, 10000)
        for what in (
            "first rendezvous, registering and connecting",
            "first rendezvous alone (peer: torchrun's, c10d)",
            "a first rendezvous, driver's CPU per worker",
            "next world after a loss",
            "a loss, driver's CPU per worker",
            "a loss, bytes to a worker (bodies)",
            "a loss, bytes to a worker (with heads)",
        )
    ),
    ("control_plane", "growth: driver's CPU of a first rendezvous ~ N^x, N >= 128"),
    ("control_plane", "growth: driver's CPU of a loss ~ N^x, N >= 128"),
)
QUOTED = re.compile(r"([\d.,]+)(<!-- (ours|peer|ratio) of (\w+): (.*?) -->)", re.DOTALL)


def params_page() -> str:
    torch, keras = _params(ElasticTorchEstimator), _params(ElasticKerasEstimator)
    own = [row for name, row in keras.items() if torch.get(name) != row]
    missing = ", ".join(f"`{name}`" for name in torch if name not in keras)
    without = WITHOUT.format(missing) if missing else ""
    return (
        HEAD
        + "".join(torch.values())
        + KERAS
        + "".join(own)
        + without
        + SETTINGS
        + "".join(_settings())
        + OPERATIONS
        + "".join(_operations())
    )


def benchmarks_page() -> str:
    rows = [_row(r["name"], r["machine"], f"`{r['commit']}`", r["date"]) for r in load_records()]
    return MEASURED + "".join(_measured(name, case) for name, case in CASES) + RECORDS + "".join(rows)


def load_records() -> list[dict[str, Any]]:
    """All records of benchmarks, by name."""
    return [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))]


def describe_old_records() -> Iterator[str]:
    """A sentence for each record since which the product has changed often."""
    for record in load_records():
        commits = f"{record['commit'].rstrip('+')}..HEAD"
        command = ("git", "rev-list", "--count", commits, "--", "spark_elastic", "csrc")
        done = subprocess.run(command, cwd=FOLDER.parent, capture_output=True, text=True, check=False)
        if done.returncode == 0 and int(done.stdout) > OLD:
            yield f"{record['name']}.json is {int(done.stdout)} commits old: measure it again, or say why not"


def platforms_page() -> str:
    results = (FOLDER.parent / "tests" / "platforms" / "results").glob("*.json")
    rows = [json.loads(path.read_text()) for path in results]
    rows.sort(
        key=lambda row: [[int(part) for part in row[name].split(".")[:2]] for name in ("spark", "python")]
    )
    return PLATFORMS + "".join(map(_platform, rows)) + NOT_SUPPORTED


def conformance_page() -> str:
    # As a file, so that nobody needs the tests' folder on the path.
    reasons = runpy.run_path(str(TESTS / "conformance" / "suite.py"))["REASONS"]
    record = json.loads((TESTS / "conformance" / "results.json").read_text())
    rows = []
    for size, of_size in record["sizes"].items():
        gloo, elastic = set(of_size["gloo"]), set(of_size["elastic"])
        counts = of_size["ran"], len(gloo), len(gloo & elastic)
        rows.append(_row(size, *map(str, counts)))
    why = [_row(f"`{name}`", reason) for name, reason in reasons.items()]
    return CONFORMANCE.format_map(record) + "".join(rows) + GLOO_ALONE + "".join(why)


def works_with_page() -> str:
    results = (FOLDER.parent / "tests" / "platforms" / "results" / "works-with").glob("*.json")
    cases = sorted((json.loads(path.read_text()) for path in results), key=lambda case: str(case["name"]))
    about = [f"- **{case['name']}** (`{case['program'].split()[0]}.py`): {case['what']}" for case in cases]
    notes = [f" {case['remark']}" if case["remark"] else "" for case in cases]
    lines = "\n".join(map("".join, zip(about, notes, strict=True)))
    return f"{WORKS_WITH}{''.join(map(_program, cases))}\n{lines}\n"


def _program(case: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in case["versions"].items())
    alone, loss = case["undisturbed"], case["loss"]
    runs = (
        f"no: {_failure(alone)}" if "failed" in alone else f"yes, {alone['seconds']:.0f} s, on {case['date']}"
    )
    if not loss or "failed" in loss:
        after = (f"ended: {_failure(loss)}" if loss else "", "", "", "")
    else:
        repeated = loss["reached"] + 1 - loss["resumed"]
        how = f"continued at step {loss['resumed']}" if loss["resumed"] > 1 else "began again"
        same = "yes" if loss["same"] else f"no: {loss['result']} and {alone['result']}"
        after = (how, f"{loss['pause']:.1f} s", str(max(repeated, 0)), same)
    return _row(case["name"], versions, runs, *after)


def _failure(run: dict[str, Any]) -> str:
    said = run.get("output") or [""]
    return f"{run['failed']} {said[-1].strip()[:200]}".strip()


def _platform(row: dict[str, Any]) -> str:
    versions = (row[name] for name in ("python", "spark", "torch", "numpy", "pandas", "pyarrow"))
    connect = "yes" if "connect" in row["seen"] else f"no: {row['seen']['no_connect']}"
    return _row(row["name"], *versions, connect, f"run by us on {row['date']}")


def fill_figures(page: str) -> str:
    """The page with each quoted figure as its record has it, in as many decimals as the page shows."""

    def quote(match: re.Match[str]) -> str:
        shown, mark, what, name, case = match.groups()
        decimals = len(shown.partition(".")[2])
        return f"{_record(name, case)[what]:,.{decimals}f}{mark}"

    return QUOTED.sub(quote, page)


def _record(name: str, case: str) -> dict[str, Any]:
    """The row of a result. Raises StopIteration where the benchmark has no such case any more."""
    rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    return next(row for row in rows if row["case"] == case)


def _measured(name: str, case: str) -> str:
    row = _record(name, case)
    figures = (f"{row[who]:.3g} {row['unit']}" if row[who] is not None else "–" for who in ("ours", "peer"))
    return _row(name, case, *figures, "–" if row["ratio"] is None else f"{row['ratio']:.2f}")


def _params(estimator: type[Params]) -> dict[str, str]:
    """A row for each Param, in the order of the constructor's keywords."""
    rows = {}
    for name, keyword in inspect.signature(estimator.__init__).parameters.items():
        param = getattr(estimator, name, None)
        if keyword.kind is keyword.KEYWORD_ONLY and isinstance(param, Param):
            rows[name] = _row(f"`{name}`", _default(keyword.default), param.doc)
    return rows


def _settings() -> list[str]:
    text = re.sub(r"\n {8}", " ", inspect.cleandoc(ElasticConfig.__doc__ or "").replace("\n    ", " "))
    says: dict[str, str] = {}
    for names, meaning in re.findall(r"^([a-z_, ]+): (.*)$", text, re.MULTILINE):
        says |= dict.fromkeys(names.split(", "), meaning)
    return [
        _row(f"`{field.name}`", _default(field.default), _variable(field), says[field.name])
        for field in dataclasses.fields(ElasticConfig)
    ]


def _operations() -> list[str]:
    """A row for each field of `OperationConfig`, with the comment above or behind it."""
    source, rows = inspect.getsource(OperationConfig), []
    for field in dataclasses.fields(OperationConfig):
        found = re.search(rf"((?:    # .*\n)*)    {field.name}: .*? = .*?(  # .*)?\n", source)
        assert found is not None, field.name
        assert found[1] or found[2], field.name
        meaning = " ".join(line.strip("# ") for line in (found[1] or found[2]).splitlines()).rstrip(".")
        meaning = f"{meaning[0].upper()}{meaning[1:]}."
        rows.append(_row(_variable(field), _default(field.default), meaning))
    return rows


def _variable(field: dataclasses.Field[object]) -> str:
    """The variable of the environment that sets it; "" for objects, which have none."""
    return "" if str(field.type).startswith("object") else f"`{PREFIX}{field.name.upper()}`"


def _default(value: object) -> str:
    return "required" if value is inspect.Parameter.empty else f"`{value!r}`"


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


if __name__ == "__main__":
    (FOLDER / "params.md").write_text(params_page())
    (FOLDER / "benchmarks.md").write_text(benchmarks_page())
    (FOLDER / "platforms.md").write_text(platforms_page())
    (FOLDER / "works-with.md").write_text(works_with_page())
    (FOLDER / "conformance.md").write_text(conformance_page())
    head_page = runpy.run_path(str(RESULTS.parent / "parts" / "head_page.py"))
    head_page["write_page"](json.loads((RESULTS / "head_to_head.json").read_text()), FOLDER)
    for page in FOLDER.rglob("*.md"):
        page.write_text(fill_figures(page.read_text()))
    sys.stderr.writelines(f"{old}\n" for old in describe_old_records())
