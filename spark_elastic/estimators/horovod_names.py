"""What `horovod.spark` and its modules have, for `spark_elastic.as_horovod`: estimators, models, a backend, a store."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spark_elastic.clusters.run.call import Results, run

run_elastic = run
MIN_PL_VERSION = "2.0"  # of Lightning


class Backend:
    """How many workers train. Spark runs them."""

    def __init__(
        self, num_proc: int | None = None, env: Mapping[str, str] | None = None, **options: Any
    ) -> None:
        """options: further ones of `spark_elastic.run`, such as verbose and stdout."""
        self._num_proc, self._env, self._options = num_proc, env, options

    def num_processes(self) -> int | None:
        """None: Spark's default parallelism."""
        return self._num_proc

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Results[Any]:
        variables = {**(self._env or {}), **(env or {})}
        return run(fn, args, kwargs, num_workers=self._num_proc, env=variables)


SparkBackend = Backend


class Store:
    """The url of a store."""

    def __init__(self, prefix_path: str, **options: Any) -> None:
        self.prefix_path = str(prefix_path)

    @classmethod
    def create(cls, prefix_path: str, **options: Any) -> Store:
        return cls(prefix_path, **options)

    def __str__(self) -> str:
        return self.prefix_path


LocalStore = FilesystemStore = HDFSStore = DBFSLocalStore = Store


def _translate(values: Mapping[str, Any]) -> dict[str, Any]:
    given = dict(values)
    backend = given.pop("backend", None)
    if backend is not None and given.get("num_proc") is None and backend.num_processes() is not None:
        given["num_proc"] = backend.num_processes()
    if isinstance(given.get("store"), Store):
        given["store"] = str(given["store"])
    return given


def _make_estimator(kind: type[Any]) -> type[Any]:
    class HorovodEstimator(kind):  # type: ignore[misc]
        __doc__ = kind.__doc__

        def setParams(self, **values: Any) -> Any:
            return super().setParams(**_translate(values))

        def setStore(self, value: Any) -> Any:
            return self.setParams(store=value)

    return HorovodEstimator


# Name -> module and name of what it is, or is made of.
_OTHERS = {
    "TorchEstimator": ("torch_estimator", "ElasticTorchEstimator"),
    "TorchModel": ("torch_model", "ElasticTorchModel"),
    "KerasEstimator": ("keras_estimator", "ElasticKerasEstimator"),
    "KerasModel": ("keras_model", "ElasticKerasModel"),
}


def __getattr__(name: str) -> Any:
    if name not in _OTHERS:
        raise AttributeError(f"spark_elastic has nothing in place of Horovod's {name!r} here")
    module, ours = _OTHERS[name]
    kind = getattr(importlib.import_module(f"spark_elastic.estimators.{module}"), ours)
    if name.endswith("Estimator"):
        kind = _make_estimator(kind)
        kind.__name__ = kind.__qualname__ = name
    globals()[name] = kind
    return kind
