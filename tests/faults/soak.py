"""Kill after kill on a real standalone cluster while an estimator trains; then judge weights and rows.

    python tests/faults/soak.py --case mlp --kills 20 --seed 1

Kills alternate between executor JVM, slot task and training child, at moments chosen by the phase that the victim is
in. The final weights are compared with an undisturbed run and with a plain one-process loop over the same plan; the
rows are judged by judge.py. Prints each kill and a verdict as JSON; exit status 0 when everything held.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1]), str(HERE.parents[1] / "python")]

import cloudpickle  # noqa: E402
import nets  # noqa: E402
import numpy as np  # noqa: E402
import phases  # noqa: E402
import psutil  # noqa: E402
import torch  # noqa: E402

from spark_elastic import ElasticTorchEstimator  # noqa: E402
from spark_elastic.data.manifest import Manifest  # noqa: E402
from spark_elastic.data.plan import DataPlan  # noqa: E402
from spark_elastic.data.reading.readers import open_reader  # noqa: E402
from spark_elastic.data.reading.row_group_cache import DEFAULT_CACHE_BYTES  # noqa: E402
from spark_elastic.data.store import Store  # noqa: E402
from spark_elastic.torch import draw_rows  # noqa: E402
from tests.component.torch.job import difference  # noqa: E402
from tests.faults.killer import is_alive  # noqa: E402
from tests.planned_rows import list_row_ids  # noqa: E402
from tests.spark.cluster import (  # noqa: E402
    StandaloneCluster,
    cluster_environment,
    find_executor,
    find_slot,
    start_session,
)
from tests.specification import check_journal  # noqa: E402

ROWS, BATCH, WORKERS, SEED = 720, 8, 3, 11
Fault = tuple[phases.ProcessPhase, psutil.Process, dict[str, Any]]
KINDS = ("executor", "slot task", "child")
WANTED = ("F", "X", "A", "rendezvous")
TOLERANCE = 1e-9


class Commands(logging.Handler):
    """When the driver ended and published worlds, by its own log."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.aborts: list[float] = []
        self.worlds: list[float] = []

    def emit(self, record: logging.LogRecord) -> None:
        command = type(record.args[0] if isinstance(record.args, tuple) else record.args).__name__
        if command == "AbortWorld":
            self.aborts.append(record.created)
        elif command == "PublishWorld":
            self.worlds.append(record.created)


