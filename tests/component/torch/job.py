"""A small training job on plain processes, and the plain one-process loop that it must agree with."""

from __future__ import annotations

import copy
import io
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from spark_elastic.clock import SystemClock
from spark_elastic.config import ElasticConfig
from spark_elastic.data.manifest import Column, Manifest
from spark_elastic.data.plan import DataPlan
from spark_elastic.data.reading.decoding import read_footers
from spark_elastic.data.store import Store
from spark_elastic.data.transformation import RowRandom
from spark_elastic.driver.discovery import CombinedDiscovery
from spark_elastic.driver.job import DriverOptions, LaunchResult, supervise
from spark_elastic.driver.ports import Discovery, Post
from spark_elastic.monitoring.listener import JobListener
from spark_elastic.protocol.types import Limits, Phase, SlotSpec
from spark_elastic.runs.checkpoint import CheckpointPolicy, OwnedRun
from spark_elastic.testing.fakes import ProcessLauncher
from spark_elastic.torch import draw_rows, progress
from spark_elastic.training.spec import Rows, TrainSpec
from spark_elastic.training.torch.spec import TorchUserObjects
from spark_elastic.training.torch.trainer import TorchTrainProgram
from tests.component.injected_faults import await_fault
from tests.component.warm_slots import WarmLauncher
from tests.fit_configs import make_config
from tests.journals import keep_journal
from tests.planned_rows import list_row_ids

Data = tuple[Store, Manifest]
ROWS, WIDTH, CLASSES = 600, 36, 3
PACE = 0.04  # seconds
RUN = "run"
SEED = 3


class SlowNet(torch.nn.Module):
    """A net whose forward takes its time in a worker, so that a quick machine, too, is met in mid-epoch, and awaits the
    faults that a test has planned. pace: seconds."""

    def __init__(self, net: torch.nn.Module, pace: float = PACE) -> None:
        super().__init__()
        self.net, self.pace = net, pace

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        here = progress()
        if here is not None:
            time.sleep(self.pace)
            await_fault(here.epoch, here.step, validates=not self.training)
        output: torch.Tensor = self.net(*inputs)
        return output


@dataclass
class Follower(JobListener):
    """A listener that lets a test wait for progress."""

    on_step: Callable[[int, int], None] = lambda epoch, step: None
    worlds: list[int] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    formed: threading.Condition = field(default_factory=threading.Condition)

    def on_output(self, worker: str, rank: int | None, line: str) -> None:
        self.lines.append(line)

    def on_progress(self, metrics: Mapping[str, Any]) -> None:
        self.on_step(metrics["epoch"], metrics["step"])

    def on_world(self, size: int, reason: str) -> None:
        with self.formed:
            self.worlds.append(size)
            self.formed.notify_all()


def make_data(folder: Path, weight: float = 1.0) -> Data:
    """A table of ROWS rows: id, features, class, weight; in row groups of 50. weight: a factor of the weights."""
    rng = np.random.default_rng(7)
    features = rng.normal(size=(ROWS, WIDTH))
    table = pa.table(
        {
            "id": pa.array(np.arange(ROWS)),
            "x": pa.FixedSizeListArray.from_arrays(pa.array(features.ravel()), WIDTH),
            "y": pa.array((features[:, :CLASSES] + rng.normal(size=(ROWS, CLASSES))).argmax(1)),
            "w": pa.array(weight * rng.uniform(0.5, 2.0, size=ROWS)),
        }
    )
    (folder / "rows").mkdir()
    pq.write_table(table, folder / "rows" / "part.parquet", row_group_size=50)
    store = Store.open(str(folder))
    files, groups = read_footers(store, ["rows/part.parquet"])
    kinds = {"id": "int64", "x": "float64", "y": "int64", "w": "float64"}
    columns = tuple(Column(name, kind, (WIDTH,) if name == "x" else ()) for name, kind in kinds.items())
    manifest = Manifest(columns, files, groups, "made for a test", "made for a test")
    manifest.save(store, "manifest.json")
    return store, manifest


