"""torch's conformance suite of process groups, which is in its wheel, in the ranks of a job.

`python tests/conformance/suite.py` runs it over Gloo and over the backend `elastic`, with 2 and with 3 ranks, and
writes `results.json`, of which `docs/generate.py` makes a page. What passes over Gloo must pass over `elastic`, or
has its reason in `REASONS`.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import faulthandler
import functools
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results.json"
SIZES = (2, 3)
SECONDS = 60  # a test that takes longer ends its rank
# Tests that pass over Gloo alone, and why.
REASONS = {
    "test_ddp_logging_data_cpu": "DDP's log calls the backend `elastic`; torch's C++ looks for Gloo's devices where a "
    "group calls itself `gloo`"
}
# One or more of each collective, and what profilers see of it.
CHOSEN = tuple(
    f"test_{name}"
    for name in (
        *("all_gather_coalesced_group", "all_gather_coalesced_with_empty", "all_gather_complex"),
        *("all_gather_object_subgroup", "all_reduce_coalesced_max", "all_reduce_group_sum"),
        *("all_reduce_sum_async", "all_to_all_complex", "all_to_all_single_equal_split"),
        *("all_to_all_single_unequal_split_group", "barrier_timeout_full_group"),
        *("batch_isend_irecv_gloo_tags", "broadcast_group", "gather_group", "gather_object"),
        *("isend_torch_profiler", "monitored_barrier_gloo_rank_0_timeout"),
        *("monitored_barrier_wait_all_ranks", "reduce_full_group_product", "scatter_complex"),
        *("scatter_object_list", "send_recv_any_source_autograd_profiler", "send_recv_with_tag"),
        *("sparse_all_reduce_sum", "static_graph_api_cpu"),
    )
)


def load(size: int) -> Any:
    """The suite's class, for that many ranks."""
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(size))
    os.environ.setdefault("TEMP_DIR", tempfile.gettempdir())
    from torch.testing._internal import common_distributed

    common_distributed.skip_if_small_worldsize = skip_below_three
    from torch.testing._internal.distributed import distributed_test

    bases = distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase
    return type("Suite", bases, {})


def skip_below_three(test: Any) -> Any:
    """In place of torch's decorator, which wants eight ranks for groups of two among three."""
    from torch.testing._internal.common_distributed import TEST_SKIPS

    @functools.wraps(test)
    def call(*given: Any, **named: Any) -> Any:
        if int(os.environ["WORLD_SIZE"]) < 3:
            sys.exit(TEST_SKIPS["small_worldsize"].exit_code)
        return test(*given, **named)

    return call


def run_tests(names: Sequence[str], folder: Path, rank: int, size: int) -> Iterator[tuple[str, str, str]]:
    """Run tests in this rank, one after another. Yields each one's name, status and error."""
    from torch import distributed, multiprocessing

    suite = load(size)
    barrier = sys.modules[suite.__bases__[0].__module__].Barrier
    for name in names:
        place = folder / name
        for part in ("barrier", "test_dir", "init_dir"):
            (place / part).mkdir(parents=True, exist_ok=True)
        os.environ["TEMP_DIR"], barrier.barrier_id = str(place), 0
        parent, child = multiprocessing.Pipe()
        code: object = 0
        try:
            suite._run(rank, name, str(place / "rendezvous"), child)
        except SystemExit as end:
            code = end.code
        except BaseException:
            code = traceback.format_exc()
        child.close()
        error = ""
        with contextlib.suppress(EOFError):  # no message
            error = str(parent.recv())
        parent.close()
        if distributed.is_initialized() and (code in (0, None) or code in skips()):
            distributed.destroy_process_group()
        if code in (0, None):
            yield name, "pass", ""
        else:
            yield name, "skip" if code in skips() else "fail", error or str(code)


def skips() -> set[int]:
    from torch.testing._internal.common_distributed import TEST_SKIPS

    return {skip.exit_code for skip in TEST_SKIPS.values()}


