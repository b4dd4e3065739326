"""Weight-only quantised matmul, and the formats that weights are kept in."""

from pallas_kernels.quantised_matmul.api import quantised_matmul
from pallas_kernels.quantised_matmul.formats import QuantisedTensor, abstract, dequantise, quantise

__all__ = ["QuantisedTensor", "abstract", "dequantise", "quantise", "quantised_matmul"]
