"""The page docs/head-to-head.md and its two plots, made from the record of benchmarks/head_to_head.py alone.

`docs/generate.py` runs it as a file.
"""

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
    "often": "a worker is killed every 10 s",
    "return": "a host is killed and returns after 10 s",
    "stop": "a worker is stopped for 20 s",
    "silence": "all processes of a host are stopped for 20 s",
    "scale": "a host leaves with notice and returns after 20 s",
    "driver": "the process that coordinates is killed",
}

BEGIN, END = "<!-- made from the record -->", "<!-- the end of what is made from the record -->"


def write_page(record: dict[str, Any], docs: Path) -> None:
    """Write the tables of docs/head-to-head.md between their marks, and its plots into docs/images."""
    page = docs / "head-to-head.md"
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(before + make_part(record) + rest.partition(END)[2])
    plot_goodput(record, docs / "images" / "head-to-head-goodput.svg")
    plot_progress(record, docs / "images" / "head-to-head-progress.svg")


def make_part(record: dict[str, Any]) -> str:
    """The part of the page that the record makes, with its marks."""
    note = [textwrap.fill(f"**{record['note']}**", 120), ""] if record["note"] else []
    versions = [f"- {PEERS[name][0]}: {', '.join(pins)}" for name, pins in record["versions"].items()]
    fewest = min(len(select(record, run["peer"], run["plan"])) for run in record["runs"])
    what = f"Machine: {record['machine']}. Steps of a run: {record['steps']}, of {record['batch']} rows."
    often = f"Steps between checkpoints: {record['checkpoint_steps']}. Runs of each peer under each plan: {fewest}."
    ran = ["## What ran", "", *versions, "", what, often]
    return "\n".join([BEGIN, "", *note, *make_tables(record), *ran, "", END])


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
