"""A checked call: what it asks the driver for, what it refuses, and what it surely imports, as the source shows it."""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import sys
import threading
import types
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import numpy as np
import pandas
import pytest
from sklearn.linear_model import LinearRegression

from spark_elastic.clusters.run import call as running
from spark_elastic.clusters.run import user_code
from spark_elastic.clusters.run.call import decode_results, prepare
from spark_elastic.clusters.run.user_code import find_in_source
from spark_elastic.driver.job import LaunchResult
from spark_elastic.errors import InvalidInput
from spark_elastic.monitoring.report import JobReport
from spark_elastic.worker.imports import find_packages, list_early_imports
from spark_elastic.worker.program import encode_result

OWN_IMPORT = "spark_elastic.worker.function_program?"


def test_r15_a_call_needs_the_result_of_every_worker() -> None:
    call = prepare(print, (), {"num_workers": 3, "regroup_timeout": 45.0})
    limits = call.make_limits(2)
    assert (limits.num_workers, limits.all_results, limits.regroup_timeout) == (3, True, 45.0)


def test_the_log_of_the_preflight_is_shown_like_that_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def make_logger(what: str) -> Any:
        return lambda *given: logging.getLogger("spark_elastic.spark").info(what)

    platform = SimpleNamespace(
        count_workers=lambda asked: 1, preflight=make_logger("the preflight"), launch=make_logger("the job")
    )
    monkeypatch.setattr("spark_elastic.clusters.spark.host_facts.get_session", lambda given: given)
    monkeypatch.setattr("spark_elastic.clusters.spark.make_platform", lambda *given: platform)
    monkeypatch.setattr(running, "decode_results", lambda launched: [])
    told = io.StringIO()
    prepare(print, (), {"num_workers": 1, "verbose": 2, "stdout": told}).run_on_spark(None)  # type: ignore[arg-type]
    assert "the preflight" in told.getvalue()
    assert "the job" in told.getvalue()


def test_results_are_a_list_with_the_jobs_report() -> None:
    report = JobReport(seconds=2.0, phases={"training": 1.5})
    returned = decode_results(LaunchResult((encode_result("first", 0), encode_result(None, 1)), report))
    assert returned == ["first", None]
    for same in (returned, pickle.loads(pickle.dumps(returned))):
        assert isinstance(same, list)
        assert same.report.goodput == 0.75


def test_a_script_takes_no_args_of_a_function(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="a script takes its arguments one by one after its path"):
        prepare(tmp_path / "train.py", (), {"args": ("--lr", "0.1")})


@pytest.mark.parametrize(("args", "kwargs"), [((), {}), ((1, 2, 3), {}), ((1,), {"rate": 2}), ((1,), {2: 3})])
def test_arguments_that_the_function_does_not_take_are_refused(
    args: tuple[int, ...], kwargs: dict[Any, int]
) -> None:
    def train(steps: int, lr: float = 0.1) -> None:
        """A function of one or two arguments."""

    with pytest.raises(InvalidInput, match=r"^train\(steps: .* in args and .* in kwargs: "):
        prepare(train, (args, kwargs), {})
    prepare(train, ((1,), {"lr": 2}), {})

    @wraps(train)
    def give_steps(*given: Any, **named: Any) -> None:
        train(1, *given, **named)

    prepare(give_steps, ((), {"lr": 2}), {})


class Answering:
    """As a mock, or a proxy of a remote object."""

    def __getattr__(self, name: str) -> Any:
        return [name]


REMOTE = Answering()


def test_a_global_that_answers_to_any_name_is_no_module() -> None:
    def train() -> Any:
        import torch

        return torch, REMOTE

    assert "torch" in prepare(train, (), {}).program.imports


def make_object(kind: str, module: str = "pyspark.sql.session") -> Any:
    """An object of a class of that name, as pyspark has them: pickling the real ones needs a JVM to refuse."""
    return type(kind, (), {"__module__": module})()


def capture_in_closure(thing: Any) -> Callable[[], Any]:
    session = thing
    return lambda: session


