"""Weights of a GGUF file that stay in memory as the blocks of the file."""

import copy
import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from pallas_kernels.quantised_matmul.formats import Format, QuantisedTensor
from pallas_kernels.quantised_matmul.gguf_blocks import GGUF_BLOCKS
from trillion_infer.weights.gguf import GGUFCheckpoint
from trillion_infer.weights.plan import region_of
from trillion_infer.weights.quant_checkpoint import PACKED, SCALE
from trillion_infer.weights.quant_load import KeptQuantised, first_axes
from trillion_infer.weights.spec import ParamSpec, Source

Transform = Callable[[np.ndarray], np.ndarray]


def keep_blocks(
    specs: Mapping[str, ParamSpec], shardings: Mapping[str, Sharding], checkpoint: GGUFCheckpoint
) -> KeptQuantised:
    """What to load so that weights of products stay in blocks: those whose tensors are all of one format with a
    native product, where no shard, no padding and no transform breaks a block. The others are decoded."""
    found = _kept(specs, shardings, checkpoint)
    out_specs, out_shardings, parts = {}, {}, set()
    for name, spec in specs.items():
        if name not in found:
            out_specs[name], out_shardings[name] = spec, shardings[name]
            continue
        _, packed, scale = found[name]
        for suffix, part in ((PACKED, packed), (SCALE, scale)):
            out_specs[name + suffix] = part
            out_shardings[name + suffix] = first_axes(shardings[name], len(part.shape))
        parts.update(source.name for source in packed.sources)
    formats: dict[str, tuple[Format, int]] = {name: (format, 0) for name, (format, _, _) in found.items()}
    return KeptQuantised(out_specs, out_shardings, PackedGGUF(checkpoint, parts), formats)


def abstract_blocks(
    specs: Mapping[str, ParamSpec], shardings: Mapping[str, Sharding], checkpoint: GGUFCheckpoint
) -> dict[str, QuantisedTensor]:
    """Shapes and shardings of the parameters that `keep_blocks` keeps."""

    def leaf(spec: ParamSpec, sharding: Sharding) -> Any:
        at = first_axes(sharding, len(spec.shape))
        return jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype), sharding=at)

    return {
        name: QuantisedTensor(leaf(packed, shardings[name]), leaf(scale, shardings[name]), format, 0)
        for name, (format, packed, scale) in _kept(specs, shardings, checkpoint).items()
    }


Kept = dict[str, tuple[Format, ParamSpec, ParamSpec]]


def _kept(specs: Mapping[str, ParamSpec], shardings: Mapping[str, Sharding], checkpoint: GGUFCheckpoint) -> Kept:
    keeps = functools.cache(_keeps_columns)  # one transform is of many layers
    users = Counter(source.name for spec in specs.values() for source in spec.sources)
    stored, found = set(checkpoint.names()), {}
    for name, spec in specs.items():
        alone = all(users[s.name] == 1 and s.name in stored for s in spec.sources)
        if spec.in_axes and spec.sources and alone:
            parts = _split(spec, shardings[name], checkpoint, keeps)
            if parts is not None:
                found[name] = parts
    return found


def _split(
    spec: ParamSpec,
    sharding: Sharding,
    checkpoint: GGUFCheckpoint,
    keeps: Callable[[Transform | None, int, tuple[int, ...]], bool],
) -> tuple[Format, ParamSpec, ParamSpec] | None:
    formats = {checkpoint.block_type(s.name).lower() for s in spec.sources}
    if len(formats) != 1 or not formats <= GGUF_BLOCKS.keys():
        return None
    format: Any = formats.pop()
    values, size = GGUF_BLOCKS[format]
    outs = len(spec.shape) - spec.in_axes
    inner, width = math.prod(spec.shape[outs + 1 :]), math.prod(spec.shape[outs:])
    edges = [edge * inner for s in spec.sources for edge in region_of(s, spec.shape).box[outs][:2]]
    shard = math.prod(sharding.shard_shape(spec.shape)[outs:])
    if any(n % values for n in (width, shard, *edges)):
        return None
    sources = []
    for s in spec.sources:
        if not keeps(s.transform, spec.in_axes, checkpoint.shape(s.name)):
            return None
        index = s.index[:outs]
        if len(s.index) > outs:
            start, stop, _ = region_of(s, spec.shape).box[outs]
            index = (*index, slice(start * inner // values * size, stop * inner // values * size))
        sources.append(Source(s.name + PACKED, index, s.transform if spec.in_axes == 1 else None))
    axes = spec.axes[: outs + 1]
    packed = ParamSpec((*spec.shape[:outs], width // values * size), "uint8", axes, tuple(sources))
    return format, packed, ParamSpec((*spec.shape[:outs], 0), "uint8", axes)


def _keeps_columns(transform: Transform | None, in_axes: int, shape: tuple[int, ...]) -> bool:
    """True when the transform leaves columns (with several `in` axes: rows, too) whole and in their order."""
    if transform is None:
        return True
    columns = np.arange(shape[-1])
    moved = transform(np.broadcast_to(columns, shape))
    by_row = moved.reshape(-1, math.prod(moved.shape[moved.ndim - in_axes :]))
    if by_row.shape[1] != shape[-1] or not (by_row == columns).all():
        return False
    if in_axes == 1:
        return True
    rows = transform(np.broadcast_to(np.arange(shape[0])[:, None], shape))
    return bool((rows.reshape(shape[0], -1) == np.arange(shape[0])[:, None]).all())


class PackedGGUF:
    """A GGUF file where the blocks of some tensors stand in place of their values, as uint8 `[rows, bytes]`."""

    def __init__(self, stored: GGUFCheckpoint, parts: Collection[str]):
        self._stored, self._parts = stored, frozenset(parts)
        self.path: Path = stored.path
        self.config: dict[str, Any] = copy.copy(stored.config)
        self.generation_config: dict[str, Any] = stored.generation_config

    def decoded(self, name: str) -> bool:
        return name not in self._parts

    def names(self) -> Sequence[str]:
        return [n + PACKED if n + PACKED in self._parts else n for n in self._stored.names()]

    def shape(self, name: str) -> tuple[int, ...]:
        stored = self._stored
        return stored.packed_shape(name.removesuffix(PACKED)) if name in self._parts else stored.shape(name)

    def dtype(self, name: str) -> np.dtype:
        return np.dtype(np.uint8) if name in self._parts else self._stored.dtype(name)

    def nbytes(self, name: str) -> int:
        return self._stored.nbytes(name.removesuffix(PACKED))

    def read(self, name: str, dtype: np.dtype | None = None) -> np.ndarray:
        return self._blocks(name) if name in self._parts else self._stored.read(name, dtype)

    def decode(self, name: str, rows: slice, out: np.ndarray) -> None:
        self._stored.decode(name, rows, out)

    def release(self, name: str) -> None:
        self._stored.release(name.removesuffix(PACKED))

    def fingerprint(self) -> bytes:
        return self._stored.fingerprint()

    def _blocks(self, name: str) -> np.ndarray:
        return self._stored.read_raw(name.removesuffix(PACKED))[1]
