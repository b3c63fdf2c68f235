"""What do a commit and a hand-over of a LoRA job cost, by the size of the frozen base?

The base is a table in 16 parts, beside a LoRA of 64 kB, so that a step costs the same whatever its size. Commit: the
training thread's median pause for one, copies included, beside a deepcopy of the state dicts. Hand-over: two workers,
of which one is killed in each world of both; from the survivor's last step before its replacement joins to the first
one with it, without a median step. `loop`: a plain loop by DistributedOptimizer; `trainer`: transformers' Trainer.
"""

from __future__ import annotations

import copy
import itertools
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.parts.budget import within_budget
from benchmarks.parts.loop_recovery import note_step, play, train_until_stopped
from benchmarks.parts.report import Row

WIDTH, RANK, PARTS, BATCH = 256, 32, 16, 32


def build(megabytes: int) -> Any:
    """A table that is frozen, and a LoRA on what is looked up in it."""
    import torch

    class Adapted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            rows = (megabytes << 20) // (4 * WIDTH * PARTS)
            self.base = torch.nn.ParameterList(
                torch.nn.Parameter(torch.full((rows, WIDTH), 0.1 * part), requires_grad=False)
                for part in range(PARTS)
            )
            self.down, self.up = torch.nn.Linear(WIDTH, RANK), torch.nn.Linear(RANK, WIDTH)

        def forward(self, row: Any) -> Any:
            looked_up = sum(part[row % len(part)] for part in self.base)
            return {"loss": (looked_up + self.up(self.down(looked_up))).square().mean()}

    torch.set_num_threads(1)
    torch.manual_seed(1)
    return Adapted()


def train_loop(folder: str, megabytes: int) -> None:
    """Steps until the file `stop` appears."""
    import torch

    import spark_elastic.torch as hvd

    model = build(megabytes)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = torch.optim.SGD([p for _, p in trained], lr=1e-3, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=trained)

    def compute_loss() -> torch.Tensor:
        time.sleep(0.02)
        loss: torch.Tensor = model(torch.arange(BATCH))["loss"]
        return loss

    train_until_stopped(folder, model, optimizer, lambda: compute_loss)


def train_trainer(folder: str, megabytes: int) -> None:
    """Steps until the file `stop` appears."""
    import torch
    import transformers

    from spark_elastic.torch.huggingface import ElasticTrainer

    class Watch(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            self.begin = time.monotonic()
            time.sleep(0.02)

        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            note_step(folder, self.begin)
            stop = torch.tensor(float(Path(folder, "stop").exists()))
            if torch.distributed.is_initialized():
                torch.distributed.all_reduce(stop, torch.distributed.ReduceOp.MAX)
            control.should_training_stop = bool(stop)

    options = {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True}
    args = transformers.TrainingArguments(folder, max_steps=100_000, logging_strategy="no", **options)
    rows = [{"row": torch.tensor(row)} for row in range(1 << 14)]
    ElasticTrainer(
        build(megabytes), args, train_dataset=rows, callbacks=[Watch()], global_batch_size=BATCH
    ).train()


def measure_commit(megabytes: int, rounds: int) -> list[Row]:
    import torch

    from spark_elastic.torch.elastic import TorchState

    model = build(megabytes)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3, momentum=0.9)
    state = TorchState(model, optimizer)
    ours, theirs = [], []
    for _ in range(rounds):
        optimizer.zero_grad()
        model(torch.arange(BATCH))["loss"].backward()
        optimizer.step()
        begin = time.perf_counter()
        state.commit()
        state._snapshots.wait()
        ours.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        copy.deepcopy([model.state_dict(), optimizer.state_dict()])
        theirs.append(time.perf_counter() - begin)
    snapshot = state._snapshots.wait_for_newest()
    assert snapshot is not None
    case = f"{megabytes} MB frozen: commit"
    return [
        Row(case, 1e3 * statistics.median(ours), 1e3 * statistics.median(theirs), "ms"),
        Row(f"{case}, memory", snapshot.memory.nbytes / 2**20, megabytes, "MB"),
    ]


def measure_hand_over(megabytes: int, what: str, kills: int) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="frozen-") as folder:
        trial = play(Path(folder), 2, kills, PROGRAMS[what], megabytes)
        lines = trial.lines()
    step = statistics.median(line["took"] for line in lines if line["world"] == 2)
    gaps = []
    for pid in {line["pid"] for line in lines}:
        pairs = itertools.pairwise(line for line in lines if line["pid"] == pid)
        gaps += [new["wall"] - old["wall"] for old, new in pairs if (old["world"], new["world"]) == (1, 2)]
    case = f"{megabytes} MB frozen, {what}: hand-over beyond a step"
    beyond = [1e3 * (gap - step) for gap in gaps]
    return [
        Row(f"{case}, p50 of {len(gaps)}", statistics.median(beyond), 1e3 * step, "ms"),
        Row(f"{case}, longest", max(beyond), None, "ms"),
    ]


PROGRAMS = {"loop": train_loop, "trainer": train_trainer}


def measure(
    megabytes: tuple[int, ...] = (16, 128, 1024),
    what: tuple[str, ...] = ("commit", "loop", "trainer"),
    kills: int = 6,
    rounds: int = 20,
) -> list[Row]:
    os.environ["OMP_NUM_THREADS"] = "1"
    rows: list[Row] = []
    for each in within_budget(what, "what:"):
        for size in within_budget(megabytes, f"{each}, MB:"):
            rows += measure_commit(size, rounds) if each == "commit" else measure_hand_over(size, each, kills)
    return rows