def capture_deep(thing: Any) -> Callable[[], Any]:
    session = thing

    def inner() -> Any:
        return session

    def outer() -> Any:
        return [inner() for _ in range(2)]

    return outer


class SessionHolder:
    def __init__(self, thing: Any) -> None:
        self.session = thing

    def method(self) -> Any:
        return self.session


PLACES: list[Callable[[Any], Callable[[], Any]]] = [
    capture_in_closure,
    capture_deep,
    lambda thing: SessionHolder(thing).method,
    lambda thing: partial(lambda session: session, session=thing),
]


def prepare_global(thing: Any) -> None:
    module = types.ModuleType("__main__")
    exec("def fn():\n    return session.range(3)", module.__dict__)
    module.session = thing  # type: ignore[attr-defined]
    prepare(module.fn, (), {})


CALLS: list[Callable[[Any], Any]] = [
    *(lambda thing, place=place: prepare(place(thing), (), {}) for place in PLACES),
    lambda thing: prepare(dict, ((), {"session": thing}), {}),
    prepare_global,
]


@pytest.mark.parametrize("call", CALLS)
def test_a_captured_object_of_the_driver_is_named(call: Callable[[Any], Any]) -> None:
    """tests/spark/test_run.py has objects of other kinds."""
    with pytest.raises(InvalidInput, match=r"'session', a SparkSession, which lives on Spark's driver"):
        call(make_object("SparkSession"))


def test_captured_objects_are_found_in_defaults_and_arguments() -> None:
    rdd = make_object("RDD")
    for fn, args in ((lambda session=rdd: session, ()), (print, ((1, rdd),))):
        with pytest.raises(InvalidInput, match="RDD"):
            prepare(fn, args, {})


def test_java_objects_are_refused_and_plain_values_of_pyspark_are_not() -> None:
    with pytest.raises(InvalidInput, match="Java object"):
        user_code.dumps(make_object("JavaObject", "py4j.java_gateway"))
    row = make_object("Row", "pyspark.sql.types")
    assert user_code._find_driver_only_kind(row) is None


def test_functions_are_pickled_as_by_cloudpickle() -> None:
    numbers = [1, 2]
    fn, args, kwargs = cloudpickle.loads(user_code.dumps((lambda x: (x, numbers), (3,), {})))
    assert fn(*args, **kwargs) == (3, [1, 2])


def test_positional_arguments_are_horovods() -> None:
    call = prepare(print, ((1,), {"sep": ""}, 3), {})
    assert call.options.num_workers == 3
    for given, named in [
        (((1,), {}, 3, 4), {}),
        (((1,),), {"args": (2,)}),
        (((), {}, 3), {"num_workers": 3}),
        (("text",), {}),
        (((), [1]), {}),
    ]:
        with pytest.raises(InvalidInput):
            prepare(print, given, named)


LOCK = threading.Lock()


@pytest.mark.parametrize(
    ("fn", "words"),
    [(3, "function"), ("/nowhere/train.py", "script"), (partial(print, LOCK), "cannot be pickled")],
)
def test_something_that_is_neither_function_nor_script_is_refused(fn: Any, words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        prepare(fn, (), {})


def test_a_call_on_a_worker_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["spark_elastic.clusters.run.call"], "get_context", object)
    with pytest.raises(InvalidInput, match="on a worker"):
        prepare(print, (), {})


def test_pickling_tells_which_modules_loading_will_import() -> None:
    modules: dict[str, None] = {}
    user_code.dumps([partial(json.dumps), np.float32, SessionHolder(None)], modules=modules)
    assert {"json", "numpy", __name__} <= {*modules}


# ---- early imports; nothing is imported


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
        "sklearn.linear_model._base", "spark_elastic.torch", OWN_IMPORT,
    }  # fmt: skip
    assert list_early_imports(call.program, call.preload)[:2] == ("A=b", "mine")
    assert {"torch", "tensorflow", "mine"} <= set(
        find_packages(list_early_imports(call.program, call.preload))
    )
    assert prepare(train, (), {"preload": []}).program.imports == (OWN_IMPORT,)
    assert prepare(print, (), {}).program.imports == (OWN_IMPORT,)
