"""GGML block formats to numbers, natively where that is built, else in numpy by ranges that stay in the cache.

Each unpacker turns blocks `[n, bytes]` (uint8) into values `[n, block]` (float32) with the arithmetic of ggml's
reference, so results are equal to it bit for bit. Types without an unpacker here go through the gguf package.
"""

from collections.abc import Callable

import ml_dtypes
import numpy as np

from pallas_kernels.cpu_native.memory import decode_blocks
from trillion_infer.core.errors import UnsupportedModelError
from trillion_infer.weights.cast import copy_into
from trillion_infer.weights.gguf_types import GGMLType

PLAIN: dict[GGMLType, np.dtype] = {
    GGMLType.F32: np.dtype(np.float32),
    GGMLType.F16: np.dtype(np.float16),
    GGMLType.BF16: np.dtype(ml_dtypes.bfloat16),
}
_LOW_NIBBLES = np.uint64(0x0F0F0F0F0F0F0F0F)
_CHUNK = 1 << 17  # values at a time: 512 KiB of float32 scratch


def dequantise(raw: np.ndarray, qtype: GGMLType, out: np.ndarray) -> None:
    """Packed blocks (uint8, contiguous) into `out`, of any floating dtype and memory order.

    Raises UnsupportedModelError for block formats that nothing here decodes.
    """
    if qtype in PLAIN:
        copy_into(out, raw.reshape(-1).view(PLAIN[qtype]).reshape(out.shape))
        return
    if not out.flags.c_contiguous:
        ordered = np.empty(out.shape, out.dtype)
        dequantise(raw, qtype, ordered)
        copy_into(out, ordered)
        return
    if decode_blocks(raw, qtype.name, out):
        return
    block, block_bytes = GGMLType(qtype).block
    blocks, target = raw.reshape(-1, block_bytes), out.reshape(-1, block)
    unpack, step = _UNPACK.get(qtype), max(1, _CHUNK // block)
    scratch = np.empty((step, block), np.float32)
    for start in range(0, len(blocks), step):
        part = blocks[start : start + step]
        values = scratch[: len(part)]
        if unpack is None:
            values[...] = _by_package(part, qtype)
        else:
            unpack(part, values)
        target[start : start + step] = values


def _by_package(blocks: np.ndarray, qtype: GGMLType) -> np.ndarray:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        return dequantize(blocks, GGMLQuantizationType(qtype))
    except NotImplementedError as error:
        raise UnsupportedModelError(
            f"the GGUF holds tensors of type {qtype.name}, which cannot be decoded; use Q4_0, Q4_K_M, Q8_0 or BF16"
        ) from error


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at byte `at` of each block, `[n, 1]` float32."""
    return blocks[:, at : at + 2].view(np.float16).astype(np.float32)


def _nibbles(packed: np.ndarray, groups: int) -> np.ndarray:
    """`[n, groups * w]` bytes to `[n, groups, 2, w]` uint8: low halves, then high halves, of each group."""
    words = np.ascontiguousarray(packed).view(np.uint64).reshape(len(packed), groups, -1)
    low, high = words & _LOW_NIBBLES, (words >> np.uint64(4)) & _LOW_NIBBLES
    return np.stack((low, high), axis=2).view(np.uint8)


def _scaled(q: np.ndarray, d: np.ndarray, out: np.ndarray) -> None:
    """`out[n, g * w] = d[n, g] * q[n, g * w]`."""
    grid = out.reshape(*d.shape, -1)
    np.copyto(grid, q.reshape(grid.shape))
    np.multiply(grid, d[..., None], out=grid)


def _q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    _scaled(_nibbles(blocks[:, 2:], 1).view(np.int8) - np.int8(8), _half(blocks, 0), out)


def _q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    _scaled(_nibbles(blocks[:, 4:], 1), _half(blocks, 0), out)
    np.add(out, _half(blocks, 2), out=out)


def _fifth_bits(blocks: np.ndarray, at: int) -> np.ndarray:
    bits = np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little")
    return np.left_shift(bits, 4, out=bits)


def _q5_0(blocks: np.ndarray, out: np.ndarray) -> None:
    q = _nibbles(blocks[:, 6:], 1).reshape(-1, 32) | _fifth_bits(blocks, 2)
    _scaled(q.view(np.int8) - np.int8(16), _half(blocks, 0), out)


def _q5_1(blocks: np.ndarray, out: np.ndarray) -> None:
    _scaled(_nibbles(blocks[:, 8:], 1).reshape(-1, 32) | _fifth_bits(blocks, 4), _half(blocks, 0), out)
    np.add(out, _half(blocks, 2), out=out)


def _q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    _scaled(blocks[:, 2:].view(np.int8), _half(blocks, 0), out)


def _k_scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """12 bytes of 6-bit scales and minima, `[n, 12]`, to two `[n, 8]` float32."""
    low, high, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = np.concatenate([low & 0x3F, (rest & 0x0F) | ((low >> 2) & 0x30)], axis=1)
    minimum = np.concatenate([high & 0x3F, (rest >> 4) | ((high >> 2) & 0x30)], axis=1)
    return scale.astype(np.float32), minimum.astype(np.float32)


def _k_affine(blocks: np.ndarray, q: np.ndarray, out: np.ndarray) -> None:
    scale, minimum = _k_scales(blocks[:, 4:16])
    _scaled(q, _half(blocks, 0) * scale, out)
    grid = out.reshape(-1, 8, 32)
    np.subtract(grid, (_half(blocks, 2) * minimum)[..., None], out=grid)


def _q4_k(blocks: np.ndarray, out: np.ndarray) -> None:
    _k_affine(blocks, _nibbles(blocks[:, 16:], 4), out)


def _q5_k(blocks: np.ndarray, out: np.ndarray) -> None:
    q = _nibbles(blocks[:, 48:], 4).reshape(-1, 8, 32)
    for group in range(8):
        q[:, group] |= ((blocks[:, 16:48] >> group) & 1) << 4
    _k_affine(blocks, q, out)


def _q6_k(blocks: np.ndarray, out: np.ndarray) -> None:
    q = _nibbles(blocks[:, :128], 2).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 32)
    for quarter in range(4):
        q[:, :, quarter] |= ((high >> (2 * quarter)) & 3) << 4
    d = _half(blocks, 208) * blocks[:, 192:208].view(np.int8)
    _scaled(q.view(np.int8) - np.int8(32), d, out)


_UNPACK: dict[GGMLType, Callable[[np.ndarray, np.ndarray], None]] = {
    GGMLType.Q4_0: _q4_0,
    GGMLType.Q4_1: _q4_1,
    GGMLType.Q5_0: _q5_0,
    GGMLType.Q5_1: _q5_1,
    GGMLType.Q8_0: _q8_0,
    GGMLType.Q4_K: _q4_k,
    GGMLType.Q5_K: _q5_k,
    GGMLType.Q6_K: _q6_k,
}
