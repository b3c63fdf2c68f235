"""Which hosts may take part, from their versions alone."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("pyspark")

from spark_elastic.clusters.spark.host_facts import collect_host_facts
from spark_elastic.clusters.spark.probe import make_version_check

DRIVER = {"host": "d", "python": "3.11.7", "spark_elastic": "0.1.0", "numpy": "2.4.6", "torch": "2.13.0+cpu"}


def check_host(needs: tuple[str, ...] = ("torch",), **changes: Any) -> str | None:
    host = {k: v for k, v in (DRIVER | {"host": "h1"} | changes).items() if v is not None}
    return make_version_check(DRIVER, needs)(host)


def test_a_host_with_the_drivers_versions_is_admitted() -> None:
    assert make_version_check(collect_host_facts(), ("torch",))(collect_host_facts()) is None


@pytest.mark.parametrize(
    "changes", [{"python": "3.11.2"}, {"numpy": "2.1.0"}, {"torch": "2.9.1+cu121"}, {"keras": "9.0"}, {}]
)
def test_small_version_differences_do_not_matter(changes: dict[str, str]) -> None:
    assert check_host(**changes) is None


@pytest.mark.parametrize(
    ("package", "theirs"),
    [("python", "3.12.7"), ("numpy", "1.26.4"), ("torch", "1.13.1"), ("spark_elastic", "0.1.1")],
)
def test_a_mismatch_names_host_package_and_both_versions(package: str, theirs: str) -> None:
    sentence = check_host(**{package: theirs})
    assert sentence is not None
    assert all(word in sentence for word in ("h1", package, theirs, DRIVER[package]))
    assert sentence.endswith(".")
    assert "\n" not in sentence


def test_a_missing_package_is_named_if_the_job_uses_it() -> None:
    says = "host h1 has no torch, and the driver has 2.13.0+cpu: install torch 2.13.0+cpu there."
    assert check_host(torch=None) == says
    assert check_host(needs=(), torch=None) is None
