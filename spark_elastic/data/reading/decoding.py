"""From Parquet and Arrow to numpy arrays, without a copy where the layout allows it. Any thread."""

from __future__ import annotations

import inspect
import io
import math
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import Any
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as types

from spark_elastic.data.manifest import VIEW_BYTES, Column, RowGroup, RowGroups
from spark_elastic.data.packing import split_rows
from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidInput, StoreError

ColumnArrays = dict[str, npt.NDArray[np.generic]]

HAS_CHECKSUMS = "page_checksum_verification" in inspect.signature(pq.ParquetFile).parameters  # pyarrow 15
VERIFIED = {"page_checksum_verification": True} if HAS_CHECKSUMS else {}  # options of a reader
CHECKSUMS = {"write_page_checksum": True} if HAS_CHECKSUMS else {}  # options of a writer


Array = npt.NDArray[np.generic]
_VECTOR_FIELDS = ("type", "size", "indices", "values")  # Spark's ML vector; type 0 is sparse, 1 dense


def is_vector(arrow: pa.DataType) -> bool:
    return bool(types.is_struct(arrow)) and tuple(field.name for field in arrow) == _VECTOR_FIELDS


def is_list(arrow: pa.DataType) -> bool:
    return bool(types.is_list(arrow) or types.is_large_list(arrow) or types.is_fixed_size_list(arrow))


def to_plain_type(arrow: pa.DataType) -> pa.DataType:
    """The type without what the files of one column may differ in: memory layout, nulls, units and zones' names."""
    if types.is_dictionary(arrow):
        return to_plain_type(arrow.value_type)
    if is_list(arrow):
        return pa.list_(to_plain_type(arrow.value_type))
    if types.is_timestamp(arrow):
        return pa.timestamp("us", None if arrow.tz is None else "UTC")
    if types.is_large_string(arrow) or str(arrow) == "string_view":  # pyarrow 14 has no name for views
        return pa.string()
    return pa.binary() if types.is_large_binary(arrow) or str(arrow) == "binary_view" else arrow


def drop_views(values: Any) -> Any:
    """A column without views, as deltalake updates files, which Arrow neither filters nor compares."""
    return values.cast(to_plain_type(values.type)) if _has_views(values.type) else values


