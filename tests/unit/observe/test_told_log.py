"""`verbose=2`: the log where the job is watched, and the loggers as they were afterwards."""

from __future__ import annotations

import logging

import pytest

from spark_elastic.observe.told_log import TOLD, log_told


def test_the_log_is_told_inside_the_block_alone() -> None:
    told: list[str] = []
    logger, root = logging.getLogger("spark_elastic"), logging.getLogger()
    before = list(logger.handlers), logger.level, list(root.handlers), root.level
    with log_told(told.append):
        logging.getLogger("spark_elastic.driver").info("a %s", "decision")
        logging.getLogger("spark_elastic.driver").debug("a detail")
        logger.warning("a worry")
        logger.info("told anyway", extra=TOLD)
        assert (list(root.handlers), root.level) == before[2:]
    logger.warning("after")
    assert told == ["info: a decision", "warning: a worry"]
    assert (list(logger.handlers), logger.level, list(root.handlers), root.level) == before
    with log_told(told.append, wanted=False):
        logger.warning("not wanted")
    assert len(told) == 2


def test_a_stream_that_fails_is_not_the_job_s_worry(capsys: pytest.CaptureFixture[str]) -> None:
    def closed(text: str) -> None:
        raise ValueError("I/O operation on closed file")

    with log_told(closed):
        logging.getLogger("spark_elastic").warning("a worry")
    assert "closed file" in capsys.readouterr().err
