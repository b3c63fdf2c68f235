"""The parameters of the estimators as Params of Spark ML: keywords, `setX`/`getX`, `copy`, param maps.

Each stands once with its default, in the signature of `EstimatorParams`. Also Horovod's names: mapped to ours, or
refused with the reason. `FitConfig` and `validation.py` check the values when `fit` is called.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
from pyspark import keyword_only
from pyspark.ml.param import Param, Params

from spark_elastic.config import ElasticConfig, check_setting_names
from spark_elastic.data.store import check_storage_options
from spark_elastic.errors import InvalidInput
from spark_elastic.estimators.outputs import HALF, OutputColumns, find_threshold

if TYPE_CHECKING:
    import keras
    import torch
    from typing_extensions import Self

    from spark_elastic.training.torch.callbacks import Callback

T = TypeVar("T", bound="type[EstimatorParams]")


def to_python_number(value: Any) -> Any:
    """A number of numpy as Python's: grids come from `arange` and `logspace`."""
    return value.item() if isinstance(value, np.generic) else value


def to_names(value: Any) -> list[str]:
    """One or several names of columns, or paths, as a list. Raises InvalidInput for anything else."""
    single = isinstance(value, str | os.PathLike) or not isinstance(value, Iterable)
    names = [value] if single else list(value)
    for name in names:
        if not isinstance(name, str | os.PathLike):
            raise InvalidInput(f"columns are given by name, as 'x' or ['x', 'y']; got {name!r}.")
    return [str(name) for name in names]


def to_optional_names(value: Any) -> list[str] | None:
    return value if value is None else to_names(value)


def to_list(value: Any) -> Any:
    """A tuple as a list, since `explainParams` of Spark ML cannot show tuples."""
    return list(value) if isinstance(value, tuple) else value


def to_numbers(value: Any) -> Any:
    """The same for weights or shapes, with Python's own numbers: a saved model has them as JSON."""
    if not isinstance(value, tuple | list):
        return value
    return [
        tuple(map(to_python_number, each)) if isinstance(each, tuple | list) else to_python_number(each)
        for each in value
    ]


class HiddenOptions(dict[str, Any]):
    """Options that may hold credentials; its repr hides the values."""

    def __repr__(self) -> str:
        return f"{{{', '.join(f'{name!r}: ...' for name in self)}}}"


def hide_values(value: Any) -> Any:
    """A dict as one whose repr hides the values. Raises InvalidInput as `check_storage_options`."""
    return value if value is None else HiddenOptions(check_storage_options(value))


class _Declaration:
    """Replaces itself by a Param, with its accessors, as soon as its name is known."""

    def __init__(self, doc: str, converter: Callable[[Any], Any]) -> None:
        self._doc, self._converter = doc, converter

    def __set_name__(self, owner: type, name: str) -> None:
        parent = Params._dummy()  # type: ignore[no-untyped-call,unused-ignore]
        setattr(owner, name, Param(parent, name, self._doc, self._converter))

        def set_param(self: Any, value: Any) -> Any:
            return self._set(**{name: value})

        def get_param(self: Any) -> Any:
            return self.getOrDefault(name)

        _add_method(owner, f"set{_to_camel(name)}", set_param, f"Set `{name}`: {self._doc}")
        _add_method(owner, f"get{_to_camel(name)}", get_param, f"`{name}`: {self._doc}")


def declare(doc: str, converter: Callable[[Any], Any] = to_python_number) -> Param[Any]:
    """Declare a Param of the attribute's name, with setter and getter such as `setBatchSize`."""
    return _Declaration(doc, converter)  # type: ignore[return-value]


def _to_camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def _add_method(owner: type, name: str, method: Any, doc: str) -> None:
    if name not in vars(owner):
        method.__name__, method.__qualname__, method.__doc__ = name, f"{owner.__name__}.{name}", doc
        setattr(owner, name, method)