@dataclass(frozen=True)
class Job:
    """What is trained; everything float64."""

    model: torch.nn.Module
    optimizer: Callable[[Any], torch.optim.Optimizer]
    loss: Any
    shape: tuple[int, ...] = (WIDTH,)
    weight: str | None = None
    gradient_clip_norm: float | None = None
    epochs: int = 2
    batch_size: int = 8
    workers: int = 3
    global_batch: int | None = None  # rows of a step; None: as many as all workers' batches
    checkpoint_steps: int | None = None
    reader: str = "arrow"
    shares: int = 0  # virtual shares, in bitwise mode
    transformation: Callable[..., Any] | None = None
    transformation_workers: int = 0
    transformation_pool: str = "process"
    verify_steps: int | None = None
    balance_rows: bool = False
    loss_scope: str | None = None
    data: Store | None = None  # where the rows are; None: in the store of the run

    def plan(self, manifest: Manifest) -> DataPlan:
        batch = self.global_batch or self.batch_size * self.workers
        lanes = self.shares or self.workers
        plan = DataPlan.for_run(manifest.group_rows, batch, 5, lanes, 10_000, 1 << 20)
        return replace(plan, shares=self.shares)

    def features(self, manifest: Manifest) -> tuple[Column, ...]:
        return (Column("x", "float64", self.shape),)

    def objects(self) -> TorchUserObjects:
        model = copy.deepcopy(self.model)
        return TorchUserObjects(model, self.optimizer, (self.loss,), transformation=self.transformation)

    def task(self, store: Store, manifest: Manifest, ledger: str | None = None) -> TorchTrainProgram:
        features = self.features(manifest)
        spec = TrainSpec(
            config=make_config(
                feature_cols=tuple(column.name for column in features),
                label_cols=("y",),
                sample_weight_col=self.weight,
                batch_size=self.batch_size,
                epochs=self.epochs,
                seed=SEED,
                gradient_clip_norm=self.gradient_clip_norm,
                reader=self.reader,
                determinism="bitwise" if self.shares else None,
                virtual_shares=self.shares or 8,
                num_workers=self.shares or 1,  # a step has rows for each share
                transformation_workers=self.transformation_workers,
                transformation_pool=self.transformation_pool,
                verify_steps=self.verify_steps,
                balance_rows=self.balance_rows,
                loss_scope=self.loss_scope,
            ),
            rows=Rows(self.data or store, manifest, self.plan(manifest)),
            store=store,
            result="final.pt",
            features=features,
            ledger=ledger,
            checkpoints=CheckpointPolicy(RUN, self.checkpoint_steps, None),
        )
        return TorchTrainProgram(spec, self.objects())


def train_elastic(
    job: Job,
    store: Store,
    manifest: Manifest,
    ledger: str | None,
    follower: Follower,
    launcher_for: Callable[[TorchTrainProgram], ProcessLauncher],
    discovery: Discovery | None = None,
    lease: float = 5.0,
    run: OwnedRun | None = None,
    keep_commits: bool = True,
) -> tuple[dict[str, torch.Tensor], LaunchResult]:
    """The final weights and what the launch returned."""
    config = ElasticConfig(keep_commits=keep_commits)
    launcher = launcher_for(job.task(store, manifest, ledger))
    batch = job.batch_size * job.workers
    limits = Limits(job.workers, 1, job.workers, gather_timeout=60.0, lease=lease, max_global_batch=batch)
    watch = discovery or CombinedDiscovery()
    with keep_journal(config) as (config, _):
        result = supervise(launcher, watch, DriverOptions(run=run), limits, config, "test", follower)
    digests = {json.loads(text)["digest"] for text in result.results}
    assert len(digests) == 1, "replicas differ (P4)"
    left = torch.load(io.BytesIO(store.read_bytes("final.pt")), weights_only=True)
    return {**left["parameters"], **left["buffers"]}, result


def train_and_check(
    job: Job, data: Data, folder: Path, launcher_for: Any, follower: Any = None, **options: Any
) -> LaunchResult:
    """P1, P2 and P4, whatever happens meanwhile. options: of `train_elastic`."""
    ledger = folder / "ledger"
    ours, result = train_elastic(job, *data, str(ledger), follower or Follower(), launcher_for, **options)
    assert difference(ours, train_plain(job, *data)) < 1e-9
    check_every_row_once(ledger, job.epochs)
    return result


class DeviceLauncher(WarmLauncher):
    """`WarmLauncher` whose workers train on a device, which all of them share."""

    def __init__(self, device: str, program: object, **options: Any) -> None:
        super().__init__(program, SystemClock(), **options)
        self._device = device

    def start(self, spec: SlotSpec, post: Post) -> None:
        super().start(replace(spec, device=self._device, slots_per_gpu=8), post)


class LauncherFactory:
    """Makes the launcher of a training, and keeps it for what a test does to it."""

    made: ProcessLauncher

    def __init__(self, room: int = 3, spares: bool = False, device: str = "cpu", *modules: str) -> None:
        """spares: whether slots start warm spares, at once. Tests that kill whole slots need none.
        modules: that workers import, beside torch."""
        self._device = device
        preload = ("torch", *modules, *["tests.pretend_device"] * (device == "pretend"))
        self._options: Any = {"preload": preload, "room": room, "spare_after": 0.0 if spares else 3600.0}

    def __call__(self, task: TorchTrainProgram) -> ProcessLauncher:
        self.made = DeviceLauncher(self._device, task, **self._options)
        return self.made


def check_every_row_once(folder: Path, epochs: int) -> None:
    seen = ledger_of(folder)
    assert set(seen) == {(epoch, row) for epoch in range(epochs) for row in range(ROWS)}
    assert set(seen.values()) == {1}


