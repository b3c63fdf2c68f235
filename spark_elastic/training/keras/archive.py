"""A Keras model as bytes: a `.keras` file, and the classes and functions of the user's that it names.

The file holds configuration and numbers, no code; what the user defined goes by cloudpickle, through Spark's own
channel only. Any thread.
"""

from __future__ import annotations

import dataclasses
import inspect
import io
import re
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import cloudpickle
import keras
import numpy.typing as npt

from spark_elastic.data.scratch import make_scratch_folder
from spark_elastic.errors import InvalidInput, StoreError
from spark_elastic.runs.identity import to_text

_SHARED = re.compile(r', "shared_object_id": \d+')  # an address
_COUNTED = re.compile(r'(?<=[a-z])_\d+"')  # another name in a process that made another model before
_NOTHING_TO_LOAD = "Skipping variable loading for optimizer"  # that was not built when it was saved
# What a layer is given besides functions.
_PARTS = (keras.initializers.Initializer, keras.regularizers.Regularizer, keras.constraints.Constraint)


@dataclass(frozen=True)
class Archive:
    """A Keras model as bytes, with what its `.keras` file does not say."""

    content: bytes  # the `.keras` file
    custom: bytes  # cloudpickle of classes and functions by name
    floatx: str = "float32"  # Keras's default dtype
    safe: bool = False  # the file may come from anywhere, so that Keras refuses lambdas in it
    undecayed: tuple[int, ...] = ()  # numbers of variables that their optimizer's decay excludes
    # The first matrix of each LoRA layer, of which the file has the merged kernel alone.
    adapters: tuple[npt.NDArray[Any], ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, model: Any, custom_objects: Mapping[str, Any] | None = None) -> Archive:
        custom = {**collect_custom_objects(model), **(custom_objects or {})}
        undecayed = find_undecayed(getattr(model, "optimizer", None), model.trainable_variables)
        return cls(
            save_model(model),
            cloudpickle.dumps(custom),
            keras.config.floatx(),
            undecayed=undecayed,
            adapters=tuple(keras.ops.convert_to_numpy(v) for v in _find_adapters(model)),
        )

    def identity(self) -> str:
        """What the model is and is compiled with, as text; no weights, nor the numbers that Keras counts names by."""
        with zipfile.ZipFile(io.BytesIO(self.content)) as file:
            found = file.read("config.json").decode()
        undecayed = str(self.undecayed) if self.undecayed else ""
        return _COUNTED.sub('"', _SHARED.sub("", found)) + to_text(cloudpickle.loads(self.custom)) + undecayed

    def places(self) -> dict[str, list[str]]:
        """Module and name of each class and function that others can import."""
        custom = cloudpickle.loads(self.custom)
        return {k: [own.__module__, own.__qualname__] for k, own in custom.items() if not _is_inner(own)}

    def inner(self) -> dict[str, Any]:
        """Those that cannot be imported: lambdas, and what was defined inside of a function."""
        return {name: own for name, own in cloudpickle.loads(self.custom).items() if _is_inner(own)}

    def load(self) -> Any:
        """The model, compiled as it was saved. Raises InvalidInput: Keras runs on another backend here."""
        if keras.backend.backend() != "tensorflow":
            raise InvalidInput(
                f"Keras runs on {keras.backend.backend()} in this process: set KERAS_BACKEND=tensorflow in the "
                "environment of the executors (spark.executorEnv.KERAS_BACKEND), too."
            )
        with self.default_dtype(), _make_temporary_file(self.content) as path:
            custom = cloudpickle.loads(self.custom)
            with warnings.catch_warnings(record=True) as caught:
                warnings.filterwarnings("always", _NOTHING_TO_LOAD)
                model = keras.saving.load_model(path, custom, compile=True, safe_mode=self.safe)
            others = [each for each in caught if not str(each.message).startswith(_NOTHING_TO_LOAD)]
            for each in others:
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
            exclude_from_decay(getattr(model, "optimizer", None), model.trainable_variables, self.undecayed)
            # Keras sets both matrices of a LoRA layer to zero, which then have no gradient: they would never learn.
            for variable, value in zip(_find_adapters(model), self.adapters, strict=False):
                variable.assign(value)
            if len(caught) > len(others):
                with keras.saving.custom_object_scope(custom):
                    _begin_at_weights(model.optimizer, model.trainable_variables)
            return model

    @contextmanager
    def default_dtype(self) -> Iterator[None]:
        """Keras's default dtype is this model's here."""
        before = keras.config.floatx()
        keras.config.set_floatx(self.floatx)
        try:
            yield
        finally:
            keras.config.set_floatx(before)

    def with_weights(self, trained: bytes) -> Archive:
        """With the weights and optimizer of another `.keras` file, of which neither configuration nor code is read.
        Raises StoreError: the file is of another model."""
        model = self.load()
        model.optimizer.build(model.trainable_variables)
        with _make_temporary_file(trained) as path:
            try:
                model.load_weights(path)
            except (ValueError, KeyError, OSError, zipfile.BadZipFile) as error:
                text = f"the trained weights do not fit the model that was trained: {error}"
                raise StoreError(text) from error
        return dataclasses.replace(self, content=save_model(model))


@contextmanager
def _make_temporary_file(content: bytes) -> Iterator[str]:
    with make_scratch_folder() as folder:
        path = folder / "model.keras"
        path.write_bytes(content)
        yield str(path)


def save_model(model: Any) -> bytes:
    """A `.keras` file of weights, architecture, and what the model is compiled with."""
    with make_scratch_folder() as folder:
        path = folder / "model.keras"
        model.save(str(path))
        return path.read_bytes()


