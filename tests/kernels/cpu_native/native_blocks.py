"""Blocks of GGUF files."""

import gguf
import numpy as np

GGUF = {"Q8_0": 32, "Q4_0": 32, "Q4_1": 32, "Q4_K": 256}
"""Elements a block of each format."""


def random_blocks(format: str, rows: int, depth: int, seed: int = 0) -> np.ndarray:
    """Blocks with every bit pattern in the quants, and scales that are finite."""
    quant = gguf.GGMLQuantizationType[format]
    values, size = gguf.GGML_QUANT_SIZES[quant]
    rng = np.random.default_rng((rows * depth, seed))
    blocks = rng.integers(0, 256, (rows * depth // values, size), np.uint8)
    halves = 1 if format in ("Q8_0", "Q4_0") else 2
    blocks[:, : 2 * halves] = rng.normal(size=(len(blocks), halves)).astype(np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)
