"""Which page holds which tokens: page pool, prefix index, block identity, eviction. Plain Python, no JAX."""
