"""What a program imports for sure, as its source shows it; nothing is imported."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pandas
import pytest
from sklearn.linear_model import LinearRegression

from spark_elastic.clusters.run.call import prepare
from spark_elastic.clusters.run.user_code import find_in_source
from spark_elastic.worker.imports import find_packages, list_early_imports

SCRIPT = """
import os, sys
os.environ["KERAS_BACKEND"] = "torch"
os.environ.setdefault("LEVEL", "3")
import torch, transformers
from torch import nn
from trl import *
import helpers.models as models
try:
    import apex
except ImportError:
    import onnx
if len(sys.argv) > 3:
    import tensorflow

class Net(nn.Module):
    import peft
    def forward(self, x):
        import numpy

def unused():
    import scipy

def main():
    import pandas as pd
    pd.io
    for _ in range(3):
        inner(transformers.AutoModel)

def inner(model):
    {last}
    import sklearn

if __name__ == "__main__":
    main()
"""
SURE = (
    "KERAS_BACKEND=torch", "LEVEL?=3", "torch", "transformers", "torch:nn", "trl", "accelerate", "datasets:Dataset",
    "apex?", "peft", "pandas", "pandas:io", "transformers:AutoModel",
)  # fmt: skip


@pytest.mark.parametrize(
    ("last", "found"),
    [
        ("pass", (*SURE, "sklearn")),
        ("os.environ.get('A')", (*SURE, "sklearn")),
        ("sys.path.append('a')", (*SURE, "sklearn")),  # what is installed comes first
        ("os.environ['A'] = str(model)", SURE),
        ("environ.update(A=model)", SURE),
        ("if model:\n        del os.environ['A']", SURE),
        ("sys.path.insert(0, 'a')", SURE),
        ("sys.modules['sklearn'] = model", SURE),
        ("load_dotenv()", SURE),
    ],
)
def test_a_script_surely_imports(tmp_path: Path, last: str, found: tuple[str, ...]) -> None:
    package = tmp_path / "helpers"
    package.mkdir()
    (package / "__init__.py").write_text("import accelerate\n")
    (package / "models.py").write_text("from .sizes import WIDTH\nfrom ..beyond import nothing\n")
    (package / "sizes.py").write_text("import helpers.models\nfrom datasets import Dataset\n")
    assert find_in_source(SCRIPT.format(last=last).encode(), str(tmp_path)) == found
    assert find_packages(found)[:4] == ("torch", "transformers", "trl", "accelerate")
    assert "apex" not in find_packages(found)


def test_source_that_is_no_python_imports_nothing() -> None:
    assert find_in_source(b"import torch\n  (", "") == ()


def test_a_module_of_a_package_finds_its_siblings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "siblings"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "first.py").write_text("import torch\n")
    (package / "train.py").write_text("from . import first\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "siblings" not in sys.modules
    source = (package / "train.py").read_bytes()
    assert find_in_source(source, str(tmp_path), "siblings") == ("torch",)
    assert "siblings" not in sys.modules


def make_frame() -> object:
    import spark_elastic.torch as hvd

    return hvd, pandas.DataFrame()


def test_a_function_surely_imports() -> None:
    arrow = __import__("pyarrow")

    def train() -> object:
        os.environ["KERAS_BACKEND"] = "torch"
        import keras

        def inner() -> object:
            from tensorflow import data

            return data, arrow

        if arrow:
            import torch

            torch.ones(1)
        return keras.Model, LinearRegression, inner(), make_frame()

    call = prepare(train, (), {"preload": ["mine"], "env": {"A": "b"}})
    assert set(call.program.imports) == {
        "KERAS_BACKEND=torch", "keras", "keras:Model", "tensorflow:data", "pyarrow", "pandas", "pandas:DataFrame",
        "sklearn.linear_model._base", "spark_elastic.torch",
    }  # fmt: skip
    assert list_early_imports(call.program, call.preload)[:2] == ("A=b", "mine")
    assert {"torch", "tensorflow", "mine"} <= set(
        find_packages(list_early_imports(call.program, call.preload))
    )
    assert prepare(train, (), {"preload": []}).program.imports == ()
    assert prepare(print, (), {}).program.imports == ()