def train_plain(
    job: Job, store: Store, manifest: Manifest, most: int | None = None
) -> dict[str, torch.Tensor]:
    """One process, one batch a step, nothing of ours but the plan; `most` steps where it is given."""
    table = pq.read_table(store.path("rows/part.parquet"))
    x = np.stack(table["x"].to_numpy()).reshape(-1, *job.shape)
    y = torch.tensor(table["y"].to_numpy().copy())
    weights = None if job.weight is None else torch.tensor(table[job.weight].to_numpy().copy())
    model = copy.deepcopy(job.model)
    model.train()
    optimizer = job.optimizer(model.parameters())
    plan = job.plan(manifest)
    for epoch, step in islice(product(range(job.epochs), range(plan.steps)), most):
        rows = torch.from_numpy(list_row_ids(plan, epoch, step))
        draw_rows(model, rows.numpy(), SEED, epoch, Phase.TRAIN, step)
        columns = {"x": x[rows.numpy()]}
        if job.transformation is not None:
            columns = job.transformation(columns, RowRandom(SEED, epoch, rows.numpy()))
        output = model(torch.from_numpy(columns["x"]))
        optimizer.zero_grad()
        if weights is None:
            loss = job.loss(output, y[rows])
        else:
            per_row = torch.nn.functional.cross_entropy(output, y[rows], reduction="none")
            loss = (per_row * weights[rows]).sum() / weights[rows].sum()
        loss.backward()
        if job.gradient_clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), job.gradient_clip_norm)
        optimizer.step()
    return model.state_dict()


def difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """R9's metric: the largest over all tensors of max|difference| / max|weight|."""
    assert ours.keys() == theirs.keys()
    return max(float((ours[n] - theirs[n]).abs().max() / theirs[n].abs().max()) for n in ours)


def ledger_of(folder: Path) -> Counter[tuple[int, int]]:
    """How often each row was trained in each epoch, by the history of the final weights: (epoch, row) -> times."""
    lines = [json.loads(line) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    final: dict[tuple[int, int], int] = {}
    for line in lines:
        if line["event"] == "applied":
            step = (line["epoch"], line["step"])
            final[step] = max(final.get(step, 0), line["generation"])
    seen: Counter[tuple[int, int]] = Counter()
    for line in lines:
        if line["event"] == "contributes" and final.get((line["epoch"], line["step"])) == line["generation"]:
            seen.update((line["epoch"], row) for row in line["rows"])
    return seen


def add_pace(*layers: torch.nn.Module, pace: float = 0.01) -> torch.nn.Module:
    return SlowNet(torch.nn.Sequential(*layers), pace).double()


def mlp(pace: float = 0.01) -> torch.nn.Module:
    torch.manual_seed(1)
    return add_pace(torch.nn.Linear(WIDTH, 40), torch.nn.Tanh(), torch.nn.Linear(40, CLASSES), pace=pace)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def make_job() -> Job:
    return Job(mlp(PACE), sgd, torch.nn.CrossEntropyLoss(), checkpoint_steps=3)


DRIVER = """
import sys
from pathlib import Path
from spark_elastic.runs.checkpoint import OwnedRun
from tests.component.torch.job import RUN, Follower, LauncherFactory, make_job, read_data, train_elastic

folder = Path(sys.argv[1])
store, manifest = read_data(folder)
train_elastic(
    make_job(), store, manifest, str(folder / "ledger"), Follower(),
    LauncherFactory(), run=OwnedRun.acquire(store, RUN),
)
"""


def read_data(folder: Path) -> Data:
    """What `make_data` made."""
    store = Store.open(str(folder))
    return store, Manifest.load(store, "manifest.json")


def measure_repeated_work(folder: Path) -> float:
    """Seconds from the first to the last but one of the steps that two drivers' workers have applied: the last one may
    have ended before it was kept."""
    texts = (path.read_text() for path in folder.glob("*.jsonl"))
    lines = [
        line for text in texts for line in map(json.loads, text.splitlines()) if line["event"] == "applied"
    ]
    first, again = ({(e["epoch"], e["step"]): e["wall"] for e in lines if e["attempt"] == a} for a in (1, 2))
    walls = sorted(first[step] for step in first.keys() & again.keys())[:-1]
    return walls[-1] - walls[0] if walls else 0.0


def check_every_row_once_by_attempt(folder: Path, epochs: int) -> None:
    """What the later driver did stands: generations, which begin anew with each driver, are made to grow."""
    texts = [path.read_text() for path in sorted(folder.glob("*.jsonl"))]
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    for line in lines:
        line["generation"] += 1_000_000 * line["attempt"]
    merged = folder / "merged"
    merged.mkdir()
    merged.joinpath("all.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    check_every_row_once(merged, epochs)
