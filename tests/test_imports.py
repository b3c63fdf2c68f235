"""No framework brings another one, and predictions no engine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.sources import PACKAGES


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("imported", "absent"),
    [
        ("torch", {"tensorflow", "keras"}),
        ("tensorflow", {"torch"}),
        (
            "keras",
            {"torch", "elastic_collectives", "spark_elastic.worker"},
        ),  # fitted models have modules in it
    ],
)
def test_a_half_imports_nothing_that_it_does_without(imported: str, absent: set[str]) -> None:
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, PACKAGES.values())),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    program = f"import sys, spark_elastic.{imported}; sys.exit(bool({absent!r} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=False,
        capture_output=True,
        text=True,
        timeout=100,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
