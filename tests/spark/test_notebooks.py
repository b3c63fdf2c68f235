"""The notebooks of examples/, run as a user would find things: each in a kernel and on a Spark of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import maker
from tests.sources import ROOT
from tests.spark.cluster import cluster_environment

pytestmark = [pytest.mark.spark, pytest.mark.native, pytest.mark.slow, pytest.mark.timeout(900)]

NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
AS_ON_DATABRICKS = ("--spark-first", "--no-findspark", "--read-only", "--store={folder}/objects")
AGAIN = ("--twice",)
NAMES = {(): "", AS_ON_DATABRICKS: " as on Databricks", AGAIN: " each cell twice"}
# On PYTHONPATH; the store there refuses links, renames and appends, as a mount of an object store does.
MOUNT = ROOT / "tests" / "mount_of_objects"
# As where Spark was unpacked, and not installed by pip.
HIDES_PYSPARK = """
import sys
from importlib.machinery import PathFinder

class Hides:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in ("pyspark", "py4j"):
            entries = [entry for entry in sys.path if not entry.endswith("site-packages")]
            return PathFinder.find_spec(name, entries) or hide(name)

def hide(name):
    raise ModuleNotFoundError(f"{name} is hidden")

sys.meta_path.insert(0, Hides)
"""
WITH_A_RUN = "04"  # by its run_id
IN_EVERY_RUN = [("01", AS_ON_DATABRICKS)]
NUMBER = re.compile(r"\d+(?:\.\d+)?")


def case(notebook: Path, *flags: str) -> object:
    """`./build.sh test` runs one as on Databricks, which is stricter than a laptop; with `-m ""` and this file, all of
    them, each way."""
    in_ci = (notebook.name[:2], flags) in IN_EVERY_RUN
    marks = [] if in_ci else [pytest.mark.faults]
    return pytest.param(notebook, flags, id=f"{notebook.stem}{NAMES[flags]}", marks=marks)


@pytest.mark.parametrize(
    ("notebook", "flags"),
    [
        *(case(notebook) for notebook in NOTEBOOKS),
        *(case(notebook, *AS_ON_DATABRICKS) for notebook in NOTEBOOKS),
        *(case(notebook, *AGAIN) for notebook in NOTEBOOKS if notebook.name.startswith(WITH_A_RUN)),
    ],
)
def test_notebook_runs_to_its_end(
    notebook: Path, flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "from peft import" in notebook.read_text():
        pytest.importorskip("peft")
    for name, value in cluster_environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(MOUNT), os.environ["PYTHONPATH"]]))
    monkeypatch.setenv("MOUNT_OF_OBJECTS", str(tmp_path / "objects"))
    options = [flag.format(folder=tmp_path) for flag in flags]
    command = [sys.executable, "-m", "tests.notebooks", notebook, "--folder", tmp_path, *options]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-6000:]
    tutorials = maker("tutorials")
    if notebook.stem in tutorials.NAMES:
        ended, shown = run.stdout.splitlines()[-1], tutorials.find_last_line(notebook.stem)
        assert NUMBER.sub("", ended) == NUMBER.sub("", shown)
        found, expected = ([float(number) for number in NUMBER.findall(line)] for line in (ended, shown))
        assert found == pytest.approx(expected, rel=0.03), "of its page"


def test_notebooks_find_a_spark_that_is_no_python_package(tmp_path: Path) -> None:
    import pyspark

    installed = Path(pyspark.__file__).parent
    (tmp_path / "python").mkdir()
    (tmp_path / "python" / "pyspark").symlink_to(installed)
    (tmp_path / "python" / "lib").symlink_to(installed / "python" / "lib")
    cells = [cell for path in NOTEBOOKS for cell in json.loads(path.read_text())["cells"]]
    sources = ["".join(cell["source"]) for cell in cells]
    found = [source[source.index("try:") :] for source in sources if "findspark.init()" in source]
    branches = {source[: source.index("findspark.init()")] for source in found}
    assert len(found) == len(NOTEBOOKS)
    assert len(branches) == 1
    program = f"{HIDES_PYSPARK}{branches.pop()}findspark.init()\nimport pyspark\nprint(pyspark.__file__)"
    command = [sys.executable, "-c", program]
    environment = os.environ | {"SPARK_HOME": str(tmp_path)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.stdout.strip() == str(tmp_path / "python" / "pyspark" / "__init__.py"), run.stderr


def test_notebooks_are_kept_without_outputs() -> None:
    assert len(NOTEBOOKS) >= 5
    for notebook in NOTEBOOKS:
        cells = json.loads(notebook.read_text())["cells"]
        code = [cell for cell in cells if cell["cell_type"] == "code"]
        assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code), notebook.name
        assert any("STORE" in "".join(cell["source"]) for cell in code[:1]), notebook.name
        assert any("## On a cluster" in "".join(cell["source"]) for cell in cells), notebook.name
