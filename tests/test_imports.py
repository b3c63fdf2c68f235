"""No framework brings another one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.sources import PACKAGES


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("imported", "absent"), [("torch", {"tensorflow", "keras"}), ("tensorflow", {"torch"})]
)
def test_the_half_of_one_framework_imports_no_other(imported: str, absent: set[str]) -> None:
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
