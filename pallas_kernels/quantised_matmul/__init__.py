"""Weight-only quantised matmul, and the formats that weights are kept in."""

from typing import TYPE_CHECKING

from pallas_kernels.common.lazy import names_on_use
from pallas_kernels.quantised_matmul.formats import QuantisedTensor, abstract, dequantise, quantise

if TYPE_CHECKING:
    from pallas_kernels.quantised_matmul.api import quantised_matmul
    from pallas_kernels.quantised_matmul.tiles import major_to_minor

__all__ = ["QuantisedTensor", "abstract", "dequantise", "major_to_minor", "quantise", "quantised_matmul"]

__getattr__ = names_on_use(__name__, {"quantised_matmul": "api", "major_to_minor": "tiles"})
