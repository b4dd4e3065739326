"""Masks of allowed tokens, packed 32 to a word: bit v % 32 of word v // 32 allows token v. Numpy, on the host."""

from collections.abc import Iterable

import numpy as np
from jaxtyping import Bool, UInt

ALL = np.uint32(0xFFFFFFFF)


def mask_words(vocab: int) -> int:
    """Words in a row of the mask, for the padded vocabulary."""
    return -(-vocab // 32)


def allow_all(num_rows: int, vocab: int) -> UInt[np.ndarray, "R W"]:
    return np.full((num_rows, mask_words(vocab)), ALL)


def pack_mask(allowed: Bool[np.ndarray, "R V"]) -> UInt[np.ndarray, "R W"]:
    """Bits of booleans; bits beyond the vocabulary are 0."""
    num_rows, vocab = allowed.shape
    padded = np.zeros((num_rows, mask_words(vocab) * 32), bool)
    padded[:, :vocab] = allowed
    return np.packbits(padded, axis=1, bitorder="little").view("<u4").astype(np.uint32)


def unpack_mask(mask: UInt[np.ndarray, "R W"], vocab: int) -> Bool[np.ndarray, "R V"]:
    """Booleans of bits, the inverse of `pack_mask`."""
    octets = np.ascontiguousarray(mask, dtype="<u4").view(np.uint8)
    return np.unpackbits(octets, axis=1, bitorder="little")[:, :vocab].astype(bool)


def forbid(mask_row: UInt[np.ndarray, "W"], tokens: Iterable[int]) -> None:
    """Clear the bits of these tokens, in place."""
    for token in tokens:
        mask_row[token >> 5] &= ~np.uint32(1 << (token & 31))
