"""A token-aware router for OpenAI-compatible workers: an ordinary HTTP process without JAX."""
