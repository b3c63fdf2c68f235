"""From the parameters of an estimator to one checked request, and trials of the user's objects, before workers start.

Each mistake is one sentence. `FitConfig` checks what training needs; here are the parameters of the driver alone.
Copies of a model, its losses and metrics are tried on two rows of the data: a worker would fail in the same way,
seconds later and with a traceback of another machine. A training that works must never be refused: what may fail in
this process alone says nothing, and neither does what fails on two rows alone. Knows no framework. Caller's thread.
"""

from __future__ import annotations

import logging
import math
import re
import statistics
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Generic, NamedTuple, TypeVar

import cloudpickle
import numpy as np

from spark_elastic.checks import FLAG, FUNCTION, VERBOSE, make_choice, make_kind
from spark_elastic.config import ElasticConfig, build_config
from spark_elastic.data.loader import StepRows
from spark_elastic.data.reading.decoding import ColumnArrays
from spark_elastic.data.reading.readers import find_sample_group, read_sample_rows
from spark_elastic.data.store import parse_store_url
from spark_elastic.data.transformation import RowBatch, Transformation, reshape_results
from spark_elastic.errors import ElasticError, InvalidInput
from spark_elastic.estimators.dataframes.scan import MissingValues
from spark_elastic.runs import checkpoint
from spark_elastic.training.spec import FitConfig, TrainSpec, UserObjects
from spark_elastic.training.trainer import describe_dependent_layers
from spark_elastic.training.transformation_pool import bind_transformation

log = logging.getLogger("spark_elastic")

MATERIALIZE = ("auto", "always", "never")

O = TypeVar("O", bound=UserObjects)  # noqa: E741
M = TypeVar("M")


@dataclass(frozen=True, kw_only=True)
class FitRequest(Generic[O]):
    """What one `fit` was asked for, checked."""

    config: FitConfig  # the parameters of the training, which the workers receive as they are
    objects: O  # the user's model, optimizer, losses and so on
    store: str | None = None  # url or path of the store; None: a folder of this machine
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)  # fsspec's, for the store
    missing: MissingValues = field(default_factory=MissingValues)  # what happens to rows with nulls and NaN
    materialize: str = "auto"  # whether a DataFrame's rows are written: "auto", "always" or "never"
    run_id: str | None = None  # name of the run in the store; None: a new one
    verbose: int = 1  # 0: silent; 1: progress and what workers print; 2: also the log
    keep_data: bool = False  # whether the written rows stay in the store for later fits
    on_progress: Callable[[Mapping[str, Any]], None] | None = None  # gets each report of progress
    elastic: ElasticConfig = field(default_factory=ElasticConfig)  # Ports, addresses, time limits


# Only one thread at a time calls a user's model factory: initial weights come from the process's random generators, and
# parallel fits of several folds call the factories in threads.
MODEL_FACTORY_LOCK = threading.RLock()


def build_request(
    values: Mapping[str, Any], check_objects: Callable[[Mapping[str, Any]], O]
) -> FitRequest[O]:
    """Check the parameters of an estimator, by name; `check_objects` those that are objects."""
    config = FitConfig.from_params(values)
    objects, shapes = check_objects(values), config.data.input_shapes
    if shapes is not None and objects.transformation is not None:  # they are of what it returns
        named = dict(zip(config.data.feature_cols, shapes, strict=True))
        change = {"transformation": reshape_results(objects.transformation, named)}
        objects = replace(objects, **change)  # type: ignore[type-var]
    if config.transformation.transformation_workers and objects.transformation is None:
        raise InvalidInput("transformation_workers apply transformation_fn, which is missing: give both.")
    store, run_id = values["store"], values["run_id"]
    if run_id is not None:
        checkpoint.check_name(run_id)
    return FitRequest(
        config=config,
        objects=objects,
        store=None if store is None else parse_store_url(store),
        storage_options=values["storage_options"] or {},
        missing=MissingValues.parse(values["missing"]),
        materialize=make_choice(*MATERIALIZE)("materialize", values["materialize"]),
        run_id=run_id,
        verbose=VERBOSE("verbose", values["verbose"]),
        keep_data=FLAG("keep_data", values["keep_data"]),
        on_progress=FUNCTION.or_none()("on_progress", values["on_progress"]),
        elastic=build_config(values["config"], values["settings"] or {}),
    )


