"""A program of adjustable length, a listener that acts while the job runs, and the expected result."""

from __future__ import annotations

import io
import json
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
from pyspark.sql import SparkSession

from spark_elastic.clusters.spark.classic import ClassicPlatform
from spark_elastic.clusters.spark.platform import JobSpec
from spark_elastic.config import ElasticConfig
from spark_elastic.driver.job import LaunchResult
from spark_elastic.monitoring.listener import JobListener
from spark_elastic.protocol.types import Limits
from spark_elastic.testing.fakes import CountingProgram

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # executors have no tests folder


class HeldProgram(CountingProgram):
    """Its steps take their time, two minutes in all, as long as the file `over` is not there."""

    def __init__(self, folder: Path, patient: bool = True) -> None:
        """patient: False where nothing will happen (`Fault.on`): seconds are enough."""
        super().__init__(600)
        self._pause = 0.2 if patient else 0.01
        self.folder = folder
        self.over = folder / "over"

    def _share(self, step: int, rank: int, size: int) -> np.ndarray:
        if not self.over.exists():
            time.sleep(self._pause)
        return super()._share(step, rank, size)


class ScenarioListener(JobListener):
    """A listener that does what a scenario says: each act once its turn has come, by steps and by the world."""

    def __init__(
        self, *acts: tuple[int, int | None, Callable[[], object]], over: tuple[Path, int] | None = None
    ) -> None:
        """acts: (step that must be over, size that the world must have, what happens), each in a later world than the
        one before. over: a file, made once all that is done and a new world of that size is there."""
        self._acts = list(acts)
        self._over = over
        self._worlds = 0  # so many when the last act came
        self.sizes: list[int] = []

    def on_progress(self, metrics: Mapping[str, Any]) -> None:
        if self._acts and len(self.sizes) > self._worlds:
            step, size, act = self._acts[0]
            now = self.sizes[-1]  # a world that is no more may still be heard of
            if metrics["step"] >= step and metrics["world"] == now and size in (None, now):
                self._acts.pop(0)
                self._worlds = len(self.sizes)
                threading.Thread(target=act, name="act").start()

    def on_world(self, size: int, reason: str) -> None:
        self.sizes.append(size)
        if self._over is not None and not self._acts and size == self._over[1]:
            self._over[0].touch()

    @property
    def told(self) -> bool:
        return not self._acts


def launch(
    spark: SparkSession,
    program: CountingProgram,
    limits: Limits,
    listener: JobListener | None = None,
    **more: Any,
) -> LaunchResult:
    """Run a program. more: settings, or a `config`; a `name`, as people see it."""
    name, config = more.pop("name", "job"), more.pop("config", None) or ElasticConfig(**more)
    return ClassicPlatform(spark, config).launch(JobSpec(program, limits, name), listener)


def are_ranks_in_order(result: LaunchResult) -> bool:
    return [json.loads(text)["rank"] for text in result.results] == list(range(len(result.results)))


def is_sum_exact(result: LaunchResult, program: CountingProgram) -> bool:
    return {json.loads(text)["sum"] for text in result.results} == {program.expected_sum()}


class ActAtStep(io.StringIO):
    """A stream that does something once a worker says that it took a step."""

    def __init__(self, act: Any, at: str = "] step 10") -> None:
        super().__init__()
        self.act, self.at = act, at

    def write(self, text: str) -> int:
        if self.act is not None and self.at in text:
            act, self.act = self.act, None
            self.thread = threading.Thread(target=act)
            self.thread.start()
        return super().write(text)
