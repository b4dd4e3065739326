"""Native kernels for CPUs, called by XLA through its foreign function interface."""

from pallas_kernels.cpu_native.attention import latent_paged_attention, ragged_paged_attention
from pallas_kernels.cpu_native.load import Native, native, prefer
from pallas_kernels.cpu_native.matmul import (
    gguf_matmul,
    grouped_matmul,
    matmul,
    quantised_grouped_matmul,
    quantised_matmul,
)
from pallas_kernels.cpu_native.memory import will_need

__all__ = [
    "Native",
    "gguf_matmul",
    "grouped_matmul",
    "latent_paged_attention",
    "matmul",
    "native",
    "prefer",
    "quantised_grouped_matmul",
    "quantised_matmul",
    "ragged_paged_attention",
    "will_need",
]
