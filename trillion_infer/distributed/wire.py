"""Messages of numbers, text and numpy arrays as bytes (msgpack); never Python objects."""

from typing import Any

import msgpack
import numpy as np

_ARRAY = 1
_KINDS = "biuf"
"""numpy kinds an array on the wire may have: bool, signed, unsigned, floating point."""


def pack(message: list[Any]) -> bytes:
    """Bytes of a message: lists of None, bool, int, float, str, bytes and arrays of plain numbers."""
    return bytes(msgpack.packb(message, default=_array, strict_types=True))  # pyright: ignore[reportArgumentType]


def unpack(data: bytes) -> list[Any]:
    """The message that `pack` got; its arrays are read-only. Raises ValueError for anything else."""
    message = msgpack.unpackb(data, ext_hook=_unarray)
    if not isinstance(message, list) or not message or not isinstance(message[0], str):
        raise ValueError("the bytes hold no message: a list that begins with its kind is wanted.")
    return message


def _array(value: Any) -> msgpack.ExtType:
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in _KINDS:
        value = np.ascontiguousarray(value) if value.ndim else np.asarray(value)
        return msgpack.ExtType(_ARRAY, msgpack.packb([value.dtype.str, list(value.shape), value.tobytes()]))
    raise TypeError(f"{type(value).__name__} cannot be sent; numbers, text, bytes and arrays of numbers can.")


def _unarray(code: int, data: bytes) -> np.ndarray:
    if code != _ARRAY:
        raise ValueError(f"extension {code} is unknown.")
    dtype, shape, content = msgpack.unpackb(data)
    if np.dtype(dtype).kind not in _KINDS:
        raise ValueError(f"dtype {dtype} is not one of plain numbers.")
    return np.frombuffer(content, np.dtype(dtype)).reshape(shape)
