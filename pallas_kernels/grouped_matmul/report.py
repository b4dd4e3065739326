"""Rows of the kernel report: real shapes, compiled for a target that is not here."""

from pallas_kernels.common.product_report import ProductReport
from pallas_kernels.grouped_matmul.ahead_of_time import TOKENS, compile_layer
from pallas_kernels.grouped_matmul.arg_specs import SPECS
from pallas_kernels.grouped_matmul.cost import fewest, gpu_cost, tpu_cost

row = ProductReport("grouped_matmul", SPECS, TOKENS, compile_layer, {"tpu": tpu_cost, "gpu": gpu_cost}, fewest).row
