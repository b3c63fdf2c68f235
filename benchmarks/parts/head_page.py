"""The page docs/head-to-head.md and its two plots, made from the record of benchmarks/head_to_head.py alone."""

from __future__ import annotations

import statistics
import textwrap
from pathlib import Path
from typing import Any

PEERS = {
    "spark_elastic": ("spark_elastic", "#1b7f4d"),
    "spark_elastic_bitwise": ("spark_elastic, bitwise", "#7fbf7b"),
    "torchrun": ("torchrun", "#d1641b"),
    "ray": ("Ray Train", "#2a6fb0"),
    "torchft": ("torchft", "#8c4f9f"),
}
PLANS = {
    "none": "no fault",
    "kill": "a worker is killed every 20 s",
    "return": "a host is killed and returns after 10 s",
    "stop": "a worker is stopped for 20 s",
    "scale": "a host leaves with notice and returns after 20 s",
    "driver": "the process that coordinates is killed",
}

INTRODUCTION = """# Head to head

torchrun, Ray Train, torchft and spark_elastic train the same net on the same rows, with the same optimizer and the same
global batch, while real signals hit real processes of each.
`python -m benchmarks.head_to_head --repeat 3 --json benchmarks/results/head_to_head.json`
makes the numbers, and `--page` the page.

"""

COLUMNS = """
## What the columns mean

`benchmarks/parts/history.py` computes all columns but the last from a ledger of every worker's rows and steps.

- **time**: seconds from the first step to the last one, without start-up.
- **goodput**: rows that are due and in the final weights, per second of that time, divided by the same of the peer's
  own undisturbed runs.
- **missing**, **twice**: a row is due once per epoch. How often rows are not in the final weights though due, and how
  often they are in them beyond that. Steps that were rolled back do not count here.
- **rolled back**: steps that were applied and taken again, because the job went back to a checkpoint.
- **stall**: the longest time after a fault in which no step was applied that is higher than all before it, so repeated
  steps count; the mean over faults. A host that leaves as planned, or comes, counts as a fault.
- **distance**: max|difference| / max|weight| between the final weights and those of the peer's own first undisturbed
  run.

Cells are medians over the runs, with the smallest and the largest beside them.

## How each is set up

The scripts are in `benchmarks/peers`; the peers' authors are welcome to correct them.

- What coordinates is our driver, torchrun's agent of host 0 with its worker, Ray's driver, torchft's lighthouse. It is
  started again as soon as it is dead, and so is each other process that ends by an error after it.
- All: two workers of one thread each on this machine, Gloo over the loopback interface or our engine, a table in
  memory, SGD with momentum, {batch} rows per step over all workers. A worker that is alone takes the whole step
  (torchft: half of it).
- **spark_elastic**: `ElasticDataLoader`, `DistributedOptimizer` and a commit per step under `spark-elastic-run` with a
  discovery script, a run's name, a store and `--restarts`, default settings, without Spark. **bitwise** is the same
  loop with `determinism="bitwise"` and a virtual share per host: the final weights have the same bits after any faults.
- **torchrun**: an agent per host, `--nnodes=1:2`, c10d rendezvous on host 0, default timeouts; a checkpoint every
  {checkpoint_steps} steps, and a restart continues at the checkpoint's row. `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`,
  since without it restarted workers dial addresses of the world before.
- **Ray Train**: a node per host, `num_workers=(1, 2)`, `max_failures=-1`, a reported checkpoint every
  {checkpoint_steps} steps. `elastic_resize_monitor_interval_s` is 5: its default, 60, is longer than a run.
- **torchft**: a replica group per worker, options and timeouts from its README and its example `train_ddp.py`. A
  replica that is away leaves its share of a step out, as documented; the column *missing* shows it.

{versions}

Machine: {machine}. Steps of a run: {steps}. Runs of each peer under each plan: {runs_of_each}.
"""


def write_page(record: dict[str, Any], docs: Path) -> None:
    """Write docs/head-to-head.md, and its plots into docs/images."""
    note = textwrap.fill(f"**{record['note']}**", 120) + "\n\n" if record["note"] else ""
    text = INTRODUCTION + note + "\n".join(make_tables(record)) + "\n"
    versions = [f"- {PEERS[name][0]}: {', '.join(pins)}" for name, pins in record["versions"].items()]
    fewest = min(len(select(record, run["peer"], run["plan"])) for run in record["runs"])
    text += COLUMNS.format(**{**record, "versions": "\n".join(versions), "runs_of_each": fewest})
    (docs / "head-to-head.md").write_text(text)
    plot_goodput(record, docs / "images" / "head-to-head-goodput.svg")
    plot_progress(record, docs / "images" / "head-to-head-progress.svg")


