"""What is sent: every file of the packages, compiled ones too, and none of the interpreter's own caches."""

from __future__ import annotations

import threading
import time
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("pyspark")

import elastic_collectives
from spark_elastic.clusters.spark import shipping
from spark_elastic.clusters.spark.shipping import PACKAGES, _find_folder, pack
from spark_elastic.errors import InvalidInput


def test_a_package_is_packed_whole_and_without_caches(tmp_path: Path) -> None:
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


def test_a_package_that_the_driver_does_not_have_as_files_is_named() -> None:
    with pytest.raises(InvalidInput, match="ship=True needs no_such_package as a folder of files"):
        _find_folder("no_such_package")


class Context:
    """A SparkContext whose executors fetch an archive once it is added."""

    master = "spark://there"

    def __init__(self, folder: Path) -> None:
        self._temp_dir = folder
        self.added: list[str] = []
        self.fails = False

    def addArchive(self, path: str) -> None:
        if self.fails:
            raise OSError("no room")
        self.added.append(path.partition("#")[2])


def _record_writes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    written: list[str] = []

    def write_slowly(package: Path, archive: Path) -> None:
        time.sleep(0.05)
        written.append(package.name)

    monkeypatch.setattr(shipping, "pack", write_slowly)
    return written


def test_two_fits_at_once_send_each_package_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written again while an executor fetches it arrives cut off."""
    written, context = _record_writes(monkeypatch), Context(tmp_path)
    fits = [threading.Thread(target=shipping.ship, args=(context,)) for _ in range(2)]
    for fit in fits:
        fit.start()
    for fit in fits:
        fit.join()
    assert written == context.added == list(PACKAGES)


def test_after_a_failure_packages_that_were_sent_are_not_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, context = _record_writes(monkeypatch), Context(tmp_path)
    monkeypatch.setattr(shipping, "PACKAGES", PACKAGES[:1])
    shipping.ship(context)  # type: ignore[arg-type]
    monkeypatch.setattr(shipping, "PACKAGES", PACKAGES)
    context.fails = True
    with pytest.raises(OSError, match="no room"):
        shipping.ship(context)  # type: ignore[arg-type]
    context.fails = False
    shipping.ship(context)  # type: ignore[arg-type]
    assert context.added == list(PACKAGES)
    assert written.count(PACKAGES[0]) == 1
