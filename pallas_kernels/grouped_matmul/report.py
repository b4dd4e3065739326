"""Rows of the kernel report: real shapes, compiled for a target that is not here."""

from pallas_kernels.common.kernel_report import product_report
from pallas_kernels.grouped_matmul.ahead_of_time import TOKENS, compile_layer
from pallas_kernels.grouped_matmul.arg_specs import SPECS
from pallas_kernels.grouped_matmul.cost import fewest, gpu_cost, tpu_cost

REPORT = product_report("grouped_matmul", SPECS, TOKENS, compile_layer, {"tpu": tpu_cost, "gpu": gpu_cost}, fewest)