def work(folder: Path, over: str) -> None:
    """What each rank of a job does: it runs tests until one fails."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if over == "elastic":
        give_no_store()
    try:
        with open(folder / f"rank-{rank}", "w") as lines:
            faulthandler.dump_traceback_later(SECONDS, exit=True)
            for result in run_tests(json.loads((folder / "tests").read_text()), folder, rank, size):
                faulthandler.dump_traceback_later(SECONDS, exit=True)
                lines.write(json.dumps(result) + "\n")
                lines.flush()
                if result[1] == "fail":
                    break
    finally:
        os._exit(0)  # as in torch's own harness: a test may leave threads behind


def give_no_store() -> None:
    """Leave the rendezvous to the job, in place of the suite's files."""
    from torch import distributed

    original = distributed.init_process_group

    def init_process_group(backend: Any = None, **given: Any) -> None:
        timeout: datetime.timedelta | None = given.get("timeout")
        original(backend, timeout=timeout)

    distributed.init_process_group = init_process_group


def run_over(over: str, size: int, names: list[str]) -> dict[str, tuple[str, str]]:
    """Status and error of each test. A job ends with a test that fails, and another one goes on."""
    found: dict[str, tuple[str, str]] = {}
    while left := [name for name in names if name not in found]:
        with tempfile.TemporaryDirectory() as path:
            folder = Path(path)
            (folder / "tests").write_text(json.dumps(left))
            if over == "gloo":
                fork(size, folder)
            else:
                launch(size, folder)
            ranks = [read_lines(folder / f"rank-{rank}") for rank in range(size)]
        for name in left:
            of_ranks = [rank.get(name, ("fail", "the rank ended")) for rank in ranks]
            worst = min(of_ranks, key=lambda result: ("fail", "pass", "skip").index(result[0]))
            found[name] = worst
            if worst[0] == "fail":
                sys.stderr.write(f"{over}, {size} ranks: {name}: {worst[1][-300:]}\n")
                break
    return found


def launch(size: int, folder: Path) -> None:
    """Run a job of our launcher to its end."""
    own = [os.path.abspath(__file__), "--folder", str(folder)]
    ranks = ["-np", str(size), "--min-np", str(size), "--reset-limit", "0", "--log-level", "error"]
    command = [sys.executable, "-m", "spark_elastic.clusters.cli", *ranks, sys.executable, *own]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with open(folder / "log", "wb") as log:
        subprocess.run(command, check=False, env=env, stdout=log, stderr=log)


def fork(size: int, folder: Path) -> None:
    """Let plain processes be the ranks, until they have ended: a test that takes too long ends its own."""
    load(size)
    children = []
    for rank in range(size):
        if (child := os.fork()) == 0:
            os.environ["RANK"] = str(rank)
            work(folder, "gloo")
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def read_lines(path: Path) -> dict[str, tuple[str, str]]:
    if not path.exists():
        return {}
    return {name: (status, error) for name, status, error in map(json.loads, path.read_text().splitlines())}


def compare() -> dict[str, Any]:
    """All results, and what they say of `elastic` beside Gloo."""
    import torch

    record: dict[str, Any] = {"torch": torch.__version__, "date": str(datetime.date.today()), "sizes": {}}
    for size in SIZES:
        names = sorted(name for name in dir(load(size)) if name.startswith("test_"))
        gloo = run_over("gloo", size, names)
        passed = [name for name in names if gloo[name][0] == "pass"]
        elastic = run_over("elastic", size, passed)
        record["sizes"][size] = {
            "gloo": passed,
            "elastic": [name for name in passed if elastic[name][0] == "pass"],
            "ran": len([name for name in names if gloo[name][0] != "skip"]),
        }
    return record


def find_unexplained(record: dict[str, Any]) -> list[str]:
    """Tests that pass over Gloo alone without a reason, and reasons of tests that pass."""
    sizes = record["sizes"].values()
    only = {name for size in sizes for name in set(size["gloo"]) - set(size["elastic"])}
    return sorted(only ^ REASONS.keys())


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--folder", type=Path, help="what a rank of a job works in")
    given = options.parse_args()
    if given.folder:
        work(given.folder, "elastic")
    record = compare()
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")
    if unexplained := find_unexplained(record):
        sys.exit(f"passed over Gloo alone, or against REASONS: {', '.join(unexplained)}")


if __name__ == "__main__":
    main()
