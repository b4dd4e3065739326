"""One safetensors file, mapped: a header in JSON, then the tensors' bytes."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from trillion_infer.core.errors import ModelLoadError
from trillion_infer.weights.mapped import MappedFile

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies: bytes `[begin, end)` of the file."""

    shape: tuple[int, ...]
    dtype: np.dtype
    begin: int
    end: int


class SafetensorsFile:
    """Views of a file's tensors. The whole header is checked against the file's length on opening."""

    def __init__(self, path: Path):
        self.path = path
        self.mapped = MappedFile(path)
        entries = _parse(path, self.mapped.bytes)
        self._entries = dict(sorted(entries.items(), key=lambda item: item[1].begin))

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def names(self) -> list[str]:
        """Tensor names in the order of their bytes."""
        return list(self._entries)

    def entry(self, name: str) -> Entry:
        """Shape, dtype and place of a tensor."""
        return self._entries[name]

    def read(self, name: str) -> np.ndarray:
        """Read-only view of a tensor."""
        e = self._entries[name]
        return self.mapped.bytes[e.begin : e.end].view(e.dtype).reshape(e.shape)

    def release(self, name: str) -> None:
        """Lets go of the tensor's pages."""
        e = self._entries[name]
        self.mapped.release(e.begin, e.end)


def _parse(path: Path, data: np.ndarray) -> dict[str, Entry]:
    size = len(data)
    if data[:11].tobytes() == b"version htt":
        raise ModelLoadError(f"{path} is a Git LFS pointer, not the weights; run 'git lfs pull' in its repository")
    length = int.from_bytes(data[:8].tobytes(), "little")
    start = 8 + length
    if size < 8 or length > size - 8:
        raise ModelLoadError(
            f"{path} is truncated or not a safetensors file: its header would end at byte {start}, "
            f"the file has {size}; fetch it again"
        )
    try:
        header = json.loads(data[8:start].tobytes())
        header.pop("__metadata__", None)
        entries = {
            name: Entry(
                tuple(map(int, row["shape"])),
                DTYPES[row["dtype"]],
                start + int(row["data_offsets"][0]),
                start + int(row["data_offsets"][1]),
            )
            for name, row in header.items()
        }
    except KeyError as error:
        raise ModelLoadError(f"{path} has a tensor with the unknown dtype or missing field {error}") from error
    except (ValueError, TypeError, AttributeError, IndexError) as error:
        raise ModelLoadError(f"{path} has a broken header ({error}); fetch it again") from error
    needed = max((e.end for e in entries.values()), default=start)
    if needed > size:
        raise ModelLoadError(
            f"{path} is truncated: its header describes {needed} bytes, the file has {size}; "
            "the download is probably incomplete, fetch it again"
        )
    for name, e in entries.items():
        if e.begin < start or e.end - e.begin != math.prod(e.shape) * e.dtype.itemsize:
            raise ModelLoadError(
                f"{path} is corrupt: tensor {name} of shape {e.shape} and dtype {e.dtype} "
                f"is said to lie in bytes {e.begin} to {e.end}; fetch it again"
            )
    return entries
