"""KV blocks beyond device memory: host memory and disk behind one interface. Plain Python, no JAX."""
