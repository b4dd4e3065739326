"""Native kernels for CPUs, called by XLA through its foreign function interface: `attention`, `matmul`, `memory`."""

from pallas_kernels.cpu_native.load import Native, native, prefer
from pallas_kernels.cpu_native.memory import will_need

__all__ = ["Native", "native", "prefer", "will_need"]