def select(record: dict[str, Any], peer: str, plan: str) -> list[dict[str, Any]]:
    return [run for run in record["runs"] if (run["peer"], run["plan"]) == (peer, plan)]


def rate(run: dict[str, Any]) -> float:
    """Due rows that are in the final weights, per second."""
    return float((run["due"] - run["missing"]) / run["seconds"])


def goodputs(record: dict[str, Any], peer: str, plan: str) -> list[float]:
    undisturbed = select(record, peer, "none")
    if not undisturbed:
        return []
    base = statistics.median(rate(run) for run in undisturbed)
    return [rate(run) / run.get("base", base) for run in select(record, peer, plan)]


def make_tables(record: dict[str, Any]) -> list[str]:
    lines = [
        "![goodput by fault plan](images/head-to-head-goodput.svg)",
        "",
        "![progress while a worker is killed every 20 s](images/head-to-head-progress.svg)",
        "",
    ]
    for plan, title in PLANS.items():
        if not any(run["plan"] == plan for run in record["runs"]):
            continue
        lines += [f"## {title[0].upper()}{title[1:]}", ""]
        heads = ["peer", "start-up, s" if plan == "none" else "faults", "time, s", "goodput"]
        heads += ["missing", "twice", "rolled back", "stall, s", "distance"]
        lines += [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        lines += [make_row(record, peer, plan) for peer in PEERS if select(record, peer, plan)]
        unfinished = [run for run in record["runs"] if run["plan"] == plan and not run["finished"]]
        for run in unfinished:
            steps = f"{run['steps']} of {record['steps']} steps"
            name = f"{PEERS[run['peer']][0]}, run {run['repeat'] + 1}"
            lines += ["", f"{name}: did not finish; it reached {steps}."]
        lines.append("")
    return lines


def make_row(record: dict[str, Any], peer: str, plan: str) -> str:
    runs = select(record, peer, plan)
    stalls = [statistics.mean(run["stalls"]) for run in runs if run["stalls"]]
    first = [run["startup"] for run in runs] if plan == "none" else [len(run["faults"]) for run in runs]
    cells = [
        spread(first, ".1f" if plan == "none" else "d"),
        spread([run["seconds"] for run in runs], ".1f"),
        spread(goodputs(record, peer, plan), ".3f"),
        *(spread([run[name] for run in runs], ",d") for name in ("missing", "doubled", "rolled_back")),
        spread(stalls, ".2f"),
        spread([run["distance"] for run in runs if run["distance"] is not None], ".1e"),
    ]
    return f"| {PEERS[peer][0]} | {' | '.join(cells)} |"


def spread(values: list[Any], form: str) -> str:
    """The median, and the smallest and largest value if they read differently."""
    if not values:
        return "–"
    middle = statistics.median_low(values)
    low, high = (format(value, form) for value in (min(values), max(values)))
    return format(middle, form) + ("" if low == high else f" ({low}–{high})")


def plot_goodput(record: dict[str, Any], path: Path) -> None:
    figure, axes = _new_figure()
    plans = [plan for plan in PLANS if plan != "none" and any(r["plan"] == plan for r in record["runs"])]
    width = 0.8 / len(PEERS)
    for index, (peer, (label, color)) in enumerate(PEERS.items()):
        points = [goodputs(record, peer, plan) for plan in plans]
        heights = [statistics.median(values) if values else 0.0 for values in points]
        at = [position + (index - (len(PEERS) - 1) / 2) * width for position in range(len(plans))]
        axes.bar(at, heights, width * 0.9, label=label, color=color)
        for x, values in zip(at, points, strict=True):
            axes.plot([x] * len(values), values, "k.", markersize=3)
    axes.axhline(1.0, color="#888888", linewidth=0.8)
    axes.set_xticks(range(len(plans)), [PLANS[plan].replace(" and ", "\nand ") for plan in plans], fontsize=7)
    axes.set_ylabel("rows/s over own undisturbed")
    axes.legend(fontsize=7, ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    _save(figure, path)


def plot_progress(record: dict[str, Any], path: Path) -> None:
    figure, axes = _new_figure()
    for peer, (label, color) in PEERS.items():
        for run in select(record, peer, "kill")[:1]:
            axes.plot(range(len(run["curve"])), run["curve"], label=label, color=color, linewidth=1.4)
            reached = [run["curve"][min(len(run["curve"]) - 1, int(at))] for at in run["faults"]]
            axes.plot(run["faults"], reached, "x", color=color, markersize=5)
    axes.set_xlabel("seconds after the first step; x: a worker is killed")
    axes.set_ylabel("rows in the final weights")
    axes.yaxis.set_major_formatter("{x:.0%}")
    if axes.lines:
        axes.legend(fontsize=7)
    _save(figure, path)


def _new_figure() -> tuple[Any, Any]:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "head to head"  # the same plot is the same file
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None})