@contextmanager
def name_failing(parameter: str) -> Iterator[None]:
    """A user's function that raises inside the block raises an InvalidInput with the name of its parameter."""
    try:
        yield
    except ElasticError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(".")
        raise InvalidInput(
            f"the function given as {parameter} fails, with {reason}: call it yourself, as this does, to see where."
        ) from error


def build_model(given: Any, kind: type[M], words: str) -> M:
    """The user's model, or what the user's function makes, with the random numbers that the caller has seeded."""
    if not isinstance(given, kind) and not isinstance(given, type) and callable(given):
        with name_failing("model"):
            given = given()
    if isinstance(given, type):
        raise InvalidInput(f"model is the class {given.__name__}; pass an instance of it.")
    model: M = make_kind(f"{words} or a function that makes one", kind)("model", given)
    return model


def list_callbacks(given: Any, kind: type[M], words: str) -> tuple[M, ...]:
    """The user's callbacks, one or several. Raises InvalidInput if one is none."""
    several = given if isinstance(given, Sequence) else () if given is None else (given,)
    check = make_kind(f"instances of {words}", kind)
    return tuple(check("callbacks", callback) for callback in several)


# ---- trials on two rows of the data

MAX_BYTES = 1 << 28  # of a model that is copied, or a row group that is read; workers alone try larger ones
MAX_ROW_BYTES = 1 << 26  # of the rows as the model takes them, which may need a hundred times as many
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


def check_runs(
    spec: TrainSpec,
    run: Callable[[StepRows], object],
    what: str = "the model or the loss",
    find_cause: Callable[[StepRows], str | None] = lambda rows: None,
    take: Callable[[StepRows], Mapping[str, Any]] = lambda rows: rows.columns,
) -> None:
    """Call `run` with two rows of the data and, if it fails, with more; a worker has `batch_size` at once, or fewer.
    Raises InvalidInput if both fail by the user's code: with the sentence of `find_cause`, else with the error of
    `what`, and the columns as the model takes them (`take`)."""
    sample, most = read_rows(spec), spec.config.data.batch_size
    failures: list[tuple[StepRows, Exception]] = []
    for count in sorted({min(2, most), min(MORE_ROWS, most)}) if sample else ():
        places = np.arange(count)
        rows = StepRows(0, 0, count, places, {name: v[places % 2] for name, v in (sample or {}).items()})
        try:
            run(rows)
        except Exception as error:  # of the user's code
            if _may_be_of_this_process(error):
                log.debug("the model was not tried on two rows: %r", error)
                return
            failures.append((rows, error))
        else:
            return
    for rows, failure in failures[:1]:
        if isinstance(failure, InvalidInput):
            raise failure
        raise InvalidInput(find_cause(rows) or _describe_failure(take(rows), failure, what)) from failure


def read_rows(spec: TrainSpec) -> ColumnArrays | None:
    """Two rows, and two more; None if that is too much to read here, or if workers alone can read them."""
    names = list(dict.fromkeys(spec.config.data.used_cols))
    store, manifest = spec.rows.data, spec.rows.manifest
    if find_sample_group(manifest, names)[1] > MAX_BYTES:
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


def _describe_failure(columns: Mapping[str, Any], error: Exception, what: str) -> str:
    kinds = {n: f"{str(v.dtype).removeprefix('torch.')} {tuple(v.shape)}" for n, v in columns.items()}
    given = ", ".join(f"{name!r} of {kind}" for name, kind in kinds.items())
    text = _format(error)
    text = text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} ..."
    tried = "one row" if {len(values) for values in columns.values()} == {1} else "two rows"
    return f"{what} fails on {tried} of the data, {given}, with {type(error).__name__}: {text}."


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
            raise InvalidInput(_describe_failure(rows.columns, error, "transformation_fn")) from error
    size = sum(column.nbytes for column in rows.columns.values())
    if size > MAX_ROW_BYTES:
        raise ElasticError(f"{len(rows)} rows have {size} bytes")
    return rows


