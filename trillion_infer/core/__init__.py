"""Requests, sampling parameters, outputs and typed errors: the vocabulary every other folder speaks. No JAX."""
