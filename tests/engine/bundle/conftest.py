"""Bundles are written from fresh compilations only: what other tests have cached must not stand in for them."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def only_fresh_programs(no_compile_cache):
    """XLA's persistent cache, which an LLM of another module may have turned on, is off."""
