"""petastorm's schemas as its releases pickled them, and pickles that are none of them."""

from __future__ import annotations

import pickle
import sys
from collections import OrderedDict, namedtuple
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from spark_elastic.data.reading.unischema import load_unischema

NAMES = ("name", "numpy_dtype", "shape", "codec", "nullable")


def build_schema(package: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A schema of classes that have the names of petastorm's in a module of that package."""
    unischema, codecs = ModuleType(f"{package}.unischema"), ModuleType(f"{package}.codecs")
    field = type("UnischemaField", (namedtuple("UnischemaField", NAMES),), {"__slots__": ()})
    schema, codec = type("Unischema", (), {}), type("CompressedNdarrayCodec", (), {})
    for module, classes in ((unischema, (field, schema)), (codecs, (codec,))):
        for each in classes:
            each.__module__ = module.__name__
            setattr(module, each.__name__, each)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    parts = package.split(".")
    for parent in (".".join(parts[: count + 1]) for count in range(len(parts))):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    whole: Any = schema()
    fields = [
        field("x", np.float32, (2, None), codec(), False),  # type: ignore[call-arg]
        field("n", np.dtype("uint8"), (), None, False),  # type: ignore[call-arg]
        field("s", np.str_, (), None, True),  # type: ignore[call-arg]
    ]
    whole._name, whole._fields = "Rows", OrderedDict((each.name, each) for each in fields)  # type: ignore[attr-defined]
    return whole


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("package", ["petastorm", "av.ml.dataset_toolkit"])
def test_a_schema_is_read_whichever_release_pickled_it(
    monkeypatch: pytest.MonkeyPatch, package: str, protocol: int
) -> None:
    pickled = pickle.dumps(build_schema(package, monkeypatch), protocol)
    found = load_unischema(pickled)
    assert [(each.name, each.dtype, each.shape, each.codec_name) for each in found.values()] == [
        ("x", "float32", (2, None), "compressed_ndarray"),
        ("n", "uint8", (), ""),
        ("s", None, (), ""),
    ]


def test_fields_that_an_old_pyspark_pickled_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def _restore(name: str, fields: Any, values: Any) -> Any: ...

    class ForeignRow:
        def __init__(self, values: tuple[Any, ...]) -> None:
            self.values = values

        def __reduce__(self) -> Any:
            return _restore, ("UnischemaField", NAMES, self.values)

    schema = build_schema("petastorm", monkeypatch)
    schema._fields = {name: ForeignRow(tuple(field)) for name, field in schema._fields.items()}
    serializers = ModuleType("pyspark.serializers")
    _restore.__module__, _restore.__qualname__ = serializers.__name__, "_restore"
    serializers._restore = _restore  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pyspark", ModuleType("pyspark"))
    monkeypatch.setitem(sys.modules, serializers.__name__, serializers)
    found = load_unischema(pickle.dumps(schema))
    assert (found["x"].shape, found["n"].dtype) == ((2, None), "uint8")


@pytest.mark.parametrize(
    ("pickled", "says"),
    [
        (b"cos\nsystem\n(S'touch unpickled'\ntR.", "it names (os|posix).system"),
        (b"cbuiltins\neval\n(S'1'\ntR.", "it names builtins.eval"),
        (b"cpetastorm.etl.dataset_metadata\nload\n.", "it names petastorm.etl"),
        (b"cnumpy\nload\n(S'/etc/passwd'\ntR.", "not callable"),
        (b"cpetastorm.unischema\nUnischema\n(N(dS'_fields'\nNstb.", "missing 1 required"),
        (b"\x80\x04.", "."),
    ],
)
def test_any_other_pickle_is_refused_and_runs_nothing(pickled: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        load_unischema(pickled)