def join_batches(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    (joined,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return joined


def _has_views(arrow: pa.DataType) -> bool:
    return _has_views(arrow.value_type) if is_list(arrow) else str(arrow) in ("string_view", "binary_view")


def dtype_of(arrow: pa.DataType) -> str | None:
    """Numpy's dtype of a scalar type, `object` and `datetime64` for types that need a transformation; else None."""
    if types.is_dictionary(arrow):
        return dtype_of(arrow.value_type)
    if types.is_boolean(arrow) or types.is_integer(arrow) or types.is_floating(arrow):
        return str(np.dtype(arrow.to_pandas_dtype()))
    if types.is_decimal(arrow):
        return "float64"
    if types.is_date(arrow):
        return "datetime64[D]"
    if types.is_timestamp(arrow):
        return "datetime64[us]"
    tests = types.is_binary, types.is_large_binary, types.is_string, types.is_large_string
    return "object" if any(test(arrow) for test in tests) else None


def decode_columns(
    found: Mapping[str, Any], rows: int, columns: tuple[Column, ...], constants: Mapping[str, str]
) -> ColumnArrays:
    """Column -> read-only array (rows, *shape); ValueError for nulls, or rows of another shape. found: values in Arrow.
    constants: columns that have one value, and are not in the file."""

    def decode(column: Column) -> Array:
        if column.name in found:
            return _to_array(found[column.name], column, rows)
        return repeat_constant(constants[column.name], column, rows)

    return {column.name: decode(column) for column in columns}


def repeat_constant(text: str, column: Column, rows: int) -> Array:
    if column.dtype == "bool":
        return np.full(rows, text.lower() == "true")
    if column.dtype == "datetime64[us]":
        moment = datetime.fromisoformat(text)
        utc = moment.astimezone(timezone.utc).replace(tzinfo=None) if moment.tzinfo else moment
        return np.full(rows, np.datetime64(utc))
    return np.full(rows, text).astype(column.dtype)


def nbytes(rows: ColumnArrays) -> int:
    """Bytes of decoded rows, including those of strings and of ragged rows."""
    total = sum(array.nbytes for array in rows.values())
    for array in rows.values():
        values: Any = array.flat if array.dtype == object else ()
        for value in values:
            total += VIEW_BYTES + value.nbytes if isinstance(value, np.ndarray) else len(value)
    return total


def _to_array(chunked: pa.ChunkedArray | pa.Array, column: Column, rows: int) -> Array:
    """Copies only booleans, other dtypes, vectors and split columns."""
    values: Any = chunked
    if isinstance(chunked, pa.ChunkedArray):
        values = chunked.chunk(0) if chunked.num_chunks == 1 else chunked.combine_chunks()
        if isinstance(values, pa.ChunkedArray):
            values = pa.concat_arrays(values.chunks)
    if values.null_count:
        raise ValueError(f"column {column.name!r} has {values.null_count} nulls")
    if is_vector(values.type):
        array = _to_vectors(values, column)
    elif types.is_fixed_size_binary(values.type):  # rows that are stored as their bytes
        begin, width = values.offset, values.type.byte_width
        array = np.frombuffer(values.buffers()[1][begin * width : (begin + rows) * width], column.dtype)
    elif column.codec:
        array = decode_values(values.to_pylist(), column)
    elif column.ragged:
        array = _to_ragged(values, column)
    else:
        for length in column.shape:
            # Arrow's own `flatten` imports a module that loads slowly.
            first = _find_first(values, length, column)
            values = values.values.slice(first, len(values) * length)
        if len(values) != rows * math.prod(column.shape):
            raise ValueError(f"column {column.name!r} has not {rows} rows of shape {column.shape}")
        array = _to_elements(values, column.name, column.dtype)
    array = array.reshape(rows, *column.shape)
    array.flags.writeable = False
    return array


def _to_elements(values: Any, name: str, dtype: str) -> Array:
    """An Arrow array without lists as one of numpy."""
    if values.null_count:
        raise ValueError(f"column {name!r} has {values.null_count} nulls")
    if types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if types.is_decimal(values.type):
        values = values.cast(pa.float64())
    return _to_numbers(values).astype(dtype, copy=False)


def _to_ragged(values: Any, column: Column) -> Array:
    """Rows of different lengths as views of one array."""
    if not is_list(values.type):
        raise ValueError(f"column {column.name!r} is {values.type}, no arrays")
    if types.is_fixed_size_list(values.type):
        ends = (np.arange(len(values) + 1) + values.offset) * values.type.list_size
    else:
        ends = _to_numbers(values.offsets)
    flat = values.values.slice(int(ends[0]), int(ends[-1] - ends[0]))
    elements = _to_elements(flat, column.name, column.ragged)
    elements.flags.writeable = False
    return split_rows(elements, ends - ends[0])


def _to_numbers(values: Any) -> Array:
    """The values of an array, those under nulls whatever they are. Arrow's own `to_numpy` imports pandas, which costs a
    new worker half a second before its first step; only what numpy holds no numbers for goes that way."""
    if types.is_boolean(values.type):
        return _to_numbers(values.cast(pa.uint8())).view(np.bool_)
    if not (types.is_integer(values.type) or types.is_floating(values.type)):
        return np.asarray(values.to_numpy(zero_copy_only=False))
    dtype, memory = np.dtype(values.type.to_pandas_dtype()), values.buffers()[1]
    return np.frombuffer(memory or b"", dtype, len(values), values.offset * dtype.itemsize if memory else 0)


def _find_first(values: Any, length: int, column: Column) -> Any:
    """Where the first row begins. Each row's length is checked: wrong ones may have the right sum."""
    if not is_list(values.type):
        raise ValueError(f"column {column.name!r} is {values.type}, no array of shape {column.shape}")
    if types.is_fixed_size_list(values.type):
        first, same = values.offset * length, values.type.list_size == length
    else:
        offsets = _to_numbers(values.offsets)
        # That all ends are where they should be is cheaper to see than all differences.
        first, same = offsets[0], np.array_equal(offsets, np.arange(len(values) + 1) * length + offsets[0])
    if not same:
        raise ValueError(
            f"column {column.name!r} has arrays of a length other than {length}: pad or cut them"
        )
    return first


def _to_vectors(values: Any, column: Column) -> Array:
    """Dense and sparse vectors, each row as long as the column says."""
    rows, width = len(values), column.shape[0]
    kinds, sizes, indices, numbers = (values.field(name) for name in _VECTOR_FIELDS)
    dense = _to_numbers(kinds) == 1
    ends = _to_numbers(numbers.offsets)
    counts = np.diff(ends)
    lengths = np.where(dense, counts, _to_numbers(sizes))  # a dense vector's size is null
    if not np.all(lengths == width):
        raise ValueError(f"column {column.name!r} has vectors of a length other than {width}")
    flat = _to_numbers(numbers.values)[ends[0] : ends[-1]]
    if dense.all():
        return np.asarray(flat.astype(column.dtype))
    row = np.repeat(np.arange(rows), counts)
    place = np.arange(len(flat)) - np.repeat(ends[:-1] - ends[0], counts)
    sparse = ~dense[row]
    found = _to_numbers(indices.offsets)
    place[sparse] = _to_numbers(indices.values)[found[0] : found[-1]]
    array = np.zeros((rows, width), dtype=column.dtype)
    array[row, place] = flat
    return array


def open_parquet(
    source: Any, pre_buffer: bool = False, buffer_size: int = 0, footer: pq.FileMetaData | None = None
) -> pq.ParquetFile:
    """Open a Parquet file over `source`, which the caller closes. Spark's timestamps (INT96) are read as microseconds:
    Arrow's nanoseconds overflow outside of the years 1677 to 2262. Pages are checked by their checksums, if any."""
    options = {"pre_buffer": pre_buffer, "buffer_size": buffer_size, "coerce_int96_timestamp_unit": "us"}
    return pq.ParquetFile(source, metadata=footer, **options, **VERIFIED)


FOOTER_BYTES = 64 << 10  # one read of so many gets nearly every footer


def find_footer_length(tail: bytes) -> int:
    """Bytes of the footer with its trailer, the length and the magic word. tail: the last bytes of a file."""
    return int.from_bytes(tail[-8:-4], "little") + 8


def parse_footer(tail: bytes) -> pq.FileMetaData:
    """Arrow needs no more of a file than that."""
    return pq.read_metadata(pa.BufferReader(tail[-find_footer_length(tail) :]))


def read_footers(store: Store, names: Sequence[str]) -> tuple[tuple[str, ...], RowGroups]:
    """The files that have rows, in the order of `names`, and their row groups; StoreError if one is not Parquet."""
    files: list[str] = []
    groups: list[RowGroup] = []
    for name in names:
        metadata = read_footer(store, name)
        found = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
        with_rows = [(index, group) for index, group in enumerate(found) if group.num_rows]
        for index, group in with_rows:
            groups.append(RowGroup(len(files), index, group.num_rows, group.total_byte_size))
        if with_rows:
            files.append(name)
    return tuple(files), RowGroups.of(groups)


def read_footer(store: Store, name: str) -> pq.FileMetaData:
    """One file's footer; StoreError if it is not Parquet."""
    tail = store.read_tail(name, FOOTER_BYTES)
    if find_footer_length(tail) > len(tail):
        tail = store.read_tail(name, find_footer_length(tail))
    try:
        return parse_footer(tail)
    except (pa.ArrowException, OSError) as error:  # OSError: of a footer that is encrypted
        raise StoreError(f"{name!r} in the store {store.url} is no Parquet file: {error}") from error


def partition_values(name: str) -> dict[str, str]:
    """Columns in a file's path, as in `year=2024/part-0.parquet`."""
    pairs = (folder.partition("=") for folder in name.split("/")[:-1])
    return {unquote(key): unquote(value) for key, equals, value in pairs if equals}


def decode_values(values: Sequence[Any], column: Column) -> npt.NDArray[Any]:
    """Encoded values as one array (rows, *shape). Raises ValueError for values of another dtype or shape."""
    array = np.empty((len(values), *column.shape), column.dtype)
    for row, encoded in enumerate(values):
        value = decode_value(column.codec, column.name, encoded)
        if value.dtype != array.dtype or value.shape != column.shape:
            raise ValueError(
                f"column {column.name!r} has a row of {value.dtype} and shape {value.shape}, and others of "
                f"{column.dtype} and shape {column.shape}: pad or cut them to one shape"
            )
        array[row] = value
    return array


def decode_value(codec: str, name: str, encoded: Any) -> npt.NDArray[Any]:
    """One encoded value. Raises InvalidInput where it is damaged or nothing here can decode it."""
    decoder = _decode_image if codec == "image" else _decode_ndarray
    try:
        return decoder(bytes(encoded))
    except InvalidInput:
        raise
    except Exception as error:  # of numpy, zlib or the decoder of images
        raise InvalidInput(
            f"The column {name!r} has a value that is no {codec.replace('_', ' ')} of petastorm's "
            f"({type(error).__name__}: {error}): leave the row out."
        ) from error


def _decode_ndarray(encoded: bytes) -> npt.NDArray[Any]:
    """An array as `numpy.save` or `numpy.savez_compressed` wrote it; never a pickle in it."""
    loaded = np.load(io.BytesIO(encoded), allow_pickle=False)
    if isinstance(loaded, np.ndarray):
        return loaded
    with loaded:
        return np.asarray(loaded["arr"])


def _decode_image(encoded: bytes) -> npt.NDArray[Any]:
    """An image as (height, width) or (height, width, 3) in red, green, blue, by OpenCV as petastorm, or Pillow."""
    try:
        import cv2
    except ImportError:
        array = _decode_with_pillow(encoded)
    else:
        image: Any = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_UNCHANGED)
        if image is None:
            raise ValueError("OpenCV cannot decode it")
        array = np.asarray(image if image.ndim == 2 else image[:, :, ::-1])
    if array.ndim != 2 and array.shape[2:] != (3,):
        raise ValueError(f"it has shape {array.shape}, neither grey nor red, green and blue")
    return array


def _decode_with_pillow(encoded: bytes) -> npt.NDArray[Any]:
    try:
        from PIL import Image
    except ImportError:
        raise InvalidInput(
            "The data set has images, and neither Pillow nor OpenCV is here: pip install pillow, on all hosts."
        ) from None
    with Image.open(io.BytesIO(encoded)) as image:
        return np.asarray(image)
