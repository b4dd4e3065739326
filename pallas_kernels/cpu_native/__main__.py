"""Builds the native library ahead of its first use and prints where it lies: `python -m pallas_kernels.cpu_native`.

Expected: the library's path, or a line that says why XLA serves instead. Exits with 0 either way.
"""

from pallas_kernels.cpu_native.build import library

built = library()
print(built.path or f"Native CPU kernels are not available, XLA serves instead: {built.reason}.")
