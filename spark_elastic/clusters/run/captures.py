"""Finds objects that a function captures and that exist only on Spark's driver, such as a SparkSession. It looks at
exactly what would be shipped, while that is pickled; errors call an object by its name in the user's code."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

from spark_elastic.errors import InvalidInput
from spark_elastic.worker.pickling import WorkerPickler

DRIVER_ONLY = {
    "Accumulator", "Broadcast", "Column", "DataFrame", "HiveContext", "RDD", "SQLContext", "SparkContext",
    "SparkSession",
}  # fmt: skip
_COLLECT = "collect what the function needs, or write it to a path that workers can read"
ADVICE = {"Broadcast": "pass its value instead", "DataFrame": _COLLECT, "RDD": _COLLECT}


def dumps(call: object, called: str = "", modules: dict[str, None] | None = None) -> bytes:
    """cloudpickle of (fn, args, kwargs), or of another object that errors are to call by a name. modules: gets the
    names of modules that loading it imports. Raises InvalidInput: something is Spark's driver's, or cannot be
    pickled."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, call, called, {} if modules is None else modules).dump(call)
    except InvalidInput:
        raise
    except Exception as error:  # objects may raise anything while they are pickled
        raise InvalidInput(
            f"{called or 'the function or an argument'} cannot be pickled ({error}): create such objects inside the "
            "function that uses them."
        ) from error
    return buffer.getvalue()


class _Pickler(WorkerPickler):
    def __init__(self, file: io.BytesIO, call: object, called: str, modules: dict[str, None]) -> None:
        super().__init__(file)
        self._call, self._called = call, called or "the function"
        self._modules = modules

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | FunctionType) and isinstance(obj.__module__, str):
            self._modules[obj.__module__] = None
        if kind := _find_driver_only_kind(obj):
            name = _find_name(obj, self._call)
            where = f"{name!r}, a {kind}," if name else f"a {kind},"
            advice = ADVICE.get(kind, "get what it needs before, and pass that")
            raise InvalidInput(f"{self._called} uses {where} which lives on Spark's driver only: {advice}.")
        return super().reducer_override(obj)


def _find_driver_only_kind(value: object) -> str | None:
    """The kind of an object that must not be shipped; None for any other object."""
    for parent in type(value).__mro__:
        package = parent.__module__.split(".")[0]
        if package == "py4j":
            return "Java object"
        if package == "pyspark" and parent.__name__ in DRIVER_ONLY:
            return parent.__name__
    return None


def _find_name(wanted: object, call: object) -> str:
    """The name of an object in the user's code; "" if it is nested too deeply."""
    seen: set[int] = set()
    level = [("", call)]
    for _ in range(6):
        deeper = []
        for path, value in level:
            for name, child in _iterate_children(value):
                if child is wanted:
                    return name or path
                if id(child) not in seen:
                    seen.add(id(child))
                    deeper.append((name or path, child))
        level = deeper
    return ""


def _iterate_children(value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with suppress(ValueError):  # a variable that was not assigned yet
                yield name, cell.cell_contents
        around = value.__globals__
        yield from ((name, around[name]) for name in sorted(collect_names(value.__code__)) if name in around)
        yield from (("", default) for default in value.__defaults__ or ())
        yield from (value.__kwdefaults__ or {}).items()
    elif isinstance(value, MethodType):
        yield from (("", value.__self__), ("", value.__func__))
    elif isinstance(value, partial):
        yield from (("", value.func), ("", value.args), ("", value.keywords))
    elif isinstance(value, Mapping):
        yield from ((key if isinstance(key, str) else "", item) for key, item in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from (("", item) for item in value)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        yield from vars(value).items()


def collect_names(code: CodeType) -> set[str]:
    """Global, attribute and module names that the code uses, nested functions included."""
    nested = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return {*code.co_names}.union(*map(collect_names, nested))
