"""Layouts in which the leaves of a quantised weight must lie in a TPU's memory for its kernels to read them in place.

XLA lays out an array so that tiles waste least, whatever the order of its axes. For the scales of gpt-oss's experts,
90 a row, that puts the experts into a tile's rows, and a program would lay out a layer anew each time it reads it.
"""

import itertools
import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.experimental.layout import Format, Layout

from pallas_kernels.quantised_matmul.formats import QuantisedTensor
from pallas_kernels.quantised_matmul.tiles import major_to_minor

TURNED = (None, "int4", "int4_affine", "mxfp4")
"""Formats whose leaves kernels read with their last two axes swapped where a TPU lays them out so; None: plain."""
HOST_KINDS = ("pinned_host", "unpinned_host")


def as_kernels_read(params: Mapping[str, Any]) -> dict[str, Any]:
    """Abstract weights whose leaves have layouts where a TPU would choose others than its kernels read.

    Args:
      params: weights by name, quantised or not, as ShapeDtypeStructs with shardings. Other platforms' and those in host
        memory stay as they are.
    """
    return {name: jax.tree.map(_laid_out, weight) if _turned(weight) else weight for name, weight in params.items()}


def lay_out(params: dict[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Moves weights in `params` to the layouts of the abstract ones of the same names, and returns `params`.

    One after another, so that no more than one takes its memory twice.
    """
    for name, asked in wanted.items():
        if any(leaf.format.layout for leaf in jax.tree.leaves(asked)):
            params[name] = jax.block_until_ready(jax.tree.map(_moved, params.pop(name), asked))
    return params


def laid_out_otherwise(leaf: Any) -> bool:
    """Whether a TPU would put other axes than the last two of a device's part of a leaf into the rows and columns of
    its tiles, since that pads less."""
    tile, size = 32 // leaf.dtype.itemsize, math.prod(leaf.shape)

    def padded(rows: int, columns: int) -> int:
        return size // (rows * columns) * (-(-rows // tile) * tile) * (-(-columns // 128) * 128)

    *_, n_out, n_in = leaf.shape
    as_read = min(padded(n_out, n_in), padded(n_in, n_out))
    return min(itertools.starmap(padded, itertools.permutations(leaf.shape, 2))) < as_read


def _turned(weight: Any) -> bool:
    return isinstance(weight, QuantisedTensor) and weight.format in TURNED


def _laid_out(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    sharding: Any = leaf.sharding
    local: Any = jax.ShapeDtypeStruct(sharding.shard_shape(leaf.shape), leaf.dtype)
    on_tpu = next(iter(sharding.device_set)).platform == "tpu" and sharding.memory_kind not in HOST_KINDS
    if not on_tpu or not laid_out_otherwise(local):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=Format(Layout(major_to_minor(local)), sharding))


def _moved(array: Any, asked: jax.ShapeDtypeStruct) -> jax.Array:
    found: Any = array.format.layout
    wanted: Any = asked.format.layout
    same = wanted is None or (found is not None and found.major_to_minor == wanted.major_to_minor)
    return array if same else jax.device_put(array, asked.format)
