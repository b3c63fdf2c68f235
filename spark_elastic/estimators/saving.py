"""Packed objects beside the metadata of Spark ML: rows of a Parquet table, written and read by Spark.

PATH/metadata   Spark ML's own, with `format`
PATH/data       part, number, content: bytes by the part's name, in pieces far below Spark's limits on one value
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import cloudpickle
import torch
from pyspark.errors import PySparkException
from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReader, MLWritable, MLWriter
from pyspark.sql import SparkSession

from spark_elastic.clusters.spark.host_facts import has_context
from spark_elastic.data.store import Store
from spark_elastic.errors import ElasticError, InvalidInput, StoreError
from spark_elastic.estimators.dataframes.store_access import describe_cause, escape_pattern

FORMAT = 2
CHUNK = 16 << 20  # bytes


def find_metadata_session(spark: SparkSession) -> Any:
    """What Spark ML writes metadata with: the SparkContext, as before Spark 4; without one, the session."""
    return spark.sparkContext if has_context(spark) else spark


class Writer(MLWriter):
    """Writes an estimator or a model, whose `list_saved` says what; `overwrite()` needs no JVM."""

    def __init__(self, instance: Any) -> None:
        super().__init__()
        self._instance = instance

    def saveImpl(self, path: str) -> None:
        extra, parameters, parts = self._instance.list_saved()
        session, extra = find_metadata_session(self.sparkSession), {"format": FORMAT, **extra}
        DefaultParamsWriter.saveMetadata(self._instance, path, session, extra, parameters)
        write(self.sparkSession, path, parts)

    def save(self, path: Any) -> None:
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            raise InvalidInput(f"save() takes the path or url of a new folder; got {path!r}.")
        try:
            super().save(os.fspath(path))
        except (ElasticError, PySparkException):  # the latter says itself that there is something at the path
            raise
        except Exception as error:  # of the JVM or pickle
            raise StoreError(
                f"{path} cannot be written, with {describe_cause(error)}: give a new folder that Spark can write "
                "to, or call write().overwrite().save()."
            ) from error

    def _handleOverwrite(self, path: str) -> None:
        if has_context(self.sparkSession):
            super()._handleOverwrite(path)
        else:
            folder, name = os.path.split(path.rstrip("/"))
            Store.open(folder or ".").remove_tree(name)


def write(spark: SparkSession, path: str, parts: Mapping[str, bytes]) -> None:
    rows = [
        (part, number, bytearray(content[start : start + CHUNK]))
        for part, content in parts.items()
        for number, start in enumerate(range(0, len(content), CHUNK))
    ]
    table = spark.createDataFrame(rows, "part string, number int, content binary")
    table.write.parquet(os.path.join(path, "data"))


def read(spark: SparkSession, path: str) -> dict[str, bytes]:
    rows = spark.read.parquet(os.path.join(escape_pattern(path), "data")).collect()
    parts: dict[str, list[Any]] = {}
    for row in sorted(rows, key=lambda row: row.number):
        pieces = parts.setdefault(row.part, [])
        if row.number != len(pieces):
            raise EOFError(f"piece {len(pieces)} of {row.part!r} is missing")
        pieces.append(bytes(row.content))
    return {part: b"".join(pieces) for part, pieces in parts.items()}


@contextmanager
def name_incomplete(path: str, kind: type) -> Iterator[None]:
    """Loading a `kind` from the path inside the block raises a StoreError that names both, whatever is wrong there."""
    try:
        yield
    except ElasticError:
        raise
    except Exception as error:  # of Spark, the JVM, pickles or the user's classes
        raise StoreError(
            f"{path} cannot be loaded as {kind.__name__}, with {describe_cause(error)}: give the whole folder that "
            "save() wrote, and have the modules here that it was made with."
        ) from error


def read_metadata(spark: SparkSession, path: str, kind: type) -> dict[str, Any]:
    """What `kind` saved at the path beside its parts. Raises InvalidInput if another class saved it, and StoreError."""
    with name_incomplete(path, kind):
        metadata: dict[str, Any] = DefaultParamsReader.loadMetadata(
            escape_pattern(path), find_metadata_session(spark)
        )
    check_class(metadata["class"], path, kind)
    if metadata.get("format") != FORMAT:
        raise StoreError(
            f"{path} has format {metadata.get('format')}, and this release reads {FORMAT}: load it with its release."
        )
    return metadata


class Reader(MLReader[Any]):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self._kind = kind

    def load(self, path: str) -> Any:
        metadata = read_metadata(self.sparkSession, path, self._kind)
        with name_incomplete(path, self._kind):
            return self._kind.load_saved(metadata, read(self.sparkSession, path))


class Savable(MLWritable):  # type: ignore[misc,unused-ignore]
    """What Spark ML saves by its `list_saved`, and reads back by its `load_saved`."""

    def write(self) -> MLWriter:
        return Writer(self)

    @classmethod
    def read(cls) -> MLReader[Any]:
        return Reader(cls)


def check_class(found: str, path: str, kind: type) -> None:
    """Raise InvalidInput if a class of another name saved what is at the path; one of the user's may derive from it."""
    name = found.rpartition(".")[2]
    if name != kind.__name__ and found.startswith(("spark_elastic.", "pyspark.", "org.apache.spark.")):
        raise InvalidInput(f"{name} saved what is at {path}, and not {kind.__name__}: call {name}.load().")


