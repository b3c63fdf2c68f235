"""What `run` returns. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from spark_elastic.observe.report import JobReport

T = TypeVar("T")


class Results(list[T]):
    """What the function returned on each worker, in rank order: a list, and the job's report.

    report: where the job's time went, and what losses cost.
    """

    def __init__(self, returned: Iterable[T], report: JobReport) -> None:
        super().__init__(returned)
        self.report = report
