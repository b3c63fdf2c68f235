"""What is sent: every file of the packages, compiled ones too, and none of the interpreter's own caches."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

import elastic_collectives
from spark_elastic.errors import InvalidInput
from spark_elastic.spark.shipping import PACKAGES, _home, pack


def test_a_package_travels_whole_and_without_caches(tmp_path: Path) -> None:
    package, archive = Path(elastic_collectives.__file__).parent, tmp_path / "sent.zip"
    pack(package, archive)
    sent = set(zipfile.ZipFile(archive).namelist())
    here = {
        str(file.relative_to(package))
        for file in package.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert sent == here
    assert "__init__.py" in sent


def test_all_that_is_sent_can_be_found() -> None:
    assert all((_home(package) / "__init__.py").is_file() for package in PACKAGES)


def test_a_package_that_the_driver_does_not_have_as_files_is_named() -> None:
    with pytest.raises(InvalidInput, match="ship=True needs no_such_package as a folder of files"):
        _home("no_such_package")