def _find_adapters(model: Any) -> list[Any]:
    layers = [layer for layer in model._flatten_layers() if getattr(layer, "lora_enabled", False)]
    names = ("lora_kernel_a", "lora_embeddings_a")
    return [getattr(layer, name) for layer in layers for name in names if hasattr(layer, name)]


def _begin_at_weights(optimizer: Any, variables: Sequence[Any]) -> None:
    """Keras built it before it loaded the weights, and some, such as ScheduleFreeAdamW, keep a copy of them."""
    fresh = type(optimizer).from_config(optimizer.get_config())
    fresh.build(variables)
    for variable, value in zip(optimizer.variables, fresh.variables, strict=True):
        variable.assign(value)


def list_optimizers(optimizer: Any) -> list[Any]:
    """Those of a MultiOptimizer; else the optimizer itself, which may be any value."""
    return list(getattr(optimizer, "optimizers", [optimizer]))


def find_undecayed(optimizer: Any, variables: Sequence[Any]) -> tuple[int, ...]:
    """Numbers of the variables that were excluded from the weight decay of a Keras optimizer."""
    find = getattr(optimizer, "_optimizer_map", lambda variable: optimizer)  # a MultiOptimizer has several
    return tuple(
        number
        for number, v in enumerate(variables)
        if getattr(found := find(v), "weight_decay", None) is not None and not found._use_weight_decay(v)
    )


def exclude_from_decay(optimizer: Any, variables: Sequence[Any], undecayed: Sequence[int]) -> None:
    if undecayed:
        for each in list_optimizers(optimizer):
            each.exclude_from_weight_decay(var_list=[variables[number] for number in undecayed])


def collect_custom_objects(model: Any) -> dict[str, Any]:
    """Classes and functions of the user's in a model, by the names under which Keras looks for them.
    Raises InvalidInput: two have one name, or one has that of a function of Keras that the model uses, too."""
    found = select_user_objects(iter_model_parts(model))
    compiled = keras.tree.flatten(getattr(getattr(model, "_compile_config", None), "config", {}))
    named = {each for each in compiled if isinstance(each, str)}  # such as "mse"
    for own in filter(inspect.isfunction, found.values()):
        if own.__name__ in named or hasattr(keras.activations, own.__name__):
            raise InvalidInput(
                f"the model has a function of yours named {own.__name__!r}, as Keras names one of its own, and a "
                ".keras file tells functions apart by their names: give yours another name."
            )
    return found


def select_user_objects(things: Iterable[Any]) -> dict[str, Any]:
    """The same of objects, functions and classes. Raises InvalidInput: two have one name."""
    found: dict[str, Any] = {}
    for thing in things:
        known = thing if inspect.isclass(thing) or inspect.isfunction(thing) else type(thing)
        if _is_users(known):
            name = keras.saving.get_registered_name(known)
            if not _are_equal(found.setdefault(name, known), known):
                raise InvalidInput(
                    f"the model, its losses or its metrics have two different functions or classes named {name!r}, "
                    "which a .keras file tells apart by their names: give each a name of its own (function.__name__ = "
                    "...)."
                )
            found[name] = known
    return found


def _are_equal(one: Any, other: Any) -> bool:
    if one.__name__ == "<lambda>":  # a file has its code
        return True
    if inspect.isfunction(one) and inspect.isfunction(other):
        return one is other or to_text(one) == to_text(other)
    return (one.__module__, one.__qualname__) == (other.__module__, other.__qualname__)


def iter_model_parts(model: Any) -> Iterator[Any]:
    """Everything in a model that may be of the user's making."""
    layers = list(model._flatten_layers())
    classes = {known for layer in layers for known in type(layer).__mro__ if _is_users(known)}
    makers = tuple(f"{known.__qualname__}." for known in classes)
    for layer in layers:
        yield layer
        yield from _iter_arguments(layer, makers)
    optimizer = getattr(model, "optimizer", None)  # there is no such attribute before compile()
    if optimizer is not None:
        yield from iter_leaves(optimizer)
    yield from iter_leaves(getattr(getattr(model, "_compile_config", None), "config", {}))


def _iter_arguments(layer: Any, makers: tuple[str, ...]) -> Iterator[Any]:
    """Functions and parts that a layer was given: neither methods, of which Keras keeps wrappers in each layer, nor
    functions defined inside of the model's own classes, which make them again when they are read back."""
    for name, part in vars(layer).items():
        is_method = inspect.isfunction(getattr(type(layer), name, None))
        is_given = inspect.isfunction(part) and not is_method and not part.__qualname__.startswith(makers)
        if (is_given and _is_saved(part, layer)) or isinstance(part, _PARTS):
            yield part


def _is_saved(function: Any, layer: Any) -> bool:
    """Whether the layer's configuration names the function; a layer may also make functions of its own."""
    try:
        return function.__name__ == "<lambda>" or repr(function.__name__) in repr(layer.get_config())
    except NotImplementedError:  # the layer cannot be saved, which another check says
        return True


def _is_users(known: Any) -> bool:
    return not str(known.__module__).startswith(("keras.", "builtins"))


def _is_inner(own: Any) -> bool:
    return "<" in own.__qualname__


def iter_leaves(configured: Any) -> Iterator[Any]:
    """Objects and functions among what a model is compiled with, at any depth, and what these are made of."""
    for leaf in keras.tree.flatten(configured):
        if leaf is not None and not isinstance(leaf, str | float | int | bool):
            yield leaf
            optimizers = list_optimizers(leaf)
            rates = (getattr(each, "_learning_rate", None) for each in optimizers)
            parts = (*optimizers, *rates, getattr(leaf, "_optimizer_map", None))
            yield from (part for part in parts if part is not None)
            if type(leaf) is keras.metrics.MeanMetricWrapper:
                yield leaf._fn
