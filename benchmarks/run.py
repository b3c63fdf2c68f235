"""Runs benchmarks by the name of their record: `python -m benchmarks.run NAME ...`.

    python -m benchmarks.run memory transform --record    writes the records in benchmarks/results
    python -m benchmarks.run allreduce --set rounds=3    with another setting: a parameter of the benchmark's `measure`
    python -m benchmarks.run allreduce --small    its smallest size, which shows that it runs
    python -m benchmarks.run torch_distributed --set "what=('commits',)" --record --keep    renews some rows of a record

What a benchmark asks, and of what, is in the docstring of its module. A module with a `finish` of its own has a record
of its own form.
"""

from __future__ import annotations

import argparse
import ast
import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.parts.budget import limit_time
from benchmarks.parts.report import finish

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Case:
    """What makes a record."""

    # Module and function; the module is the record's name where nothing else is said.
    measure: str
    # Where the record's differ from the function's defaults.
    settings: dict[str, Any] = field(default_factory=dict)
    # Of the smallest size.
    small: dict[str, Any] = field(default_factory=dict)
    # What it may take on two cores; then cases are left out.
    minutes: float = 5


ONE_ROUND = {"rounds": 1}
CASES = {
    "allreduce": Case("allreduce:measure", small={"ranks": (2,), **ONE_ROUND}),
    "bitwise_step": Case(
        "training_step:measure",
        {"virtual_shares": 8, "rows": (32, 128), "rounds": 9},
        {"layers": 4, "width": 32, "rows": (8,), **ONE_ROUND},
    ),
    "bulk_recovery": Case("gpu:compare_recoveries", {"device": "simnccl"}, {"kills": 1}),
    "collectives": Case(
        "collectives:measure", small={"networks": ((1e9, 0.02),), "hosts": 3, **ONE_ROUND}, minutes=15
    ),
    "compiled_cpu": Case("gpu:measure", {"device": "cpu", "cases": (4, 5)}, {"cases": (4,), **ONE_ROUND}),
    "control_plane": Case("control_plane:measure", small={"sizes": (2,)}, minutes=10),
    "estimator": Case("estimator:measure", small={"rows": 4096, "nets": ("small",), **ONE_ROUND}, minutes=10),
    "frozen": Case("frozen:measure", small={"megabytes": (1,), "kills": 1, "rounds": 2}),
    "goodput": Case("goodput:measure", small={"draws": 1, "sizes": ()}),
    "gpu": Case("gpu:measure", {"rounds": 3}, ONE_ROUND, minutes=10),
    "gpu_recovery": Case("gpu:compare_recoveries", {"device": "cuda", "kills": 8}, {"kills": 1}),
    "head_to_head": Case(
        "head_to_head:measure",
        {"repeat": 3},
        {"repeat": 1, "steps": 60, "peers": ("spark_elastic",), "plans": ("none",)},
        minutes=60,
    ),
    "head_to_head_quiet": Case(
        "head_to_head:measure",
        {"repeat": 2, "peers": ("spark_elastic", "torchrun"), "plans": ("none", "kill", "often")},
        {"repeat": 1, "steps": 60, "peers": ("spark_elastic",), "plans": ("none",)},
        minutes=20,
    ),
    "host_step": Case("gpu:measure", {"device": "pretend", "cases": (6,)}, ONE_ROUND),
    "kept_commits": Case("kept_commits:measure", small={"nets": ((2, 16, 20),), **ONE_ROUND}),
    "loop_memory": Case("memory:measure_loops", small={"megabytes": 1024}, minutes=15),
    "memory": Case("memory:measure", {"megabytes": 10_240}, {"megabytes": 64, "single": 64}, minutes=15),
    "recovery": Case("recovery:measure", small={"kills": 1, "peer_kills": 1, "local_sizes": (2,)}, minutes=8),
    "row_loader": Case("row_loader:measure", small={"rows": 20_003, "epochs": 1, **ONE_ROUND}, minutes=10),
    "starts": Case("starts:measure", small={"kills": 1, **ONE_ROUND}, minutes=10),
    "torch_distributed": Case(
        "torch_distributed:measure",
        small={"ranks": (2,), "layers": 4, "width": 32, "kills": 1, **ONE_ROUND},
        minutes=15,
    ),
    "training_step": Case("training_step:measure", small={"layers": 4, "width": 32, **ONE_ROUND}),
    "training_step_tensorflow": Case(
        "training_step:measure", {"framework": "tensorflow"}, {"layers": 4, "width": 32, **ONE_ROUND}
    ),
    "transform": Case("transform:measure", {"rounds": 3}, {"rows": 2000, **ONE_ROUND}),
}


def run(name: str, settings: dict[str, Any], record: bool, keeps: bool, minutes: float) -> None:
    where, function = CASES[name].measure.split(":")
    module = importlib.import_module(f"benchmarks.{where}")
    report = getattr(module, "finish", finish)
    path = RESULTS / f"{name}.json" if record else None
    with limit_time(60 * minutes):
        report(name, getattr(module, function)(**settings), path, keeps)


def read_setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("names", nargs="+", choices=CASES, metavar="NAME", help=", ".join(CASES))
    made.add_argument("--set", nargs="*", type=read_setting, default=[], metavar="SETTING=VALUE")
    made.add_argument("--small", action="store_true", help="the smallest size")
    made.add_argument("--record", action="store_true", help="write the record")
    made.add_argument("--keep", action="store_true", help="keep the record's rows of cases not measured")
    made.add_argument("--minutes", type=float, help="of each; cases that do not fit are left out, and named")
    chosen = made.parse_args()
    for name in chosen.names:
        small = CASES[name].small if chosen.small else {}
        settings = {**CASES[name].settings, **small, **dict(chosen.set)}
        run(name, settings, chosen.record, chosen.keep, chosen.minutes or CASES[name].minutes)


if __name__ == "__main__":
    main()
