"""The schema that petastorm keeps beside its files, read without petastorm.

The schema is a pickle in the footer of `_common_metadata`. It is read by an unpickler that knows the few classes of
such a schema and calls nothing else, so that an untrusted file can run no code. Any thread.
"""

from __future__ import annotations

import io
import pickle
import posixpath
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from spark_elastic.data.manifest import Column
from spark_elastic.data.reading.decoding import decode_value, read_footer
from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidInput

UNISCHEMA_FILE = "_common_metadata"
UNISCHEMA_KEY = b"dataset-toolkit.unischema.v1"

# The names under which petastorm's modules were published; the last two are those of its first releases.
_PACKAGES = ("petastorm", "av.experimental.deepdrive.dataset_toolkit", "av.ml.dataset_toolkit")
# petastorm's class -> our name of the codec; "": values are stored as they are.
_CODECS = {
    "ScalarCodec": "",
    "NdarrayCodec": "ndarray",
    "CompressedNdarrayCodec": "compressed_ndarray",
    "CompressedImageCodec": "image",
}
_PYTHON_2 = {"copy_reg": "copyreg", "__builtin__": "builtins"}  # modules that Python 2 called otherwise
# Names of numpy's types in pickles that are not names of dtypes in all of numpy's versions.
_DTYPES = {"string_": "bytes_", "unicode_": "str_", "bool": "bool_"}


class Field(NamedTuple):
    """One field of a schema, in the order of petastorm's UnischemaField."""

    name: str  # as in the Parquet file
    numpy_dtype: Any  # numpy's dtype, "Decimal", or an object of `_Stored`
    shape: tuple[int | None, ...]  # of one row; None stands for a dimension of any length
    codec: Any = None  # petastorm's object, by whose class `codec_name` goes; None: none encodes the values
    nullable: Any = False  # not read here: the values tell

    def __setstate__(self, state: object) -> None:
        """A field has no attributes but those above."""

    @property
    def codec_name(self) -> str:
        """How values are encoded, as `Column.codec` has it."""
        return _CODECS[type(self.codec).__name__] if self.codec is not None else ""

    @property
    def dtype(self) -> str | None:
        """numpy's dtype of numbers and booleans; None: values are taken as they are stored."""
        name = self.numpy_dtype.code if isinstance(self.numpy_dtype, _Dtype) else str(self.numpy_dtype)
        try:
            found = np.dtype(_DTYPES.get(name, name))
        except TypeError:
            return None
        return str(found.newbyteorder("=")) if found.kind in "biuf" else None


class _Stored:
    """An object of a pickle whose attributes are all that matters."""

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Without it a pickle could set attributes of the class itself."""
        vars(self).update(state)


class _Schema(_Stored):
    _fields: Mapping[str, Field]


class _Dtype(_Stored):
    """A numpy.dtype in a pickle."""

    def __init__(self, code: str, *others: object) -> None:
        self.code = str(code)

    def __setstate__(self, state: Any) -> None:
        """Byte order and the like are the file's affair."""


_CODEC_CLASSES = {name: type(name, (_Stored,), {}) for name in _CODECS}


def _restore_namedtuple(name: str, fields: Sequence[str], values: Sequence[Any]) -> Field:
    """What old versions of pyspark make of every named tuple that is pickled."""
    return Field(**dict(zip(fields, values, strict=True)))


def _reconstruct(kind: Any, base: Any, state: Any) -> Any:
    """`copyreg._reconstructor`, for the classes above alone."""
    return kind(*state) if kind is Field else kind.__new__(kind)


_CALLED: Mapping[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("copyreg", "_reconstructor"): _reconstruct,
    ("builtins", "object"): object,
    ("builtins", "tuple"): tuple,
    ("numpy", "dtype"): _Dtype,
    ("decimal", "Decimal"): "Decimal",  # only named as a field's type
    ("pyspark.serializers", "_restore"): _restore_namedtuple,
}


class _Unpickler(pickle.Unpickler):
    """Reads a schema. Everything that it may construct is in this module."""

    def find_class(self, module: str, name: str) -> Any:
        module = _PYTHON_2.get(module, module)
        package, _, last = module.rpartition(".")
        found: Any
        if package in _PACKAGES and last == "unischema":
            found = {"Unischema": _Schema, "UnischemaField": Field}.get(name)
        elif package in _PACKAGES and last == "codecs":
            found = _CODEC_CLASSES.get(name)
        elif module == "pyspark.sql.types":
            found = _Stored
        elif module == "numpy" and name != "dtype":
            found = name  # of a type: a string, which cannot be called
        else:
            found = _CALLED.get((module, name))
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return found


def load_unischema(pickled: bytes) -> dict[str, Field]:
    """The fields of a pickled schema by name. Raises ValueError for anything else; runs no code of the pickle."""
    try:
        schema = _Unpickler(io.BytesIO(pickled)).load()
        fields = list(schema._fields.values())
        if not all(isinstance(each, Field) and isinstance(each.name, str) for each in fields):
            raise TypeError("it has fields that are none of petastorm's")
        for each in fields:
            _ = each.codec_name, each.dtype
    except Exception as error:  # a damaged pickle can raise anything
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return {each.name: each for each in fields}


def find_unischema(store: Store, name: str) -> dict[str, Field]:
    """The fields of the data set that a file or folder of the store belongs to; none if petastorm did not write it."""
    folders = [name]
    while folders[-1]:
        folders.append(posixpath.dirname(folders[-1]))
    for folder in folders:
        path = posixpath.join(folder, UNISCHEMA_FILE)
        if not store.exists(path):
            continue
        pickled = (read_footer(store, path).metadata or {}).get(UNISCHEMA_KEY)
        if pickled is None:
            return {}
        try:
            return load_unischema(pickled)
        except ValueError as error:
            raise InvalidInput(
                f"The petastorm schema in {store.join(path)} cannot be read ({error}): train with "
                "reader='petastorm', or write the rows as plain Parquet."
            ) from error
    return {}


def describe_field(field: Field, encoded: Any) -> Column:
    """The column of an encoded field. encoded: the value of the first row."""
    value = decode_value(field.codec_name, field.name, encoded)
    sizes = zip(value.shape, field.shape, strict=False)
    is_shape = value.ndim == len(field.shape) and all(wanted in (None, size) for size, wanted in sizes)
    if field.dtype != str(value.dtype) or not is_shape:
        raise InvalidInput(
            f"The column {field.name!r} begins with {value.dtype} of shape {value.shape}, and petastorm's schema says "
            f"{field.dtype} of shape {field.shape}: write the data set again."
        )
    return Column(field.name, str(value.dtype), value.shape, field.codec_name)
