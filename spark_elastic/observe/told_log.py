"""The log of spark_elastic shown where a job is watched, for `verbose=2`. The root logger is left as it is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

TOLD = {"told": True}  # `extra` of records that those who watch are told anyway


class _Teller(logging.Handler):
    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__()
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, "told", False):
            return
        try:
            self._tell(f"{record.levelname.lower()}: {record.getMessage()}")
        except Exception:  # whoever logs must not suffer from a stream that is closed
            self.handleError(record)


@contextmanager
def log_told(tell: Callable[[str], None], wanted: bool = True) -> Iterator[None]:
    """Inside the block `tell` gets what "spark_elastic" and the loggers below it say, from INFO on.

    wanted: False changes nothing.
    """
    if not wanted:
        yield
        return
    logger, teller = logging.getLogger("spark_elastic"), _Teller(tell)
    level = logger.level
    logger.addHandler(teller)
    if logger.getEffectiveLevel() > logging.INFO:
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.setLevel(level)
        logger.removeHandler(teller)
