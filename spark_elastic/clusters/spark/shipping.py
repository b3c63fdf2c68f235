"""Sends this package to executors that do not have it: `ElasticConfig(ship=True)`. Runs in the caller's thread.

Spark unpacks an archive once per executor, also on later ones, into the folder that comes first in `sys.path` of each
Python worker. A package under its own name is importable there, compiled parts included.
"""

from __future__ import annotations

import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from spark_elastic.driver.gang_scheduler import get_job_queue
from spark_elastic.errors import InvalidInput

if TYPE_CHECKING:
    from pyspark import SparkContext

# cloudpickle: what the driver has pickled is best read by the same release.
PACKAGES = ("spark_elastic", "elastic_collectives", "cloudpickle")
LEFT_OUT = ("__pycache__",)
SHIPPED = "_spark_elastic_shipped"  # attribute of the SparkContext: the packages that were added to it


def ship(sc: SparkContext) -> None:
    """Send the packages, once for each SparkContext. In local mode the driver is the executor, and has them.

    numpy and the framework must be installed on executors: their builds depend on the machine.
    """
    if str(sc.master).startswith("local"):
        return
    folder = Path(str(sc._temp_dir))  # lives as long as the SparkContext, like its archives
    with get_job_queue(
        sc
    ).shipping_lock:  # executors fetch an archive as soon as it is added: it is written once
        shipped: set[str] = vars(sc).setdefault(SHIPPED, set())
        for package in PACKAGES:
            if package not in shipped:
                archive = folder / f"spark_elastic-ship-{package}.zip"
                pack(_find_folder(package), archive)
                sc.addArchive(f"{archive}#{package}")
                shipped.add(package)


def pack(package: Path, archive: Path) -> None:
    """Write the files of a package's folder to a zip file, with the folder as its top."""
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as target:
        for file in sorted(package.rglob("*")):
            if file.is_file() and not set(LEFT_OUT) & set(file.parts):
                target.write(file, file.relative_to(package))


def _find_folder(package: str) -> Path:
    spec = find_spec(package)
    places = list(spec.submodule_search_locations or []) if spec is not None else []
    if not places or not Path(places[0]).is_dir():
        raise InvalidInput(
            f"ship=True needs {package} as a folder of files, and the driver has it in {places or 'no folder'}: "
            "install it there with pip."
        )
    return Path(places[0])
