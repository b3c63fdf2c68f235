"""How fast does the estimator's training run on a GPU, beside a plain loop of torch on the same device?

One worker, a world of one, whole epochs over the same rows in the same order; the two take turns, medians over the
rounds, after one that does not count. Plain: the rows in pinned memory, copied with non_blocking=True, zero_grad,
forward, backward, step; its loss stays on the device. Ours: rows from a Parquet file, step summary, ledger and all.
rows/s: more is better. Commit: what a copy of the state to the host takes of the training, beside a bare copy of each
tensor.

Recovery: from SIGKILL of a training process to the next applied step of the slowest survivor, as benchmarks/recovery.py
has it: three workers as plain processes, a step of 30 ms. `cuda`: all three on one GPU, through the host. `simnccl`: on
CPUs, where gradients travel by the simulated NCCL of tests/simulated_nccl.py, whose communicator takes 30 s, beside the
engine alone in the same run.
"""

from __future__ import annotations

import copy
import importlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.parts.budget import within_budget
from benchmarks.parts.ranks import compare_figures
from benchmarks.parts.report import Row
from benchmarks.parts.trial import Trial, kill_one
from benchmarks.recovery import BATCH, EPOCHS, ROWS, WORKERS, SlowNet, StopOnceQuick, recoveries
from elastic_collectives import Endpoint, Group, connect
from spark_elastic.config import ElasticConfig
from spark_elastic.data.manifest import Column
from spark_elastic.data.plan import DataPlan
from spark_elastic.data.store import Store
from spark_elastic.protocol.types import INITIAL_VERSION, Limits
from spark_elastic.runs.snapshot import build_snapshot
from spark_elastic.tables.existing_parquet import describe_parquet
from spark_elastic.training.spec import FitConfig, Rows, TrainSpec
from spark_elastic.training.torch.spec import TorchUserObjects
from spark_elastic.training.torch.trainer import TorchTrainProgram
from spark_elastic.worker.context import get_process_context
from tests import simulated_nccl
from tests.component.torch.job import DeviceLauncher

CLASSES, TOKENS, VOCABULARY = 10, 128, 1000


class Encoder(torch.nn.Module):
    """A transformer of 6 layers over 128 tokens, 19 M parameters."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, width)
        layer = torch.nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
        self.layers = torch.nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = torch.nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.layers(self.embed(x)).mean(1))
        return output


class ConvNet(torch.nn.Module):
    """Convolutions with BatchNorm over pictures of uint8, 2.8 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[torch.nn.Module] = []
        for before, after in ((3, 64), (64, 128), (128, 256), (256, 512)):
            layers += [
                torch.nn.Conv2d(before, after, 3, padding=1, stride=2 if before > 3 else 1),
                torch.nn.BatchNorm2d(after),
                torch.nn.ReLU(),
                torch.nn.Conv2d(after, after, 3, padding=1, groups=4),
                torch.nn.ReLU(),
            ]
        self.layers = torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
        self.head = torch.nn.Linear(512, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.head(self.layers(x.float() / 255))
        return output


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], torch.nn.Module]
    # (rows, ...)
    features: Callable[[int], npt.NDArray[Any]]
    batch: int
    steps: int
    precision: str | None = None
    compiles: bool = False


def draw_tokens(rows: int) -> npt.NDArray[Any]:
    return np.random.default_rng(0).integers(0, VOCABULARY, (rows, TOKENS), dtype=np.int32)


def draw_pictures(rows: int) -> npt.NDArray[Any]:
    return np.random.default_rng(0).integers(0, 256, (rows, 3, 64, 64), dtype=np.uint8)


def draw_numbers(rows: int) -> npt.NDArray[Any]:
    return np.random.default_rng(0).normal(size=(rows, 64)).astype(np.float32)


def build_small() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU(),
        torch.nn.Linear(512, CLASSES),
    )  # fmt: skip


def compile_too(case: Case) -> list[Case]:
    """The case, and the same with a compiled model."""
    return [case, replace(case, name=f"{case.name}, compiled", compiles=True)]


CASES = [
    *compile_too(
        Case("transformer of 19 M parameters, bf16, 128 rows", Encoder, draw_tokens, 128, 60, "bf16")
    ),
    Case("transformer of 19 M parameters, float32, 64 rows", Encoder, draw_tokens, 64, 60),
    Case("convolutions and BatchNorm, float32, 256 rows", ConvNet, draw_pictures, 256, 60),
    *compile_too(Case("three linear layers, float32, 1024 rows", build_small, draw_numbers, 1024, 200)),
    Case("three linear layers, float32, 8 rows", build_small, draw_numbers, 8, 400),
]


