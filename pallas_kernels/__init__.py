"""Attention and matmul operations for serving: one folder per operation, each with an XLA reference and Pallas kernels."""
