"""A job that another driver resumes, and the check of its ledger: each row was trained exactly once."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from spark_elastic.data.manifest import Manifest
from spark_elastic.data.store import Store
from tests.component.torch.job import PACE, Job, check_every_row_once
from tests.component.torch.nets import mlp, sgd


def make_job() -> Job:
    return Job(mlp(PACE), sgd, torch.nn.CrossEntropyLoss(), checkpoint_steps=3)


DRIVER = """
import sys
from pathlib import Path
from spark_elastic.runs.owned_run import OwnedRun
from tests.component.torch.job import RUN, Follower, launcher, train_elastic
from tests.component.torch.resumed_job import make_job, read_data

folder = Path(sys.argv[1])
store, manifest = read_data(folder)
train_elastic(
    make_job(), store, manifest, str(folder / "ledger"), Follower(),
    lambda task: launcher(task, room=3), run=OwnedRun.acquire(store, RUN),
)
"""


def read_data(folder: Path) -> tuple[Store, Manifest]:
    """What `make_data` made."""
    store = Store.open(str(folder))
    return store, Manifest.load(store, "manifest.json")


def count_repeated_steps(folder: Path) -> int:
    """How many steps more than one driver's workers have applied."""
    lines = (json.loads(line) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines())
    taken = {(each["epoch"], each["step"], each["attempt"]) for each in lines if each["event"] == "applied"}
    return len(taken) - len({step[:2] for step in taken})


def check_every_row_once_by_attempt(folder: Path, epochs: int) -> None:
    """What the later driver did stands: generations, which begin anew with each driver, are made to grow."""
    lines = [
        json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()
    ]
    for line in lines:
        line["generation"] += 1_000_000 * line["attempt"]
    merged = folder / "merged"
    merged.mkdir()
    merged.joinpath("all.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    check_every_row_once(merged, epochs)