# A fitted model as bytes in two parts: tensors that load without running code, and the rest of the module.
#
# Every tensor of the module (parameters, buffers of both kinds, attributes) goes into a file of `torch.save` that is
# read with `weights_only=True`; the module's objects and code go through cloudpickle, in which each tensor is only a
# key. Tensors that two places of the module share stay shared.


@dataclass(frozen=True)
class Packed:
    """A torch module as bytes."""

    architecture: bytes  # cloudpickle, to be loaded only from places that are trusted
    weights: bytes  # tensors by name

    def parts(self) -> dict[str, bytes]:
        return {"architecture": self.architecture, "weights": self.weights}

    def unpack(self) -> Any:
        """What was packed, its tensors on the CPU."""
        tensors = torch.load(io.BytesIO(self.weights), map_location="cpu", weights_only=True)
        return _Unpickler(io.BytesIO(self.architecture), tensors).load()


def pack(thing: Any, model: torch.nn.Module | None = None) -> Packed:
    """Take a module apart, or anything that holds tensors, which `model` then names; it stays as it is."""
    model = thing if isinstance(thing, torch.nn.Module) else model
    named = [] if model is None else [*model.named_parameters(), *model.named_buffers()]
    file = io.BytesIO()
    pickler = _Pickler(file, {id(tensor): name for name, tensor in named})
    pickler.dump(thing)
    weights = io.BytesIO()
    torch.save(pickler.tensors, weights)
    return Packed(file.getvalue(), weights.getvalue())


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc,unused-ignore]
    """Leaves tensors out, each under its name in the module, or a number if it has none."""

    def __init__(self, file: io.BytesIO, names: dict[int, str]) -> None:
        super().__init__(file)
        self._names = names
        self.tensors: dict[str, torch.Tensor] = {}
        self._keys: dict[int, str] = {}

    def persistent_id(self, thing: Any) -> tuple[str, bool, bool] | None:
        if not isinstance(thing, torch.Tensor):
            return None
        key = self._keys.get(id(thing))
        if key is None:
            key = self._names.get(id(thing), f"#{len(self.tensors)}")
            # A contiguous copy: a view would take its whole storage along.
            self.tensors[key] = thing.detach().cpu().clone(memory_format=torch.contiguous_format)
            self._keys[id(thing)] = key
        return key, isinstance(thing, torch.nn.Parameter), thing.requires_grad


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(file)
        self._tensors, self._parameters = tensors, dict[str, torch.Tensor]()

    def persistent_load(self, identity: Any) -> torch.Tensor:
        key, is_parameter, requires_grad = identity
        if key not in self._parameters:
            tensor = self._tensors[key].requires_grad_(requires_grad)
            self._parameters[key] = torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor
        return self._parameters[key]