ALIASES = {"num_proc": "num_workers", "random_seed": "seed"}  # Horovod's name -> ours
# Horovod's names for whether workers use GPUs where there are some: `device` is then auto, else cpu.
GPU_NAMES = ("use_gpu", "num_gpus")

_PARTITIONS = "row groups are sized for the workers' memory, and rows are shared out one by one"
_READERS = (
    "leave it out, since one thread reads ahead in each worker, bounded in bytes; transformation_workers says how many "
    "processes of it apply transformation_fn"
)
_EPOCH = "an epoch takes every row exactly once"
_FRAME = "it belongs to another framework's estimator"
# Horovod's name -> why it has no meaning here, or what to use.
REFUSED = {
    "backend": "num_workers says how many workers there are, and Spark runs them",
    "backend_env": "set spark.executorEnv.NAME in Spark's configuration",
    "categorical_cols": "index them and name them in feature_cols",
    "continuous_cols": "name them in feature_cols",
    "checkpoint_callback": "checkpoints are written by themselves (checkpoint_steps, checkpoint_seconds); the best "
    "epoch's weights are kept by callbacks=[BestWeights()]",
    "compress_sparse_cols": "sparse vectors are written as dense arrays, which compress as well",
    "custom_objects": _FRAME,
    "data_module": "rows are read from Parquet by one reader, through Arrow",
    "debug_data_loader": "the worker's messages name the step and rows of an error by themselves",
    "initial_epoch": "a fit with the same run_id continues where the run stopped",
    "loader_num_epochs": _EPOCH,
    "log_every_n_steps": "callbacks see every step; on_progress, on the driver, is called four times a second",
    "logger": "use callbacks, which see every step; on_progress, on the driver, is called four times a second",
    "loss_constructors": "pass the losses themselves as loss",
    "mp_start_method": _READERS,
    "partitions_per_process": _PARTITIONS,
    "profiler": "use callbacks",
    "reader_pool_type": _READERS,
    "steps_per_execution": "workers exchange gradients in each step",
    "shuffle_buffer_size": "shuffle=True shuffles all rows of the table",
    "tensorflow_dataset_prefetch_buffer_size": _FRAME,
    "train_async_data_loader_queue_size": _READERS,
    "train_reader_num_workers": _READERS,
    "train_steps_per_epoch": f"{_EPOCH}; use df.limit or df.sample for less",
    "trainer_args": "there is no Trainer: set epochs for its max_epochs, backward_passes_per_step for "
    "accumulate_grad_batches, gradient_clip_norm or gradient_clip_value for gradient_clip_val, and callbacks and "
    "precision here",
    "transformation_edit_fields": "transformation_fn returns its columns undeclared",
    "transformation_removed_fields": "transformation_fn returns its columns undeclared",
    "val_async_data_loader_queue_size": _READERS,
    "val_reader_num_workers": _READERS,
    "validation_steps_per_epoch": "validation looks at every row exactly once",
}
# The same for the Keras estimator, which takes `custom_objects`.
KERAS_REFUSED = {name: reason for name, reason in REFUSED.items() if name != "custom_objects"} | {
    "checkpoint_callback": "checkpoints are written by themselves (checkpoint_steps, checkpoint_seconds); the best "
    "epoch's weights are kept by callbacks=[keras.callbacks.EarlyStopping(..., restore_best_weights=True)]",
    "tensorflow_dataset_prefetch_buffer_size": _READERS,
    "trainer_args": _FRAME,
    # Not Horovod's: parameters of the other estimator.
    "determinism": "only ElasticTorchEstimator can train with the same bits for any number of workers",
    "virtual_shares": "only ElasticTorchEstimator has determinism='bitwise'",
    "verify_steps": "only ElasticTorchEstimator has determinism='bitwise'",
    "compile_model": "compile the Keras model with jit_compile=True",
}
_NOTHING: tuple[Any, ...] = (None, False, 0)


