"""Attention and matmul for serving: one folder per operation, each with an XLA reference and Pallas kernels."""
