"""`spark-elastic-run` as the tests see it: to its end, or over `loop.py` with its log, its orders and its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from tests.scenarios import Fault
from tests.sources import PYTHONPATH

T = TypeVar("T")
LOOP = Path(__file__).with_name("loop.py")
WAIT = 60.0  # seconds for what must happen, on a busy machine
WAIT_IN_VAIN = 4.0  # where faults are off


def run_command(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`spark-elastic-run` with two workers, in a folder, to its end."""
    command = [sys.executable, "-m", "spark_elastic.clusters.cli", "-np", "2", *words]
    own = {"PYTHONPATH": PYTHONPATH, **variables}
    return subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=folder, env=os.environ | own, timeout=150
    )


class ObservedJob:
    """folder: of this run. fault: on or off decides how long is waited."""

    def __init__(self, folder: Path, fault: Fault, *options: str) -> None:
        self.folder = folder
        self._fault = fault
        launcher = [sys.executable, "-m", "spark_elastic.clusters.cli", "--start-timeout", str(WAIT)]
        command = [*launcher, *options, "python", str(LOOP), str(folder)]
        self._stderr = (folder / "stderr").open("w+")
        environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
        streams: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": self._stderr}
        self.process = subprocess.Popen(command, env=environment, **streams)

    def lines(self) -> list[dict[str, Any]]:
        log = self.folder / "log"
        text = log.read_text() if log.exists() else ""
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def find_newest(self) -> list[dict[str, Any]]:
        """One line per rank of the newest world that took a step, in rank order."""
        lines = self.lines()
        generation = max((line["generation"] for line in lines), default=0)
        by_rank = {line["rank"]: line for line in lines if line["generation"] == generation}
        return [by_rank[rank] for rank in sorted(by_rank)]

    def sizes(self) -> list[int]:
        """Of the worlds that took a step."""
        return [size for _, size in sorted({(line["generation"], line["size"]) for line in self.lines()})]

    def await_size(self, size: int, after: int = 0) -> list[dict[str, Any]]:
        """The newest world's lines once it is of that size and each of its ranks took a step. after: a generation."""

        def find_world() -> list[dict[str, Any]]:
            newest = self.find_newest()
            whole = [line["size"] for line in newest] == [size] * size
            return newest if whole and newest[0]["generation"] > after else []

        return self.wait_for(find_world, f"a world of {size}")

    def wait_for(self, look: Callable[[], T], what: str) -> T:
        """The first truthy answer of `look`."""
        deadline = time.monotonic() + (WAIT if self._fault.on or not self.lines() else WAIT_IN_VAIN)
        while not (seen := look()):
            assert self.process.poll() is None, f"the job ended before {what}: {self.stderr()}"
            assert time.monotonic() < deadline, f"no {what}; worlds of {self.sizes()}: {self.stderr()}"
            time.sleep(0.02)
        return seen

    def order(self, rank: int | str, how: str) -> None:
        """That rank, or "all", shall raise, exit or kill itself before its next step."""
        draft = self.folder / f"draft.{rank}"
        draft.write_text(how)
        draft.rename(self.folder / f"order.{rank}")

    def stop(self) -> int:
        """Let the job end well; returns its exit code."""
        (self.folder / "stop").touch()
        return self.wait_for_exit()

    def wait_for_exit(self) -> int:
        return self.process.wait(WAIT if self._fault.on else WAIT_IN_VAIN)

    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(20)
        self._stderr.close()


@contextmanager
def start_watched(folder: Path, fault: Fault, *options: str) -> Iterator[ObservedJob]:
    job = ObservedJob(folder, fault, *options)
    try:
        yield job
    finally:
        job.close()
