"""Tries copies of a user's model, losses and metrics on two rows of the data, on the driver, before workers start.

A worker would fail in the same way, seconds later and with a traceback of another machine. A training that works must
never be refused: what may fail in this process alone says nothing, and neither does what fails on two rows alone. Knows
no framework. The caller's thread.
"""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import cloudpickle
import numpy as np

from spark_elastic.data.loader import StepRows
from spark_elastic.data.reading.decoding import ColumnArrays
from spark_elastic.data.reading.readers import find_sample_group, read_sample_rows
from spark_elastic.errors import ElasticError, InvalidInput
from spark_elastic.training.spec import TrainSpec
from spark_elastic.training.transformation import RowBatch, Transformation
from spark_elastic.training.transformation_pool import bind_transformation

log = logging.getLogger("spark_elastic")

# Bytes of a model that is copied to be tried, and of a row group that is read for it. Workers alone try larger ones.
MAX_BYTES = 1 << 28
# Bytes of the rows as the model takes them: it may need a hundred times as many, and the driver may have little memory.
MAX_ROW_BYTES = 1 << 26
MORE_ROWS = 16  # on which a model is tried that fails on two: it may compare rows with one another
MAX_TEXT = 400  # characters of an error that a sentence shows
# Errors about what this process may lack and a worker has: devices, peers, files, compilers, servers, a step's context.
_OF_THIS_PROCESS = re.compile(
    r"cuda|gpu|device|driver|process group|horovod|no such file|unable to open|compil|connect|memory|'NoneType'"
    r"|torch\._dynamo|torch\._inductor",
    re.IGNORECASE,
)
# Of errors of Keras and TensorFlow: the operation and its device, colours, and a list of all arguments.
_NOISE = re.compile(r"\{\{function_node .*?\}\}|\x1b\[\d*m|\s+Arguments received by .*", re.DOTALL)


class Failure(NamedTuple):
    """What the user's code raised, and on which rows."""

    rows: StepRows  # that it was called with
    error: Exception  # as it was raised


def check_runs(
    spec: TrainSpec, run: Callable[[StepRows], object], describe: Callable[[Failure], str]
) -> None:
    """Raise InvalidInput if `run`, called with rows of the data, fails by the user's code.

    Args:
        describe: the sentence for an error of the user's code; an InvalidInput has its own.
    """
    failure = _find_failure(spec, run)
    if failure is None:
        return
    if isinstance(failure.error, InvalidInput):
        raise failure.error
    raise InvalidInput(describe(failure)) from failure.error


def _find_failure(spec: TrainSpec, run: Callable[[StepRows], object]) -> Failure | None:
    """Call `run` with two rows and, if it fails, with more; a worker has `batch_size` at once, or fewer.

    Returns the first failure if both calls fail by the user's code; None if the model works, or if nothing is known.
    """
    sample = read_rows(spec)
    if sample is None:
        return None
    first: Failure | None = None
    most = spec.config.data.batch_size
    for count in sorted({min(2, most), min(MORE_ROWS, most)}):
        rows = StepRows(
            0, 0, count, np.arange(count), {k: v[np.arange(count) % 2] for k, v in sample.items()}
        )
        try:
            run(rows)
        except Exception as error:  # of the user's code
            if _may_be_of_this_process(error):
                log.debug("the model was not tried on two rows: %r", error)
                return None
            first = first or Failure(rows, error)
        else:
            return None
    return first


def read_rows(spec: TrainSpec) -> ColumnArrays | None:
    """Two rows, and two more; None if that is too much to read here, or if workers alone can read them."""
    names = list(dict.fromkeys(spec.config.data.used_cols))
    store, manifest = spec.rows.data, spec.rows.manifest
    if find_sample_group(manifest, names).bytes > MAX_BYTES:
        return None
    try:
        return read_sample_rows(store, manifest, names, next(iter(spec.config.data.label_cols), None))
    except Exception as error:
        log.debug("the model was not tried on two rows: %r", error)
        return None


def _may_be_of_this_process(error: Exception) -> bool:
    if isinstance(error, ElasticError):
        return not isinstance(error, InvalidInput)
    if isinstance(error, OSError | ImportError | MemoryError):
        return True
    if isinstance(error, KeyError):  # a variable of the environment that executors have
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        return frame.f_globals.get("__name__") == "os"
    return bool(_OF_THIS_PROCESS.search(f"{type(error).__module__} {_format(error)}"))


def _format(error: Exception) -> str:
    return " ".join(_NOISE.sub("", str(error)).split()).rstrip(".")


def describe_failure(
    failure: Failure, taken: Mapping[str, str] = MappingProxyType({}), what: str = "the model or the loss"
) -> str:
    """The sentence for the user.

    Args:
        taken: type and shape of columns as the model takes them; others are described as they are stored.
        what: may have failed.
    """
    rows, error = failure
    given = ", ".join(
        f"{name!r} of {taken.get(name) or f'{array.dtype} {array.shape}'}"
        for name, array in rows.columns.items()
    )
    text = _format(error)
    text = text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} ..."
    tried = "one row" if len(rows) == 1 else "two rows"
    kind = type(error).__name__
    return f"{what} fails on {tried} of the data, {given}, with {kind}: {text}."


def transform_rows(spec: TrainSpec, transformation: Transformation | None, rows: StepRows) -> StepRows:
    """The rows as the model takes them, as in training. Raises ElasticError if they are too large to be tried here."""
    bound = bind_transformation(spec.config, transformation)
    if bound is not None:
        batch = RowBatch(rows.columns, rows.row_ids, 0, (), augments=True)
        try:
            rows = replace(rows, columns=bound.apply(batch))
        except Exception as error:
            if isinstance(error, InvalidInput) or _may_be_of_this_process(error):
                raise
            if any(c.dtype == object and isinstance(c.flat[0], str) for c in rows.columns.values()):
                raise ElasticError("strings may be paths of files that executors alone see") from error
            raise InvalidInput(describe_failure(Failure(rows, error), what="transformation_fn")) from error
    size = sum(column.nbytes for column in rows.columns.values())
    if size > MAX_ROW_BYTES:
        raise ElasticError(f"{len(rows)} rows have {size} bytes")
    return rows


def has_hook(callbacks: Iterable[Any], names: Iterable[str], known: tuple[str, ...]) -> bool:
    """Whether one of the callbacks has one of these hooks, which may do something to the model that it needs.

    Args:
        known: beginnings of the modules whose hooks do not.
    """
    hooks = [getattr(callback, name) for callback in callbacks for name in names]
    return not all(str(getattr(hook, "__module__", "")).startswith(known) for hook in hooks)


def copy_objects(things: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copies as workers get them, which the user's code may change, with the globals of a script or notebook. What two
    of them share stays shared."""
    copies: tuple[Any, ...] = cloudpickle.loads(cloudpickle.dumps(things))
    return copies