class Killer(threading.Thread):
    """Kills `count` times, and further until each wanted phase was met `each` times, twice as often at most; then lets
    the job run at full speed."""

    def __init__(self, folder: str, count: int, each: int, seed: int, commands: Commands) -> None:
        super().__init__(name="killer", daemon=True)
        self._folder = folder
        self._count = count
        self._each = each
        self._random = random.Random(seed)
        self._commands = commands
        self.kills: list[dict[str, Any]] = []
        self.over = threading.Event()

    def run(self) -> None:
        try:
            while not self.over.is_set() and (wanted := self._choose_phase(len(self.kills))):
                self._kill_in_phase(len(self.kills), wanted)
        finally:
            os.remove(f"{self._folder}/slow")

    def _choose_phase(self, number: int) -> str | None:
        """The phase of the next fault; None: enough."""
        if number < self._count:
            return WANTED[number % len(WANTED)]
        met = Counter(kill["phase"] for kill in self.kills)
        lacking = [phase for phase in WANTED if met[phase] < self._each]
        return lacking[0] if lacking and number < 2 * self._count else None

    def _kill_in_phase(self, number: int, wanted: str) -> None:
        if wanted == "rendezvous":  # two in a row: the second while the first is being recovered from
            self._await_members(WORKERS)
            first = self._kill(number, "F")
            self._await(self._is_recovering, pause=0.0002)
            time.sleep(self._random.uniform(0.0, 0.01))
            second = self._kill(number + 1, None, spare=first)
            self._note(first)
            self._note(second)
        else:
            # Every third time the previous joiner is still on its way: two members are enough to strike.
            self._await_members(2 if number % 3 == 2 else WORKERS)
            time.sleep(self._random.uniform(0.1, 1.0))
            self._note(self._kill(number, wanted))

    def _kill(self, number: int, phase: str | None, spare: Fault | None = None) -> Fault | None:
        """Rank 0 every second time, else any; at the moment it enters `phase`. spare: who is dying already."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and not self.over.is_set():
            members = [m for m in self._members() if spare is None or m.pid != spare[0].pid]
            rank = 0 if number % 2 == 0 else self._random.randrange(1, WORKERS)
            victim = next((m for m in members if m.rank == rank), members[-1] if members else None)
            if victim is None:
                continue
            try:
                process = psutil.Process(victim.pid)
                kind = KINDS[number % len(KINDS)]
                slot = psutil.Process(find_slot(process))
                target = {"child": process, "slot task": slot}.get(kind) or find_executor(process)
            except (psutil.NoSuchProcess, StopIteration):
                continue
            if phase is None or self._await_phase(victim, phase):
                moment = time.time()
                os.kill(target.pid, signal.SIGKILL)
                world = len(members) + (spare is not None)
                return victim, process, {"kind": kind, "world": world, "wall": moment}
        return None

    def _await_phase(self, victim: phases.ProcessPhase, phase: str) -> bool:
        """Wait until it is in `phase`; False when its world ends before."""
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            now = phases.read_phase(f"{self._folder}/phases", victim.pid)
            if now is None or now.generation != victim.generation:
                return False
            if now.phase == phase:
                return True
            time.sleep(0.0002)
        return False

    def _note(self, fault: Fault | None) -> None:
        """Once the victim is gone: which phase did it die in?"""
        if fault is None:
            return
        victim, process, kill = fault
        psutil.wait_procs([process], timeout=10)
        left = phases.read_phase(f"{self._folder}/phases", victim.pid) or victim
        phase = "rendezvous" if self._is_in_rendezvous(kill["wall"]) else left.phase
        where = {"phase": phase, "rank": left.rank, "epoch": left.epoch, "step": left.step}
        kill |= {"number": len(self.kills), **where}
        self.kills.append(kill)
        say(kill)

    def _members(self) -> list[phases.ProcessPhase]:
        """Living processes of the newest generation."""
        alive = [s for s in phases.read_phases(f"{self._folder}/phases") if is_alive(s.pid)]
        newest = max((s.generation for s in alive), default=0)
        return [s for s in alive if s.generation == newest]

    def _is_recovering(self) -> bool:
        aborts, worlds = self._commands.aborts, self._commands.worlds
        return bool(aborts) and (not worlds or aborts[-1] > worlds[-1])

    def _is_in_rendezvous(self, moment: float) -> bool:
        """Between the end of a world and the first forward in a later one."""
        ended = max((t for t in self._commands.aborts if t <= moment), default=None)
        if ended is None:
            return False
        walls = [json.loads(line)["wall"] for line in self._last_records()]
        return not any(ended < wall < moment for wall in walls)

    def _last_records(self) -> list[str]:
        """The newest forward of every process."""
        files = Path(self._folder, "records").glob("*.jsonl")
        return [lines[-1] for file in files if (lines := file.read_text().splitlines())]

    def _await_members(self, count: int) -> None:
        self._await(lambda: len(self._members()) >= count, 60)

    def _await(self, condition: Callable[[], bool], seconds: float = 20, pause: float = 0.005) -> None:
        deadline = time.monotonic() + seconds
        while not condition() and time.monotonic() < deadline and not self.over.is_set():
            time.sleep(pause)


def say(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def fit(spark: Any, case: nets.Case, folder: str, run: str, epochs: int) -> tuple[torch.nn.Module, Any]:
    torch.manual_seed(1)
    model = nets.RecordingNet(case.net(), f"{folder}/{run}").double()
    for name in ("records", "phases"):
        Path(folder, run, name).mkdir(parents=True)
    objects = {"model": model, "optimizer": case.optimizer(), "loss": case.loss()}
    columns = {"feature_cols": ["id", "x"], "label_cols": "y", "sample_weight_col": case.weight}
    sizes = {"batch_size": BATCH, "epochs": epochs, "num_workers": WORKERS, "gradient_clip_norm": case.clip}
    records = {"store": f"{folder}/store", "run_id": run, "journal": f"{folder}/{run}/journal"}
    options = {"ledger": True, "seed": SEED, "keep_data": True, "verbose": 0}
    estimator = ElasticTorchEstimator(**objects, **columns, **sizes, **records, **options)
    fitted = estimator.fit(spark.read.parquet(f"{folder}/table"))
    return fitted.getModel(), fitted.summary


def train_plain(case: nets.Case, folder: str, epochs: int) -> dict[str, torch.Tensor]:
    """One process over the same plan; of ours it uses plan and reader alone."""
    store = Store.open(f"{folder}/store")
    name = next(Path(folder, "store").rglob("manifest.json")).relative_to(Path(folder, "store"))
    manifest = Manifest.load(store, str(name))
    with closing(open_reader("arrow", store, manifest)) as reader:
        groups = [reader.fetch(group) for group in range(len(manifest.row_groups))]
    table = {
        column.name: np.concatenate([each[column.name] for each in groups]) for column in manifest.columns
    }
    x, y = torch.tensor(table["x"]), torch.tensor(table["y"])
    w = torch.tensor(table["w"]) if case.weight else torch.ones(len(y))
    most = manifest.max_decoded_group_bytes()
    plan = DataPlan.for_run(manifest.group_rows, BATCH * WORKERS, SEED, WORKERS, most, DEFAULT_CACHE_BYTES)
    torch.manual_seed(1)
    model = nets.RecordingNet(case.net(), folder).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=case.lr, momentum=0.9)
    for epoch in range(epochs):
        for step in range(plan.steps):
            rows = torch.from_numpy(list_row_ids(plan, epoch, step))
            optimizer.zero_grad()
            draw_rows(model, rows.numpy(), SEED, epoch, 0, step)
            each = torch.nn.functional.cross_entropy(model.net(x[rows]), y[rows], reduction="none")
            ((each * w[rows]).sum() / w[rows].sum()).backward()
            if case.clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
            optimizer.step()
    return model.state_dict()


def make_table(spark: Any, folder: str) -> None:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(ROWS, nets.WIDTH))
    y = (x[:, : nets.CLASSES] + rng.normal(size=(ROWS, nets.CLASSES))).argmax(1)
    rows = [(i, x[i].tolist(), int(y[i]), float(rng.uniform(0.5, 2))) for i in range(ROWS)]
    made = spark.createDataFrame(rows, "id long, x array<double>, y long, w double")
    made.repartition(WORKERS).write.parquet(f"{folder}/table")
    ids = [row.id for row in spark.read.parquet(f"{folder}/table").select("id").collect()]
    Path(folder, "ids.txt").write_text("\n".join(map(str, ids)))


def judge_run(folder: str, run: str, records: str = "records") -> bool:
    command = [sys.executable, "-I", str(HERE / "judge.py"), f"{folder}/ids.txt", f"{folder}/{run}/{records}"]
    return subprocess.run([*command, f"{folder}/store/runs/{run}/ledger"], check=False).returncode == 0


def is_missing_record_noticed(folder: str, run: str) -> bool:
    """Whether the judge condemns the same run with one record of its last world taken away."""
    shutil.copytree(f"{folder}/{run}/records", f"{folder}/{run}/forged")
    newest = max(Path(folder, run, "forged").glob("*.jsonl"), key=lambda path: path.stat().st_mtime)
    lines = newest.read_text().splitlines(keepends=True)
    newest.write_text("".join(lines[:-1]))
    return not judge_run(folder, run, "forged")


def soak(spark: Any, case: nets.Case, folder: str, options: argparse.Namespace) -> dict[str, Any]:
    commands = Commands()
    logger = logging.getLogger("spark_elastic.driver")
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    logger.addHandler(commands)
    make_table(spark, folder)
    calm, _ = fit(spark, case, folder, "calm", options.epochs)
    Path(folder, "stormy").mkdir()
    Path(folder, "stormy", "slow").touch()
    killer = Killer(f"{folder}/stormy", options.kills, options.each, options.seed, commands)
    killer.start()
    try:
        stormy, summary = fit(spark, case, folder, "stormy", options.epochs)
    finally:
        killer.over.set()
        killer.join()
    phases_met = Counter(kill["phase"] for kill in killer.kills)
    verdict = {
        "case": options.case,
        "kills": len(killer.kills),
        "phases": dict(phases_met),
        "kinds": dict(Counter(kill["kind"] for kill in killer.kills)),
        "rank 0": sum(kill["rank"] == 0 for kill in killer.kills),
        "while joining": sum(kill["world"] < WORKERS for kill in killer.kills),
        "worlds": len(summary.worlds),
        "to undisturbed": difference(stormy.state_dict(), calm.state_dict()),
        "to plain loop": difference(stormy.state_dict(), train_plain(case, folder, options.epochs)),
        "rows exact": judge_run(folder, "stormy"),
        "judge is sharp": is_missing_record_noticed(folder, "stormy"),
        "states": sorted(check_journal(Path(folder, "stormy", "journal"))),
    }
    exact = max(verdict["to undisturbed"], verdict["to plain loop"]) < TOLERANCE
    judged = verdict["rows exact"] and verdict["judge is sharp"]
    return verdict | {"held": exact and judged and verdict["kills"] >= options.kills}


def main() -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--case", choices=nets.CASES, default="mlp")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--each", type=int, default=0, help="how often each phase is to be met")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=150)
    parser.add_argument("--folder", help="keep everything here")
    options = parser.parse_args()
    for module in (nets, phases):
        cloudpickle.register_pickle_by_value(module)
    with tempfile.TemporaryDirectory(prefix="soak-") as temporary:
        folder = options.folder or temporary
        os.environ.update(cluster_environment(Path(folder)))
        with StandaloneCluster(Path(folder, "cluster")) as cluster:
            cluster.start_workers(WORKERS)
            verdict = on_spark(cluster.url, options, folder)
    say(verdict)
    return 0 if verdict["held"] else 1


def on_spark(url: str, options: argparse.Namespace, folder: str) -> dict[str, Any]:
    spark = start_session(url, executor_cores="1")
    try:
        return soak(spark, nets.CASES[options.case], folder, options)
    finally:
        spark.stop()


if __name__ == "__main__":
    sys.exit(main())
