"""The values that petastorm's codecs encode: arrays, compressed arrays and images, as numpy arrays.

Pillow or OpenCV is imported once there is an image to decode. Knows nothing of files and schemas. Any thread.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from spark_elastic.data.manifest import Column
from spark_elastic.errors import InvalidInput


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
    """An image as (height, width) or (height, width, 3) in the order red, green, blue."""
    array = _find_image_decoder()(encoded)
    if array.ndim != 2 and array.shape[2:] != (3,):
        raise ValueError(f"it has shape {array.shape}, neither grey nor red, green and blue")
    return array


def _find_image_decoder() -> Callable[[bytes], npt.NDArray[Any]]:
    """OpenCV's, which is petastorm's own, else Pillow's; neither is needed without images."""
    try:
        import cv2
    except ImportError:
        try:
            from PIL import Image
        except ImportError:
            raise InvalidInput(
                "The data set has compressed images, and neither Pillow nor OpenCV is installed here: pip install "
                "pillow, on the executors' hosts, too."
            ) from None

        def decode_with_pillow(encoded: bytes) -> npt.NDArray[Any]:
            with Image.open(io.BytesIO(encoded)) as image:
                return np.asarray(image)

        return decode_with_pillow

    def decode_with_opencv(encoded: bytes) -> npt.NDArray[Any]:
        image: Any = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_UNCHANGED)
        if image is None:
            raise ValueError("OpenCV cannot decode it")
        return np.asarray(image if image.ndim == 2 else image[:, :, ::-1])

    return decode_with_opencv
