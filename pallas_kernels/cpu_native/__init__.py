"""Native kernels for CPUs, called by XLA through its foreign function interface."""

from pallas_kernels.cpu_native.load import Native, native
from pallas_kernels.cpu_native.matmul import matmul

__all__ = ["Native", "matmul", "native"]
