"""How do loops read a table: `ElasticDataLoader(rows, 256)` beside torch's DataLoader over pyarrow, litData and Lance?

A table of 64 float32 and the row's number, in eight Parquet files. litData and Lance read copies of it, made by
`optimize` and `write_dataset`; the others read the files. Each reads whole shuffled epochs in batches of 256, in
processes of their own that take turns, the first epoch not counted: rows/s (medians), and the peak memory (PSS) of
process and worker processes. How finely they shuffle differs: ours and litData rows, pyarrow rows within what it reads
at a time, Lance whole batches. The table fits into the cache of `Rows` (128 MB): only a larger one shows how
it reads.

Then worlds: three ranks of Gloo take an epoch; they take 40 % of the steps of another, two ranks continue it. Steps are
taken together, as DDP takes them: an epoch is over when a rank has no batch left. By the rows' numbers: how many rows
come in no step, how many more than once. Ours and litData continue from the `state_dict` of rank 0, the others skip the
steps that were taken, as Accelerate's `skip_first_batches`. The peers' environment is made in build/peers/row_loader at
the first run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.parts.budget import within_budget
from benchmarks.parts.report import Row
from benchmarks.peers.row_loaders import LOADERS, WIDTH, WORLDS, read_items

FILES = 8
TAKEN = 0.4  # share of the steps before the world changes
ROOT = Path(__file__).resolve().parents[1]


# ---- in a process of a contender


def copy_table(name: str, folder: str) -> float:
    """Seconds."""
    begin, table, copy = time.perf_counter(), Path(folder, "table"), Path(folder, name.lower())
    if name == "Lance":
        import lance
        import pyarrow.dataset as pads

        lance.write_dataset(pads.dataset(table), copy)
    else:
        from litdata import optimize

        files = sorted(map(str, table.iterdir()))
        optimize(read_items, files, str(copy), chunk_bytes="16MB", num_workers=2, verbose=False)
    return time.perf_counter() - begin


def read_epochs(name: str, folder: str, processes: int, epochs: int) -> float:
    """rows/s, without the first."""
    torch.set_num_threads(1)
    loader, speeds = LOADERS[name](Path(folder), processes), []
    for _ in range(1 + epochs):
        begin = time.perf_counter()
        rows = sum(len(batch["x"]) for batch in loader.open_epoch())
        speeds.append(rows / (time.perf_counter() - begin))
    return median(speeds[1:])


def take_steps(name: str, folder: str, rank: int, size: int) -> list[list[list[int]]]:
    """The rows of each step of a rank: of the first world in two epochs, of the second in the rest of one."""
    meeting, position = (Path(folder, f"{name}-{word}") for word in (size, "position"))
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    loader = LOADERS[name](Path(folder), 0)
    if size == WORLDS[1]:
        loader.load(torch.load(position, weights_only=False))
        return [[batch["row"].tolist() for batch in loader.open_epoch()]]
    whole = [batch["row"].tolist() for batch in loader.open_epoch()]
    steps = torch.tensor(len(whole))
    dist.all_reduce(steps, dist.ReduceOp.MIN)
    step = int(TAKEN * int(steps))
    begun = [batch["row"].tolist() for batch in islice(loader.open_epoch(), step)]
    if rank == 0:
        torch.save(loader.save(step), position)
    dist.barrier()
    return [whole, begun]


def count_rows(rows: int, *worlds: Sequence[list[list[int]]]) -> tuple[int, int]:
    """How many rows are missing, how many come more than once. worlds: by rank, the rows of its steps."""
    taken = [row for world in worlds for steps in zip(*world, strict=False) for step in steps for row in step]
    counts = np.bincount(taken, minlength=rows)
    return int((counts == 0).sum()), int((counts > 1).sum())


def run_worlds(name: str, folder: str, rows: int) -> list[tuple[int, int]]:
    """Of an epoch of the first world, and of one that the second continues."""
    answers = []
    for size in WORLDS:
        with get_context("fork").Pool(size) as pool:
            calls = [(name, folder, rank, size) for rank in range(size)]
            answers.append(pool.starmap(take_steps, calls, chunksize=1))
    whole, begun = zip(*answers[0], strict=True)
    return [count_rows(rows, whole), count_rows(rows, begun, [rest for (rest,) in answers[1]])]


# ---- of the benchmark


def call(name: str, function: str, folder: Path, *arguments: Any) -> tuple[Any, float]:
    """What a function returns in a process of the contender, and the megabytes of that and its own at their peak."""
    import psutil

    from benchmarks.parts.launchers import install

    answer, peak = folder / "answer.json", 0
    python = sys.executable if name == "Ours" else install("row_loader")
    words = json.dumps([function, str(answer), name, str(folder), *arguments])
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "python")))}
    command = [str(python), "-m", "benchmarks.row_loader", words]
    process = subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        with suppress(psutil.Error):
            tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            peak = max(peak, sum(one.memory_full_info().pss for one in tree))
        time.sleep(0.05)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return json.loads(answer.read_text()), peak / (1 << 20)


def write_table(folder: Path, rows: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    draw = np.random.default_rng(1)
    for number, part in enumerate(np.array_split(np.arange(rows), FILES)):
        x = pa.FixedSizeListArray.from_arrays(pa.array(draw.random(len(part) * WIDTH, np.float32)), WIDTH)
        pq.write_table(pa.table({"row": part, "x": x}), folder / f"{number}.parquet", row_group_size=1 << 14)


def compare_speeds(folder: Path, processes: int, rounds: int, epochs: int) -> list[Row]:
    from benchmarks.parts.ranks import compare_figures

    # Lance reads by threads of its own.
    names = [name for name in LOADERS if name != "Lance" or not processes]
    contenders = {name: partial(call, name, "read_epochs", folder, processes, epochs) for name in names}
    medians = compare_figures(contenders, rounds)
    (own_speed, own_peak), found = medians.pop("Ours"), []
    for name, (speed, peak) in medians.items():
        case = f"{processes} worker processes, beside {LOADERS[name].title}"
        found.append(Row(case, own_speed, speed, "rows/s"))
        found.append(Row(f"{case}: peak of memory", own_peak, peak, "MB"))
    return found


def compare_worlds(folder: Path, rows: int) -> list[Row]:
    (_, ours), *others = [(name, call(name, "run_worlds", folder, rows)[0]) for name in LOADERS]
    return [
        Row(f"{title}, beside {LOADERS[name].title}: rows {word}", own, other, "rows")
        for name, its in others
        for title, *both in zip(("an epoch of 3 ranks", "3 ranks become 2"), ours, its, strict=True)
        for word, own, other in zip(("missing", "twice"), *both, strict=True)
    ]


def measure(
    rows: int = 200_003, rounds: int = 3, epochs: int = 1, processes: tuple[int, ...] = (0, 1)
) -> list[Row]:
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_table(folder / "table", rows)
        for name in ("LitData", "Lance"):
            seconds, _ = call(name, "copy_table", folder)
            found.append(Row(f"a copy of the table, for {LOADERS[name].title}", 0.0, seconds, "s"))
        for count in within_budget(processes, "worker processes:"):
            found += compare_speeds(folder, count, rounds, epochs)
        return found + compare_worlds(folder, rows)


if __name__ == "__main__":
    chosen, path, *given = json.loads(sys.argv[1])
    Path(path).write_text(json.dumps(globals()[chosen](*given)))
