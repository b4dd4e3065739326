"""Bundles are written from fresh compilations only: what other tests have cached must not stand in for them."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


@pytest.fixture(autouse=True, scope="module")
def no_compile_cache():
    """XLA's persistent cache, which an LLM of another module may have turned on, is off."""
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    jax.clear_caches()