def translate_names(
    values: Mapping[str, Any],
    own: Callable[[str], bool] = lambda name: False,
    refused: Mapping[str, str] = REFUSED,
) -> dict[str, Any]:
    """Parameters by our names. own: whether a name is a parameter of this estimator, whatever others refuse."""
    ours: dict[str, Any] = {}
    for name, value in values.items():
        if name in refused and not own(name):
            if not any(value is nothing for nothing in _NOTHING):
                raise InvalidInput(f"{name} has no meaning here: {refused[name]}.")
            continue
        if name in GPU_NAMES and not own(name):
            if value is not None:
                device = _translate_gpus(name, value)
                if ours.get("device", device) != device or values.get("device") is not None:
                    raise InvalidInput("use_gpu, num_gpus and device say the same: give one of them.")
                ours["device"] = device
            continue
        known = ALIASES.get(name, name)
        if known != name and values.get(known) is not None:
            raise InvalidInput(f"{name} and {known} are the same: give one of them.")
        if known in ours and value is None:
            continue
        ours[known] = value
    return ours


def _translate_gpus(name: str, value: Any) -> str:
    """The `device` that Horovod's use_gpu or num_gpus stands for."""
    if value in (0, 1):
        return "auto" if value else "cpu"
    several = "0 or 1: a worker trains on one GPU, and num_workers on several"
    raise InvalidInput(f"{name} must be {'True or False' if name == 'use_gpu' else several}; got {value!r}.")


class ColumnParams(Params):
    """Which columns go in and what shapes they have; shared by estimator and fitted model."""

    feature_cols = declare("columns fed to the model's forward, in its order", to_optional_names)
    label_cols = declare("columns fed to the loss after the model's output", to_optional_names)
    sample_weight_col = declare("column of row weights, or None")
    input_shapes = declare(
        "shape of one row of each feature column, such as [(1, 28, 28)], or None; with transformation_fn, of what it "
        "returns",
        to_numbers,
    )
    prediction_col = declare(
        "column that `transform` adds: the class (a double) with a loss of classes; else the output, a double for one "
        "number per row or an array"
    )
    probability_col = declare(
        "column that a loss of classes adds: a vector of the class probabilities; None: it is left out"
    )
    raw_prediction_col = declare(
        "column that a loss of classes adds: a vector of what the probabilities are made of, as "
        "BinaryClassificationEvaluator takes it; None: it is left out"
    )
    threshold = declare("of two classes: the probability above which a row is of class 1")
    thresholds = declare(
        "a number for each class, or None: the class has the largest quotient of probability and threshold",
        to_numbers,
    )
    activation = declare(
        "how the output becomes probabilities, by default as the loss implies: softmax (of a number for each class), "
        "exp (of their log-probabilities), sigmoid (of one number, for class 1 of two), probability (one number is "
        "that of class 1) or identity (probabilities of all classes, or of class 1)"
    )
    raw_outputs = declare(
        "whether prediction_col has the model's output as it is with a loss of classes, too"
    )
    output_cols = declare(
        "a column for each output of the model as it is, instead of prediction_col; None: with several outputs "
        "Horovod's LABEL__output for each",
        to_optional_names,
    )
    missing = declare(
        "rows with nulls or NaN, in fit and in transform: refuse or drop; or a dict of nulls (refuse or drop) and nans "
        "(keep, too)"
    )

    def setThreshold(self, value: float) -> Self:
        """Set `threshold`, and clear `thresholds`, as LogisticRegression of Spark ML does."""
        return self._set(thresholds=None, threshold=value)

    def setThresholds(self, value: Sequence[float]) -> Self:
        """Set `thresholds`, and clear `threshold`."""
        self.clear(self.threshold)
        return self._set(thresholds=value)

    def getThreshold(self) -> float:
        """`threshold`, or what `thresholds` of two classes make of it."""
        several = self.getOrDefault("thresholds")
        return float(self.getOrDefault("threshold") if several is None else find_threshold(several))

    def find_output_columns(self, implied: str | None = None) -> OutputColumns:
        """The columns that `transform` is to add. implied: the activation that the loss implies."""
        values = {param.name: self.getOrDefault(param) for param in self.params if self.isDefined(param)}
        named = [param.name for param in self.params if self.isSet(param)]
        return OutputColumns.from_params(values, named, implied)


