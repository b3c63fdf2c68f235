"""Fuzzing that is led by coverage (atheris, libFuzzer): each endpoint of a real rendezvous server, for so many seconds.

    python tests/faults/fuzz.py --seconds 600

The requests are those of `generated_requests`, made from the fuzzer's bytes: the first says which endpoint. It goes on
until the time is over, or ends at the first answer that must not be, whose bytes libFuzzer keeps in a file.
"""

from __future__ import annotations

import argparse
import http.client
import logging
import sys
from pathlib import Path

import atheris

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "python")]

with atheris.instrument_imports(include=["spark_elastic"]):
    from spark_elastic.protocol.messages import Heartbeat
    from spark_elastic.rendezvous.messages import REQUESTS
    from tests.component.rendezvous.driver_side import PATIENCE, Driver, make_status_app, start_driver
    from tests.component.rendezvous.generated_requests import (
        Asks,
        ask_without_key,
        for_pages,
        of_noise,
        with_key,
    )


class Errors(logging.Handler):
    """What the server logs of errors of its own."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def endpoints(driver: Driver) -> list[Asks]:
    def dialled() -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", driver.port, timeout=PATIENCE)

    return [
        *(with_key(dialled(), request) for request in REQUESTS),
        ask_without_key(dialled()),
        of_noise(driver.port),
        for_pages(dialled()),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=600)
    options = parser.parse_args()
    errors = Errors()
    logging.getLogger().addHandler(errors)
    driver = start_driver(status_app=make_status_app())
    honest, targets = driver.client(), endpoints(driver)

    def one(data: bytes) -> None:
        if data:
            targets[data[0] % len(targets)].hypothesis.fuzz_one_input(data[1:])
            assert honest.ask(Heartbeat("9-0")).heartbeat_interval
            assert not errors.texts, errors.texts
            for heard in (driver.events, driver.logs, driver.reports):
                while not heard.empty():
                    heard.get()

    # Long inputs from the start: a short one is no whole request.
    limits = [f"-max_total_time={options.seconds}", "-max_len=4096", "-len_control=0"]
    limits.append(f"-artifact_prefix={ROOT}/build/")
    atheris.Setup([sys.argv[0], *limits], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
