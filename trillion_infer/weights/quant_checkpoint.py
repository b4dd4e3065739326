"""A quantised Hugging Face checkpoint as if its weights were plain: decoded when read, or handed out packed."""

import copy
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trillion_infer.core.errors import ModelLoadError
from trillion_infer.weights.cast import copy_into
from trillion_infer.weights.checkpoint import Checkpoint
from trillion_infer.weights.quant_config import ignored
from trillion_infer.weights.quant_formats import StoredFormat

# Appended to a weight's name these name its parts: packed items, a scale for each row and group, scales as stored.
PACKED, SCALE, BLOCK_SCALE = "#packed", "#scale", "#block_scale"
_CHUNK = 1 << 20  # values decoded at a time


class QuantisedCheckpoint:
    """Presents weight `X` in place of the tensors that store it, or the parts of it that `keeping` names.

    Parts have the axes of the weight in their order, with fewer columns (and, by blocks, fewer rows).
    """

    def __init__(self, stored: Checkpoint, format: StoredFormat, plain: Sequence[str]):
        self._stored, self.format = stored, format
        self._kept: frozenset[str] = frozenset()
        self.path: Path = stored.path
        self.config: dict[str, Any] = stored.config
        self.generation_config: dict[str, Any] = stored.generation_config
        self._shapes, self._names = _weights(stored, format, plain)

    def keeping(self, parts: Collection[str]) -> "QuantisedCheckpoint":
        """The same checkpoint, where these parts stand in place of their weights."""
        view = copy.copy(self)
        view._kept = frozenset(parts)
        return view

    def is_quantised(self, weight: str) -> bool:
        """True for a weight that is stored in the format."""
        return weight in self._shapes

    def decoded(self, name: str) -> bool:
        return name in self._shapes

    def names(self) -> Sequence[str]:
        split = {n.partition("#")[0] for n in self._kept}
        whole = ((n,) if n not in split else (n + PACKED, n + SCALE, n + BLOCK_SCALE) for n in self._names)
        return [n for parts in whole for n in parts if len(parts) == 1 or n in self._kept]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name] if name in self._shapes else self.read(name).shape

    def dtype(self, name: str) -> np.dtype:
        return np.dtype(np.float32) if name in self._shapes else self.read(name).dtype

    def nbytes(self, name: str) -> int:
        return sum(self._stored.nbytes(n) for n in self._files_of(name))

    def read(self, name: str, dtype: np.dtype | None = None) -> np.ndarray:
        weight, _, part = name.partition("#")
        if weight not in self._shapes:
            return self._stored.read(name)
        if part:
            stored = self._stored_part(weight, f"#{part}")
            return stored.swapaxes(-1, -2) if self.format.in_axis == -2 else stored
        out = np.empty(self._shapes[name], dtype or np.dtype(np.float32))
        self.decode(name, slice(0, len(out)), out)
        return out

    def decode(self, name: str, rows: slice, out: np.ndarray) -> None:
        if name not in self._shapes:
            copy_into(out, self.read(name)[rows])
            return
        packed, scales = self._stored_part(name, PACKED), self._stored_part(name, SCALE)
        step = max(1, _CHUNK // max(1, packed[0].size * self.format.per_item))
        for start in range(rows.start, rows.stop, step):
            part = slice(start, min(start + step, rows.stop))
            values = self.format.decode(packed[part], scales[part])
            target = out[part.start - rows.start : part.stop - rows.start]
            copy_into(target, values.swapaxes(-1, -2) if self.format.in_axis == -2 else values)

    def release(self, name: str) -> None:
        for file in self._files_of(name):
            self._stored.release(file)

    def fingerprint(self) -> bytes:
        return self._stored.fingerprint()

    def _stored_part(self, weight: str, part: str) -> np.ndarray:
        """A part `[…, out, in']` in the file's order of axes."""
        if part == PACKED:
            return self.format.packed(self._stored.read(weight + self.format.packed_suffix))
        scales = self._stored.read(weight + self.format.scale_suffix)
        if part == BLOCK_SCALE:
            return scales
        return self.format.row_scales(scales, self._stored.shape(weight + self.format.packed_suffix)[-2])

    def _files_of(self, name: str) -> tuple[str, ...]:
        weight, _, part = name.partition("#")
        if weight not in self._shapes:
            return (name,)
        packed, scale = weight + self.format.packed_suffix, weight + self.format.scale_suffix
        if not part:
            return packed, scale
        return (packed if f"#{part}" == PACKED else scale,)


def _weights(stored: Checkpoint, format: StoredFormat, plain: Sequence[str]) -> tuple[dict[str, tuple], list[str]]:
    """Shape of every quantised weight, and all names with weights in place of their parts, in file order."""
    present, shapes, hidden, wrong = set(stored.names()), {}, set(), []
    for scale in (n for n in stored.names() if n.endswith(format.scale_suffix)):
        weight = scale.removesuffix(format.scale_suffix)
        packed = weight + format.packed_suffix
        if packed not in present:
            wrong.append(f"{scale} has no {packed}")
            continue
        shape = format.shape(stored.shape(packed), stored.shape(scale))
        module = weight.removesuffix(".weight")
        if shape is None:
            wrong.append(f"{packed} of shape {stored.shape(packed)} has scales of shape {stored.shape(scale)}")
        elif ignored(module, plain):
            wrong.append(f"{packed} is quantised, but the config's ignore list names {module}")
        shapes[weight] = shape
        hidden.update((scale, packed, *(weight + s for s in format.other_suffixes)))
    alone = [n for n in stored.names() if format.packed_suffix and n.endswith(format.packed_suffix) and n not in hidden]
    wrong.extend(f"{n} has no scales" for n in alone)
    if wrong:
        raise ModelLoadError(
            f"{stored.path} does not hold what its quantization_config says: {'; '.join(sorted(wrong))}"
        )
    names = []
    for name in stored.names():
        weight = name.removesuffix(format.packed_suffix)
        if name.endswith(format.packed_suffix) and weight in shapes:
            names.append(weight)
        elif name not in hidden:
            names.append(name)
    return shapes, names
