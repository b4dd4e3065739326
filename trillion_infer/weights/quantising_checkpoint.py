"""A plain checkpoint as if it held the packed items and scales of its weights, rounded when they are read."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trillion_infer.weights.cast import copy_into
from trillion_infer.weights.checkpoint import Checkpoint
from trillion_infer.weights.quant_checkpoint import PACKED, SCALE
from trillion_infer.weights.rounding import Recipe, packed, scales_of
from trillion_infer.weights.spec import Source


@dataclass(frozen=True)
class Rounding:
    """How one tensor becomes packed items and scales: its own transform, then the recipe over its trailing axes."""

    source: Source
    in_axes: int
    recipe: Recipe
    repeats: int  # of each scale, along the row

    def part(self, weight: np.ndarray, suffix: str) -> np.ndarray:
        """The packed items or the scales of a weight that the transform has been applied to."""
        if suffix == PACKED:
            return packed(weight, self.recipe, self.in_axes)
        scales = scales_of(weight, self.recipe, self.in_axes)
        return np.repeat(scales, self.repeats, axis=-1) if self.repeats > 1 else scales


class QuantisingCheckpoint:
    """Presents two parts in place of every weight that `roundings` names. Host memory: one tensor a reading thread."""

    def __init__(self, stored: Checkpoint, roundings: Mapping[str, Rounding]):
        self._stored, self._roundings = stored, roundings
        self.path: Path = stored.path
        self.config: dict[str, Any] = stored.config
        self.generation_config: dict[str, Any] = stored.generation_config

    def decoded(self, name: str) -> bool:
        return self._rounding(name) is not None or self._stored.decoded(name)

    def names(self) -> Sequence[str]:
        return [
            part
            for name in self._stored.names()
            for part in ((name + PACKED, name + SCALE) if name in self._roundings else (name,))
        ]

    def shape(self, name: str) -> tuple[int, ...]:
        rounding = self._rounding(name)
        if rounding is None:
            return self._stored.shape(name)
        weight = name.partition("#")[0]
        shape = self._stored.shape(weight)
        if rounding.source.transform is not None:
            stand_in = np.broadcast_to(np.zeros((), self._stored.dtype(weight)), shape)
            shape = rounding.source.transform(stand_in).shape
        outs, width = shape[: len(shape) - rounding.in_axes], math.prod(shape[len(shape) - rounding.in_axes :])
        if name.endswith(PACKED):
            return (*outs, width // rounding.recipe.per_item)
        return (*outs, width // rounding.recipe.group * rounding.repeats) if rounding.recipe.group else outs

    def dtype(self, name: str) -> np.dtype:
        rounding = self._rounding(name)
        if rounding is None:
            return self._stored.dtype(name)
        return rounding.recipe.packed_dtype if name.endswith(PACKED) else rounding.recipe.scale_dtype

    def nbytes(self, name: str) -> int:
        """A weight's bytes are those of its packed part."""
        if self._rounding(name) is None:
            return self._stored.nbytes(name)
        return self._stored.nbytes(name.partition("#")[0]) if name.endswith(PACKED) else 0

    def read(self, name: str, dtype: np.dtype | None = None) -> np.ndarray:
        rounding = self._rounding(name)
        if rounding is None:
            return self._stored.read(name, dtype)
        weight = self._stored.read(name.partition("#")[0])
        transform = rounding.source.transform
        return rounding.part(weight if transform is None else transform(weight), "#" + name.partition("#")[2])

    def decode(self, name: str, rows: slice, out: np.ndarray) -> None:
        rounding = self._rounding(name)
        if rounding is None:
            self._stored.decode(name, rows, out)
            return
        weight, _, part = name.partition("#")
        if rounding.source.transform is not None:
            copy_into(out, self.read(name)[rows])
            return
        if self._stored.decoded(weight):
            values = np.empty((rows.stop - rows.start, *self._stored.shape(weight)[1:]), np.float32)
            self._stored.decode(weight, rows, values)
        else:
            values = self._stored.read(weight)[rows]
        copy_into(out, rounding.part(values, f"#{part}"))

    def release(self, name: str) -> None:
        self._stored.release(name.partition("#")[0])

    def fingerprint(self) -> bytes:
        return self._stored.fingerprint()

    def _rounding(self, name: str) -> Rounding | None:
        weight, mark, _ = name.partition("#")
        return self._roundings.get(weight) if mark else None