def has_hook(callbacks: Iterable[Any], names: Iterable[str], known: tuple[str, ...]) -> bool:
    """Whether a callback has one of these hooks, which the model may need; those of `known` modules do not count."""
    hooks = [getattr(callback, name) for callback in callbacks for name in names]
    return not all(str(getattr(hook, "__module__", "")).startswith(known) for hook in hooks)


def copy_objects(things: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copies as workers get them, which the user's code may change. What two of them share stays shared."""
    copies: tuple[Any, ...] = cloudpickle.loads(cloudpickle.dumps(things))
    return copies


_ROWS = np.array([0, 1, 0, 0, 2, 1, 3, 2])  # of `read_rows`, each twice: labels that are compared have pairs
_DRAWS = 8  # tries of a loss that draws random numbers
STEP_ADVICE = "set loss_scope='step' to compare all rows of each step"
TOLERANCE, TOLERANCE_16 = 1e-3, 3e-2  # of rounding, relative to the loss; the second for numbers of 16 bits


class PartLoss(NamedTuple):
    """The loss of some rows."""

    total: float  # as `LossResult` has it
    denominator: float  # likewise
    slope: float  # derivative of the total in one direction, the same for all parts

    @property
    def value(self) -> float:
        """As the user's function returned it."""
        return self.total / (self.denominator or 1.0)

    @property
    def value_slope(self) -> float:
        return self.slope / (self.denominator or 1.0)


@dataclass(frozen=True)
class LossTrial:
    """A loss that is to be tried on some rows."""

    # The loss of a part of the rows, given the seed for what it draws, and whether the outputs (or the weights) are
    # moved: where those of a new model are all zero, a loss that compares them shows nothing.
    measure: Callable[[slice, int, bool], PartLoss]
    find_layer: Callable[[], str | None]  # finds a layer whose output for a row depends on other rows
    is_apart: bool  # whether `measure` computes the loss alone, of outputs of all rows
    tolerance: float  # how far equal losses may differ by rounding


class _Finding(NamedTuple):
    couples: bool  # whether rows are compared; else it is a sum, or a mean with other weights than the rows
    rows: int  # that showed it
    values: tuple[float, float, float]  # of these rows, and of two parts


def check_loss_scope(
    spec: TrainSpec, what: str, advice: str, prepare: Callable[[StepRows], LossTrial]
) -> None:
    """Raise InvalidInput if the loss that `what` computes compares rows and `loss_scope` does not say whose; warn once
    of what else depends on the division. advice: what a user may do instead."""
    config = spec.config
    most = min(len(_ROWS), config.data.batch_size)
    over_step = config.loss.loss_scope == "step"
    # With one worker, and with virtual shares, a step is cut alike for any number of workers.
    is_alike = bool(config.exchange.shares) or config.world.max_workers == 1
    sample = None if most == 1 or (is_alike and not over_step) else read_rows(spec)
    if sample is None:
        return
    columns = {name: each[_ROWS[:most]] for name, each in sample.items()}
    rows = StepRows(0, 0, most, np.arange(most), columns)
    finding, layer, is_tried = None, None, True
    try:
        trial = prepare(rows)
        for moved, count in product((False, True), sorted({2, most})):
            if finding is not None and finding.couples:
                break
            try:
                finding = _find_coupling(trial, count, moved) or finding
            except Exception as error:  # a loss may need more rows, or other outputs
                is_tried = False
                log.debug("the loss was not tried on parts of %d rows: %r", count, error)
        if trial.is_apart or (finding is not None and finding.couples):
            layer = trial.find_layer()
    except Exception as error:  # what fails on these rows, or in this process alone, says nothing
        if isinstance(error, InvalidInput) and over_step:
            raise
        log.debug("the loss was not tried on parts of rows: %r", error)
        return
    if layer is not None and not is_alike:
        log.warning("%s", describe_dependent_layers([(layer, "it mixes the rows of a batch")]))
    if over_step and finding is None and is_tried:
        log.warning(
            "loss_scope='step' is for a loss that compares rows, and %s does not, as far as a few rows show: leave it "
            "out, since it has outputs gathered and most of them computed twice",
            what,
        )
    if over_step or finding is None or (layer is not None and not trial.is_apart):
        return
    whole, first, rest = finding.values
    shown = f"of {finding.rows} rows of the data it is {whole:.5g}, of two parts of them {first:.5g} and {rest:.5g}"
    if finding.couples and config.loss.loss_scope is None:
        raise InvalidInput(
            f"{what} compares the rows of a batch with each other ({shown}), so that the trained weights would depend "
            f"on the number of workers: {advice}, or set loss_scope='worker' to let each worker compare its own rows."
        )
    how = "is neither the mean of the rows' losses nor one for each"
    if finding.couples:
        how = "compares the rows of a batch"
    warning = "the trained weights depend on the number of workers through %s, which %s (%s)"
    log.warning(warning, what, how, shown)


def _find_coupling(trial: LossTrial, count: int, moved: bool) -> _Finding | None:
    """What the first `count` rows show: nothing if the losses of two parts of them, and their slopes, add up."""
    parts, tolerance = (slice(0, count), slice(0, count // 2), slice(count // 2, count)), trial.tolerance
    gaps: list[float] = []
    finding, measured = None, "total"
    for seed in range(_DRAWS):
        whole, first, rest = found = [trial.measure(part, seed, moved) for part in parts]
        if not gaps and tolerance < TOLERANCE_16:  # slopes of 16 bits are too rough
            measured = max("total", "slope", key=lambda name: abs(_compute_gap(found, name)))
        gap = _compute_gap(found, measured)
        if abs(gap) <= tolerance or (gaps and gap * gaps[0] < 0):
            return None
        if not gaps:
            if not math.isclose(trial.measure(parts[0], seed, moved).total, whole.total, rel_tol=1e-6):
                return None  # it counts calls, or draws from a generator of its own
            couples = not _is_mean_or_sum(whole, first, rest, tolerance)
            finding = _Finding(couples, count, (whole.value, first.value, rest.value))
        gaps.append(gap)
        if len(gaps) == 2 and abs(gap - gaps[0]) <= 1e-6:
            return finding  # it draws nothing
    is_clear = abs(statistics.fmean(gaps)) > 3 * statistics.stdev(gaps)
    return finding if is_clear else None


def _compute_gap(found: Sequence[PartLoss], measured: str) -> float:
    """How far the parts are from the whole, relative to all three; 0 if one of them is NaN or infinite."""
    whole, first, rest = (getattr(each, measured) for each in found)
    gap, scale = whole - first - rest, abs(whole) + abs(first) + abs(rest)
    return gap / scale if scale and math.isfinite(scale) else 0.0


def _is_mean_or_sum(whole: PartLoss, first: PartLoss, rest: PartLoss, tolerance: float) -> bool:
    """Whether the loss is a sum over rows, or a mean with weights that follow from the rows, such as those of classes:
    its slope then has the same weights. Those of Dice follow from the outputs."""
    apart = first.value - rest.value
    share = (whole.value - rest.value) / apart if apart else -1.0
    for one, other in ((1.0, 1.0), (share, 1.0 - share)):
        pairs = (
            (whole.value, one * first.value, other * rest.value),
            (whole.value_slope, one * first.value_slope, other * rest.value_slope),
        )
        rounding = [tolerance * sum(map(abs, each)) for each in pairs]
        gaps = [abs(all_ - a - b) for all_, a, b in pairs]
        if min(one, other) >= 0 and gaps[0] <= rounding[0] and gaps[1] <= rounding[1]:
            return True
    return False
