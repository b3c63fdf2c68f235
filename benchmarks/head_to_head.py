"""torchrun, Ray Train, torchft and spark_elastic train the same net on the same rows under the same faults.

Two workers of one thread each; the scripts are in benchmarks/peers, what they are started with in
benchmarks/parts/launchers.py, and the definitions of what is reported in benchmarks/parts/history.py. A peer's own
environment is made in build/peers at the first run; ledgers, weights and the peers' logs stay in build/head_to_head.
The record has a form of its own, from which `python docs/generate.py` makes docs/head-to-head.md and its plots.

Faults are real signals, their times count from the job's first step: SIGKILL to a worker every 20 s, or every 10 s;
SIGKILL to a host with all of its processes, which is there again 10 s later; SIGSTOP to a worker for 20 s; a host that
leaves with notice and comes back after 20 s; SIGKILL to the process that coordinates, which is started again at once.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

import spark_elastic
from benchmarks.parts.budget import within_budget
from benchmarks.parts.head_page import rate
from benchmarks.parts.history import Task, judge, read_lines
from benchmarks.parts.launchers import HOSTS, LAUNCHERS, REQUIREMENTS, ROOT, Launcher, install
from benchmarks.parts.report import describe_record
from benchmarks.peers import job

FOLDER = ROOT / "build" / "head_to_head"
LIMIT = 300.0  # seconds that a run may take after its first step
START_LIMIT = 180.0  # seconds until its first step
SETTLE = 3.0  # seconds of rest between two runs


@dataclass(frozen=True)
class Event:
    """What happens to a host, and when."""

    at: float  # seconds after the first step
    what: str  # kill, kill_host, kill_driver, add_host, remove_host, stop, silence, continue
    host: int = 1


PLANS: dict[str, list[Event]] = {
    "none": [],
    "kill": [Event(10.0 + 20.0 * turn, "kill", (turn + 1) % HOSTS) for turn in range(15)],
    "often": [Event(5.0 + 10.0 * turn, "kill", (turn + 1) % HOSTS) for turn in range(30)],
    "return": [Event(10.0, "kill_host"), Event(20.0, "add_host")],
    "stop": [Event(10.0, "stop"), Event(30.0, "continue")],
    "silence": [Event(10.0, "silence"), Event(30.0, "continue")],
    "scale": [Event(10.0, "remove_host"), Event(30.0, "add_host")],
    "driver": [Event(10.0, "kill_driver")],
}
NO_FAULTS = {"continue"}  # what repairs what came before; an added host is a change that each job must take


class Run:
    """One job of one peer under one plan."""

    def __init__(self, launcher: Launcher, plan: str, steps: int) -> None:
        self._launcher = launcher
        self._plan = plan
        self._steps = steps
        self._ledger = launcher.folder / "ledger"
        self._ledger.mkdir(parents=True)
        self._stopped: list[psutil.Process] = []  # what has got SIGSTOP
        self.faults: list[float] = []  # wall times

    def measure(self) -> dict[str, Any]:
        started = time.time()
        try:
            self._launcher.start()
            self._await(lambda: bool(self._newest()), START_LIMIT)
            begun = min(line["at"] for line in read_lines(self._ledger) if line["kind"] == "applied")
            for event in PLANS[self._plan]:
                if self._await(
                    lambda due=begun + event.at: time.time() >= due or self._has_finished(), LIMIT
                ):
                    if self._has_finished():
                        break
                    self._cause(event)
            self._await(self._has_finished, begun + LIMIT - time.time())
            ended = time.time()
            self._await(self._launcher.has_ended, 5.0)
        finally:
            self._launcher.close()
        task = Task(self._steps * job.BATCH // job.EPOCHS, job.EPOCHS, HOSTS)
        measured = asdict(judge(read_lines(self._ledger), started, self.faults, task))
        finished = (self._launcher.folder / "weights.pt").exists()
        if not finished:
            measured["seconds"] = ended - begun
        return {**measured, "finished": finished, "faults": [fault - begun for fault in self.faults]}

    def _cause(self, event: Event) -> None:
        launcher = self._launcher
        if event.what in ("add_host", "remove_host"):
            getattr(launcher, event.what)(event.host)
        elif event.what == "kill_driver":
            launcher.kill_driver()
        elif event.what == "continue":
            for process in reversed(self._stopped):  # those who would end the others come last
                with suppress(psutil.NoSuchProcess):  # a peer may have replaced it
                    process.resume()
        else:
            if not self._await(lambda: len(self._members()) == HOSTS or self._has_finished(), 60.0):
                return  # the job has not come back to its full size: there is no world to hit
            if self._has_finished():
                return
            worker = launcher.find_worker(event.host, self._members())
            if event.what == "kill_host":
                launcher.kill_host(event.host, worker)
            elif event.what == "kill":
                os.kill(worker, signal.SIGKILL)
            else:
                self._stopped = [psutil.Process(worker)]
                if event.what == "silence":
                    root = launcher.find_host(event.host, worker)
                    self._stopped = [root, *root.children(recursive=True)]
                for process in self._stopped:
                    process.suspend()
        if event.what not in NO_FAULTS:
            self.faults.append(time.time())

    def _await(self, condition: Callable[[], bool], seconds: float) -> bool:
        deadline = time.time() + seconds
        while not condition():
            if time.time() > deadline:
                return False
            self._launcher.supervise()
            time.sleep(0.05)
        return True

    def _newest(self) -> dict[int, dict[str, Any]]:
        """Process id -> the last step that it applied, without the rows."""
        found = {}
        for path in self._ledger.glob("*.jsonl"):
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - 20_000))
                lines = [text for text in file.read().split(b"\n") if text.startswith(b'{"kind": "applied"')]
            complete = [text for text in lines if text.endswith(b"}")]
            if complete:
                found[int(path.stem)] = json.loads(complete[-1])
        return found

    def _members(self) -> list[int]:
        """Processes that took a step a moment ago."""
        now = time.time()
        return sorted(
            pid for pid, line in self._newest().items() if now - line["at"] < 2.0 and psutil.pid_exists(pid)
        )

    def _has_finished(self) -> bool:
        return (self._launcher.folder / "weights.pt").exists() or self._launcher.has_ended()


def measure_distance(folder: Path, reference: Path) -> float | None:
    """max|difference| / max|weight| to the peer's own undisturbed run of as many steps; None without such a run."""
    if (folder / "table.pt").resolve() != (reference / "table.pt").resolve():
        return None
    if not (folder / "weights.pt").exists() or not (reference / "weights.pt").exists():
        return None
    ours, theirs = torch.load(folder / "weights.pt"), torch.load(reference / "weights.pt")
    largest = max(float(value.abs().max()) for value in theirs.values())
    return max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) / largest