def write_rows(path: Path, x: npt.NDArray[Any], y: npt.NDArray[Any], group: int) -> None:
    """A Parquet file of row groups of `group` rows. x: (rows, ...)."""
    flat = x.reshape(len(x), -1)
    column = pa.FixedSizeListArray.from_arrays(pa.array(flat.ravel()), flat.shape[1])
    table = pa.table({"x": column, "y": y})
    pq.write_table(table, path, row_group_size=group, compression="none", use_dictionary=False)


def build_program(
    folder: Path,
    objects: TorchUserObjects,
    step_rows: int,
    workers: int,
    ledger: str | None = None,
    **config: Any,
) -> TorchTrainProgram:
    """Of the files in `folder`, as `write_rows` writes them. step_rows: of all workers together."""
    store = Store.open(str(folder))
    manifest = describe_parquet(store, ["x", "y"])
    most = manifest.max_decoded_group_bytes()
    plan = DataPlan.for_run(manifest.group_rows, step_rows, 3, workers, most, 1 << 30)
    shape = config.pop("shape", None)
    x = manifest.column("x")
    spec = TrainSpec(
        config=FitConfig.from_params({"feature_cols": ["x"], "label_cols": ["y"], **config}),
        rows=Rows(store, manifest, plan),
        features=(x if shape is None else Column("x", x.dtype, shape),),
        store=store,
        result=f"final-{os.getpid()}",
        ledger=ledger,
    )
    return TorchTrainProgram(spec, objects)


def build_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


class Ours:
    """The estimator's training, epoch by epoch, in this process."""

    def __init__(
        self, case: Case, model: torch.nn.Module, folder: Path, shape: tuple[int, ...], group: Group
    ) -> None:
        objects = TorchUserObjects(model, build_optimizer, (torch.nn.CrossEntropyLoss(),))
        config = {"epochs": 1000, "precision": case.precision, "compile_model": case.compiles, "shape": shape}
        self.program = build_program(folder, objects, case.batch, 1, batch_size=case.batch, **config)
        self.program.prepare()
        self._group = group
        world: Any = SimpleNamespace(version=INITIAL_VERSION, fence=(1, 1), source=0, resume=(), receivers=())
        self._world = world
        self._handle: Any = SimpleNamespace(
            membership_version=lambda: INITIAL_VERSION,
            report_position=lambda position: None,
            report_metrics=lambda numbers: None,
        )

    def run_epoch(self) -> float:
        """Seconds until the device has finished."""
        program: Any = self.program
        epoch = program._state.position.epoch
        program._spec.config.data.__dict__["epochs"] = epoch + 1
        program._finish = lambda group: ""
        begin = time.perf_counter()
        program.run(self._world, self._group, self._handle)
        synchronize()
        return time.perf_counter() - begin


class Plain:
    """What the same training is as a loop of one's own."""

    def __init__(
        self,
        case: Case,
        model: torch.nn.Module,
        x: npt.NDArray[Any],
        y: npt.NDArray[Any],
        device: torch.device,
    ) -> None:
        pins = device.type == "cuda"
        self._x, self._y = torch.from_numpy(x), torch.from_numpy(y)
        self._x, self._y = (each.pin_memory() if pins else each for each in (self._x, self._y))
        self._case, self._device = case, device
        self._model = model.to(device).train()
        if case.compiles:
            self._model.compile()
        self._optimizer = build_optimizer(self._model.parameters())

    def run_epoch(self) -> float:
        """Seconds until the device has finished."""
        case, loss_fn = self._case, torch.nn.CrossEntropyLoss()
        begin = time.perf_counter()
        for step in range(case.steps):
            rows = slice(step * case.batch, (step + 1) * case.batch)
            x = self._x[rows].to(self._device, non_blocking=True)
            y = self._y[rows].to(self._device, non_blocking=True)
            x = x if x.is_floating_point() else x.to(torch.int64)
            self._optimizer.zero_grad()
            with torch.autocast(self._device.type, torch.bfloat16, enabled=case.precision is not None):
                output = self._model(x)
            loss_fn(output.float(), y).backward()
            self._optimizer.step()
        synchronize()
        return time.perf_counter() - begin


def synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def measure_commit(ours: Ours) -> list[float]:
    """Milliseconds of a snapshot of the whole state, and of a bare copy of each tensor to memory of the host."""
    state: Any = ours.program._state

    def copy_twice() -> list[float]:
        synchronize()
        begin = time.perf_counter()
        build_snapshot(state.position, state.capture)
        middle = time.perf_counter()
        tensors = [*state.model.state_dict().values()]
        tensors += [t for each in state.optimizer.state.values() for t in each.values()]
        copies = [tensor.cpu() for tensor in tensors]
        end = time.perf_counter()
        del copies
        return [1e3 * (middle - begin), 1e3 * (end - middle)]

    return compare_figures({"both": copy_twice}, 7)["both"]