class EstimatorParams(ColumnParams):
    """The parameters of the estimators of all frameworks."""

    refused: ClassVar[Mapping[str, str]] = REFUSED  # Horovod's name -> why it has no meaning here
    _input_kwargs: dict[str, Any]

    learning_rate = declare("learning rate of all parameter groups; None: the optimizer's own")
    scale_lr = declare("whether to multiply all learning rates by num_workers, once, as Horovod does")
    loss_weights = declare("weight of each of several losses; None: 1/n each", to_numbers)
    transformation_fn = declare(
        "function of the columns of a part (a dict of arrays) to those that model and loss take, on the workers; of "
        "(columns, rng) to augment rows: rng draws for each row in training, and is None elsewhere"
    )
    transformation_workers = declare(
        "processes of each worker that apply transformation_fn, ahead of the training; 0: the training itself does"
    )
    transformation_pool = declare(
        "process, or thread for a transformation_fn that releases the interpreter's lock"
    )
    loss_scope = declare(
        "step: a loss that compares rows (contrastive, triplets, Dice) sees all rows of the step, for any number of "
        "workers; worker: those of a backward pass of one worker, and the weights depend on the workers; "
        "None: such a loss is refused"
    )
    label_shapes = declare("shape of one row of each label column, or None", to_numbers)
    validation = declare(
        "fraction of the rows, or a column that marks them (true or above 0), for validation after each epoch"
    )
    batch_size = declare(
        "rows per worker and backward pass; batch_size × backward_passes_per_step × num_workers rows are one step"
    )
    val_batch_size = declare("rows per worker in validation; None: batch_size")
    backward_passes_per_step = declare("backward passes of a worker whose gradients are one step")
    gradient_compression = declare("bf16 or fp16 for float32 gradients on the wire, or None")
    reader = declare("what reads the rows: arrow or petastorm")
    balance_rows = declare(
        "whether slow workers get fewer rows of a step than others, and workers that stay slow are replaced"
    )
    terminate_on_nan = declare("whether the first loss of NaN or infinity ends the training")
    inmemory_cache_all = declare("whether a worker keeps the rows that it has read, as far as memory allows")
    epochs = declare("passes over the data")
    num_workers = declare("workers wanted at the start")
    min_workers = declare("fewest workers to continue with")
    max_workers = declare("most workers ever; default num_workers")
    store = declare(
        "path or url for data and models that driver and executors share; None: a folder of this machine that is "
        "removed after the fit, which needs a local master of Spark"
    )
    storage_options = declare(
        "fsspec's options for the store, a dict; not saved. `retry_seconds` (60, at most 240) among them: how long a "
        "read or write of an object store is tried again",
        hide_values,
    )
    seed = declare("seed for the order of rows and the workers' random numbers")
    shuffle = declare("whether each epoch has its own order")
    row_order = declare(
        "order in which fit writes the table's rows: hash, the same on every cluster (rows are sorted on the "
        "way); or table, as Spark has them, which its partitions decide; None: hash, or table with shuffle=False"
    )
    lanes = declare(
        "row groups that the rows of a step come from, at most; more mix a sorted table better, and read large row "
        "groups in smaller pieces; None: 16, or 2 for each of max_workers if that is more, at most 64"
    )
    materialize = declare(
        "whether fit writes the table's rows to the store: always; never, which refuses all DataFrames but those that "
        "select and rename columns of Parquet, Delta or Iceberg files; or auto, which reads such files where they are "
        "if row_order is table"
    )
    run_id = declare("name of the run in the store; by default a new one for each fit")
    verbose = declare(
        "0: silent; 1: progress, worlds and what workers print; 2: also the log of spark_elastic"
    )
    keep_data = declare("keep the materialized data in the store for the next fit")
    on_progress = declare(
        "function called on the driver with each report of progress (a dict); a slow one gets only the newest; or None"
    )
    config = declare("an ElasticConfig, or None for the environment's")
    settings = declare("single settings of ElasticConfig that override `config`")

    @keyword_only
    def __init__(  # noqa: PLR0913 - the keywords are the Params of all frameworks; each refuses the others'
        self,
        *,
        model: torch.nn.Module | keras.Model | Callable[[], torch.nn.Module | keras.Model] | None = None,
        optimizer: torch.optim.Optimizer
        | Callable[..., torch.optim.Optimizer]
        | keras.optimizers.Optimizer
        | str
        | None = None,
        learning_rate: float | None = None,
        scale_lr: bool = False,
        loss: Any = None,
        loss_weights: Sequence[float] | None = None,
        loss_scope: str | None = None,
        metrics: Any = None,
        callbacks: Sequence[Callback | keras.callbacks.Callback] | None = None,
        train_minibatch_fn: Callable[..., torch.Tensor] | None = None,
        class_weight: Mapping[int, float] | None = None,
        custom_objects: Mapping[str, Any] | None = None,
        transformation_fn: Callable[..., Mapping[str, Any]] | None = None,
        transformation_workers: int = 0,
        transformation_pool: str = "process",
        feature_cols: str | Sequence[str] | None = None,
        label_cols: str | Sequence[str] | None = None,
        sample_weight_col: str | None = None,
        input_shapes: Sequence[Sequence[int]] | None = None,
        label_shapes: Sequence[Sequence[int]] | None = None,
        prediction_col: str = "prediction",
        probability_col: str | None = "probability",
        raw_prediction_col: str | None = "rawPrediction",
        threshold: float = HALF,
        thresholds: Sequence[float] | None = None,
        activation: str | None = None,
        raw_outputs: bool = False,
        output_cols: Sequence[str] | None = None,
        validation: float | str | None = None,
        batch_size: int = 32,
        val_batch_size: int | None = None,
        backward_passes_per_step: int = 1,
        epochs: int = 1,
        num_workers: int | None = None,
        min_workers: int = 1,
        max_workers: int | None = None,
        store: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
        missing: str | Mapping[str, str] = "refuse",
        seed: int = 0,
        shuffle: bool = True,
        row_order: str | None = None,
        lanes: int | None = None,
        materialize: str = "auto",
        gradient_clip_norm: float | None = None,
        gradient_clip_value: float | None = None,
        determinism: str | None = None,
        virtual_shares: int = 8,
        verify_steps: int | None = None,
        precision: str | None = None,
        compile_model: bool = False,
        gradient_compression: str | None = None,
        reader: str = "arrow",
        balance_rows: bool = False,
        terminate_on_nan: bool = True,
        inmemory_cache_all: bool = False,
        run_id: str | None = None,
        verbose: int = 1,
        keep_data: bool = False,
        on_progress: Callable[[Mapping[str, Any]], None] | None = None,
        config: ElasticConfig | None = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        self._set_arguments(self._input_kwargs)

    def _set_arguments(self, given: Mapping[str, Any]) -> None:
        # Also finds the keywords of a base class of the user's subclass.
        constructors = [vars(owner).get("__init__") for owner in reversed(type(self).__mro__)]
        signatures = [inspect.signature(constructor) for constructor in constructors if constructor]
        keywords = [k for each in signatures for k in each.parameters.values() if k.kind is k.KEYWORD_ONLY]
        defaults = {k.name: k.default for k in keywords if k.default is not k.empty and self.hasParam(k.name)}
        self._setDefault(settings={}, **defaults)
        self.setParams(**given)

    def setParams(self, **values: Any) -> Self:
        """Set parameters, and fields of `ElasticConfig`, by name; those not named stay."""
        values = translate_names(values, self.hasParam, self.refused)
        settings = {name: value for name, value in values.items() if not self.hasParam(name)}
        names = [param.name for param in self.params]
        check_setting_names(settings, names, f"a parameter of {type(self).__name__}")
        self._set(**{name: value for name, value in values.items() if self.hasParam(name)})
        self._set(settings={**self.getOrDefault("settings"), **settings})
        return self


class TorchParams(EstimatorParams):
    """The other parameters of `ElasticTorchEstimator`."""

    model = declare("the torch.nn.Module to train (it is copied), or a function that makes one")
    optimizer = declare(
        "a torch optimizer over the model's parameters, or a function that makes one from parameters"
    )
    loss = declare(
        "module or function of (output, *labels), or a list of one per label: torch's own or a functools.partial of "
        "one; or your own that returns a loss per row or their plain mean, not weighted by class or row; sample "
        "weights w make it sum(w * loss) / sum(w)",
        to_list,
    )
    metrics = declare(
        "functions of (output, label) or torchmetrics, as a list or by name; a lambda in a list is named metric",
        to_list,
    )
    callbacks = declare("instances of spark_elastic.torch.callbacks.Callback", to_list)
    train_minibatch_fn = declare(
        "function of (model, features, labels) that returns the rows' losses or their mean, in place of loss"
    )
    determinism = declare(
        "bitwise: the trained weights have the same bits for any number of workers; None: the same up to rounding"
    )
    virtual_shares = declare(
        "parts that each step is cut into with determinism='bitwise', each computed by one worker; at least max_workers"
    )
    verify_steps = declare(
        "with determinism='bitwise': every so many steps one virtual share is computed by two other workers, too, and "
        "compared by bits, which finds faulty memory and processors; None: never"
    )
    precision = declare(
        "bf16 or fp16 for forward passes under autocast (fp16 with scaled gradients), or None"
    )
    compile_model = declare(
        "whether each worker compiles the model's forward pass with torch.compile, in its first step"
    )
    gradient_clip_norm = declare("largest norm of all gradients together (clipped to it), or None")
    gradient_clip_value = declare("largest absolute value of a gradient's elements (clipped to it), or None")


class KerasParams(EstimatorParams):
    """The other parameters of `ElasticKerasEstimator`."""

    refused: ClassVar[Mapping[str, str]] = KERAS_REFUSED

    model = declare("the Keras model to train (it is copied), or a function that makes one")
    optimizer = declare("a Keras optimizer or its name; None: what the model is compiled with")
    loss = declare(
        "a Keras loss, its name, or a list or dict by output; None: what the model is compiled with", to_list
    )
    metrics = declare("Keras metrics or their names; None: what the model is compiled with", to_list)
    callbacks = declare("instances of keras.callbacks.Callback", to_list)
    class_weight = declare("weight of each class of the one label, by its number, or None")
    custom_objects = declare("classes and functions that the model consists of, by name, or None")


def with_horovod_names(owner: T) -> T:
    """Add setters and getters for Horovod's names; those of refused names raise InvalidInput with the reason."""
    for name in (*ALIASES, *GPU_NAMES, *owner.refused):
        setattr(owner, f"set{_to_camel(name)}", _make_horovod_setter(name, owner.refused))
        if name in ALIASES:
            setattr(owner, f"get{_to_camel(name)}", lambda self, ours=ALIASES[name]: self.getOrDefault(ours))
    return owner


def _make_horovod_setter(name: str, refused: Mapping[str, str]) -> Any:
    def set_param(self: Any, value: Any) -> Any:
        return self.setParams(**{name: value})

    meaning = "`device`" if name in GPU_NAMES else ALIASES.get(name) or refused[name]
    set_param.__doc__ = f"Horovod's `{name}`: {meaning}."
    return set_param
