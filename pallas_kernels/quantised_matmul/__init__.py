"""Weight-only quantised matmul, and the formats that weights are kept in."""

from pallas_kernels.quantised_matmul.api import quantised_matmul
from pallas_kernels.quantised_matmul.formats import QuantisedTensor, abstract, dequantise, quantise
from pallas_kernels.quantised_matmul.tiles import major_to_minor

__all__ = ["QuantisedTensor", "abstract", "dequantise", "major_to_minor", "quantise", "quantised_matmul"]
