"""`verbose=2`: the log where the job is watched, and the loggers as they were afterwards."""

from __future__ import annotations

import io
import logging
import threading

import pytest

from spark_elastic.observe.told_log import TOLD, Passed, log_again, log_passed_on, log_shown, log_told


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


def test_whoever_logs_does_not_wait_for_a_stream_that_blocks() -> None:
    read = threading.Event()
    told: list[str] = []

    def blocks(text: str) -> None:
        read.wait(20)
        told.append(text)

    with log_told(blocks):
        logging.getLogger("spark_elastic").warning("a worry")
        assert told == []
        read.set()
    assert told == ["warning: a worry"]


def test_one_job_s_end_leaves_the_log_to_the_other() -> None:
    logger = logging.getLogger("spark_elastic")
    before, told = logger.level, list[str]()
    first, second = log_told(lambda text: None), log_told(told.append)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    logger.info("goes on")
    second.__exit__(None, None, None)
    assert told == ["info: goes on"]
    assert logger.level == before


def test_the_log_is_shown_inside_the_block_alone() -> None:
    stream, root = io.StringIO(), logging.getLogger()
    before = list(root.handlers)
    with log_shown(stream):
        logging.getLogger("spark_elastic").warning("a %s", "worry")
        logging.getLogger("another").error("an error")
    logging.getLogger("spark_elastic").warning("after")
    assert stream.getvalue() == "WARNING:spark_elastic:a worry\nERROR:another:an error\n"
    assert root.handlers == before


def test_a_stream_that_fails_is_not_the_job_s_worry(capsys: pytest.CaptureFixture[str]) -> None:
    def closed(text: str) -> None:
        raise ValueError("I/O operation on closed file")

    with log_told(closed):
        logging.getLogger("spark_elastic").warning("a worry")
    assert "closed file" in capsys.readouterr().err


def test_what_a_driver_elsewhere_logs_is_logged_again(caplog: pytest.LogCaptureFixture) -> None:
    passed: list[Passed] = []
    with log_passed_on(passed.append):
        logging.getLogger("spark_elastic.driver").warning("rank %d keeps others waiting", 1)
        logging.getLogger("spark_elastic").info("told anyway", extra=TOLD)
        try:
            raise ValueError("why")
        except ValueError:
            logging.getLogger("spark_elastic").exception("it failed")
    assert logging.getLogger("spark_elastic").level == logging.NOTSET
    caplog.clear()
    told: list[str] = []
    with log_told(told.append):
        for record in passed:
            log_again(*record)
    again = [(record.levelno, record.name) for record in caplog.records]
    assert again == [
        (logging.WARNING, "spark_elastic.driver"),
        (logging.INFO, "spark_elastic"),
        (logging.ERROR, "spark_elastic"),
    ]
    assert told[0] == "warning: rank 1 keeps others waiting"
    assert len(told) == 2
    assert "ValueError: why" in told[1]
