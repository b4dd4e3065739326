"""Matmuls of a mixture of experts: tokens grouped by expert, each group with a weight of its own."""

from pallas_kernels.grouped_matmul.activations import ACTIVATIONS
from pallas_kernels.grouped_matmul.api import grouped_ffn, grouped_matmul

__all__ = ["ACTIVATIONS", "grouped_ffn", "grouped_matmul"]