def run(peer: str, plan: str, repeat: int, steps: int) -> dict[str, Any]:
    time.sleep(SETTLE)
    folder = FOLDER / f"{peer}-{plan}-{repeat}"
    if folder.exists():
        folder.rename(FOLDER / f"{folder.name}.{int(time.time())}")
    folder.mkdir(parents=True)
    table = FOLDER / f"table-{steps}.pt"
    job.write_table(table, steps)
    (folder / "table.pt").symlink_to(table)
    load = os.getloadavg()[0]  # of other programs, about: this one has rested
    measured = {**Run(LAUNCHERS[peer](folder), plan, steps).measure(), "load": load}
    reference = FOLDER / f"{peer}-none-0"
    measured["distance"] = None if folder == reference else measure_distance(folder, reference)
    return {"peer": peer, "plan": plan, "repeat": repeat, **measured}


@dataclass(frozen=True)
class Measured:
    """What is run, one after the other, as the record is written."""

    steps: int
    note: str
    runs: Iterator[dict[str, Any]]


def measure(
    repeat: int = 1,
    steps: int = 640,
    peers: tuple[str, ...] = tuple(LAUNCHERS),
    plans: tuple[str, ...] = tuple(PLANS),
    note: str = "",
) -> Measured:
    """repeat: runs of each peer under each plan. note: a sentence for the page, such as what else the machine did."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # closes the job
    for peer in peers:
        install(peer)
    cases = itertools.product(range(repeat), plans, peers)
    return Measured(
        steps, note, (run(peer, plan, number, steps) for number, plan, peer in within_budget(cases, "run"))
    )


def finish(name: str, measured: Measured, path: Path | None, keeps: bool = False) -> None:
    """Print each run and write it into the record. keeps: the record's runs that are not run again."""
    before = json.loads(path.read_text()) if keeps and path is not None and path.exists() else None
    kept = before["runs"] if before is not None and before["steps"] == measured.steps else []
    runs: list[dict[str, Any]] = []
    for one in measured.runs:
        print({what: value for what, value in one.items() if what != "curve"}, flush=True)
        runs.append(one)
        if path is not None:
            record = make_record(name, runs, kept, measured)
            path.write_text(json.dumps(record, indent=1) + "\n")


def make_record(
    name: str, runs: list[dict[str, Any]], kept: list[dict[str, Any]], measured: Measured
) -> dict[str, Any]:
    """The runs, and those of `kept` that were not run again. Runs are compared with undisturbed ones of the same call,
    if there are any: machines differ."""
    for each in runs:
        bases = [rate(other) for other in runs if (other["peer"], other["plan"]) == (each["peer"], "none")]
        each |= {"base": statistics.median(bases)} if bases else {}
    all_runs = {(run["peer"], run["plan"], run["repeat"]): run for run in [*kept, *runs]}
    pinned_torch = f"torch=={torch.__version__.partition('+')[0]}"
    return {
        **describe_record(name),
        "versions": {
            "spark_elastic": [f"spark_elastic=={spark_elastic.__version__}", pinned_torch],
            "torchrun": [pinned_torch],
            **{peer: list(pinned) for peer, pinned in REQUIREMENTS.items() if peer in LAUNCHERS},
        },
        "note": measured.note,
        "steps": measured.steps,
        "batch": job.BATCH,
        "checkpoint_steps": job.CHECKPOINT_STEPS,
        "runs": [all_runs[key] for key in sorted(all_runs)],
    }
