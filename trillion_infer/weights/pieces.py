"""Cuts a plan's regions along the boundaries of shards, and further into blocks of bounded size."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from trillion_infer.weights.plan import Region

Bounds = tuple[tuple[int, int], ...]  # (start, stop) of a shard on each axis of its parameter
Cut = tuple[tuple[int, int], ...]  # (first, last + 1) of a region's own steps on each axis


@dataclass(frozen=True)
class Piece:
    """Values `source` of a region's transformed tensor go to `target` of a shard."""

    target: tuple[slice, ...]
    dropped: tuple[int, ...]
    source: tuple[slice, ...]
    size: int

    def squeeze(self, block: np.ndarray) -> np.ndarray:
        """A view of the target without the axes that the tensor does not have."""
        return block[tuple(0 if axis in self.dropped else slice(None) for axis in range(block.ndim))]


def pieces(region: Region, shard: Bounds, limit: int | None) -> Iterator[Piece]:
    """The part of `region` inside `shard`, if any, in pieces of at most `limit` values (None: one piece)."""
    cut = []
    for (start, stop, step), (low, high) in zip(region.box, shard, strict=True):
        first = max(0, -((start - low) // step))
        last = min(len(range(start, stop, step)), -((start - high) // step))
        if first >= last:
            return
        cut.append((first, last))
    for part in _split(tuple(cut), limit):
        yield Piece(
            tuple(
                slice(start + first * step - low, start + (last - 1) * step - low + 1, step)
                for (start, _, step), (low, _), (first, last) in zip(region.box, shard, part, strict=True)
            ),
            region.dropped,
            tuple(slice(*p) for axis, p in enumerate(part) if axis not in region.dropped),
            _size(part),
        )


def _size(cut: Cut) -> int:
    return math.prod(last - first for first, last in cut)


def _split(cut: Cut, limit: int | None) -> Iterator[Cut]:
    """Halves of the outermost axis that can be halved, until each is small enough."""
    axis = next((a for a, (first, last) in enumerate(cut) if last - first > 1), None)
    if limit is None or axis is None or _size(cut) <= limit:
        yield cut
        return
    first, last = cut[axis]
    middle = (first + last) // 2
    yield from _split((*cut[:axis], (first, middle), *cut[axis + 1 :]), limit)
    yield from _split((*cut[:axis], (middle, last), *cut[axis + 1 :]), limit)