def measure_case(case: Case, rounds: int, device: torch.device) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder, Endpoint(b"a benchmark's key") as endpoint:
        rows = case.batch * case.steps
        x, y = case.features(rows), np.random.default_rng(1).integers(0, CLASSES, rows)
        write_rows(Path(folder, "0.parquet"), x, y, rows // 8)
        torch.manual_seed(0)
        model = case.build()
        with connect(endpoint, 0, 1, (1, 1), lambda blob: [blob], 60.0) as group:
            ours = Ours(case, copy.deepcopy(model), Path(folder), x.shape[1:], group)
            plain = Plain(case, model, x, y, device)
            epochs = {"ours": lambda: [ours.run_epoch()], "plain": lambda: [plain.run_epoch()]}
            seconds = compare_figures(epochs, rounds, warm_up=1)
            speeds = [rows / median for (median,) in seconds.values()]
            found = [Row(case.name, *speeds, "rows/s")]
            if device.type == "pretend":
                each = [1e3 * median / case.steps for (median,) in seconds.values()]
                found = [Row(f"{case.name}: the host's time of a step", *each, "ms")]
            if "float32, 64 rows" in case.name:
                commit = "commit of a transformer of 19 M parameters with AdamW"
                found.append(Row(commit, *measure_commit(ours), "ms"))
            ours.program.close()
    return found


# ---- recovery


def measure_recovery(device: str, backend: str, kills: int) -> tuple[float, float]:
    """Seconds to the next step of the slowest survivor: median and the worst. The step is part of it."""
    os.environ["SPARK_ELASTIC_BULK_BACKEND"] = backend
    os.environ[simulated_nccl.BUILD_SECONDS] = "30"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        rng, rows = np.random.default_rng(1), folder / "rows"
        rows.mkdir()
        x, y = rng.normal(size=(ROWS, 20)).astype(np.float32), rng.normal(size=ROWS)
        write_rows(rows / "0.parquet", x, y, ROWS)
        ledger, stop = folder / "ledger", str(folder / "ledger" / "stop")
        net, callbacks = SlowNet(stop), (StopOnceQuick(stop),)
        objects = TorchUserObjects(net, build_optimizer, (compute_loss,), callbacks=callbacks)
        config = {"batch_size": BATCH, "epochs": EPOCHS}
        program = build_program(rows, objects, BATCH * WORKERS, WORKERS, str(ledger), **config)
        modules = ("torch", "benchmarks.gpu", simulated_nccl.__name__)
        launcher = DeviceLauncher(device, program, preload=modules, room=WORKERS, spare_after=0.0)
        limits = Limits(WORKERS, 1, WORKERS, gather_timeout=60.0, max_global_batch=BATCH * WORKERS)
        trial = Trial(ledger, WORKERS, [kill_one] * kills)
        totals, _ = recoveries(trial.play(launcher, limits, ElasticConfig(failure_budget=kills + 10)))
    return statistics.median(totals), max(totals)


def compute_loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output[:, 0] - label) ** 2


def compare_recoveries(device: str = "simnccl", kills: int = 20) -> list[Row]:
    if device == "cuda":
        what, ours, engine = "3 workers on one GPU", measure_recovery("cuda", "auto", kills), (None, None)
        beside = ""
    else:
        what, beside = "a communicator takes 30 s", ", beside the engine alone"
        ours, engine = (measure_recovery("cpu", backend, kills) for backend in (simulated_nccl.NAME, "host"))
    return [
        Row(f"a worker killed, {what}: p50 to the next step{beside}", ours[0], engine[0]),
        Row(f"a worker killed, {what}: the longest of {kills}{beside}", ours[1], engine[1]),
    ]


def measure(rounds: int = 5, device: str = "cuda", cases: tuple[int, ...] = (0, 1, 2, 3, 4)) -> list[Row]:
    """cases: by number. device: "pretend" is the tests' own, without a GPU: what is measured is the host's time."""
    if device == "pretend":
        importlib.import_module("tests.pretend_device")
    get_process_context().device = device
    numbers = within_budget(cases, "case")
    rows = [row for number in numbers for row in measure_case(CASES[number], rounds, torch.device(device))]
    if device == "cuda":
        print(f"on {torch.cuda.get_device_name()}, torch {torch.__version__}")
    return rows
