"""Attention of ragged batches (decode, chunked prefill, verification) over a paged key-value pool."""

from pallas_kernels.ragged_paged_attention.api import ragged_paged_attention
from pallas_kernels.ragged_paged_attention.values import pool_shape, scale_shape

__all__ = ["pool_shape", "ragged_paged_attention", "scale_shape"]
