"""After every test of the engine, every page of every engine is home."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tests.engine.helpers import check_idle
from tests.engine.mixed_requests import MixedRequests, mixed_requests
from tests.engine.test_equalities import SMALL


@pytest.fixture(autouse=True)
def every_page_is_home(request: pytest.FixtureRequest):
    """free + cached == total in each LLM that tests share, and no request is left."""
    yield
    if "make_llm" in request.fixturenames:
        for llm in request.getfixturevalue("make_llm").made:
            check_idle(llm)


@pytest.fixture(scope="module")
def no_compile_cache():
    """XLA's persistent cache, which an LLM of another module may have turned on, is off: bundles can be written."""
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    jax.clear_caches()


@pytest.fixture(scope="module")
def mixed(make_llm):
    """mixed(name): hundreds of requests, and the tokens of one engine; made once a model."""
    kept = {}

    def of(name: str) -> MixedRequests:
        if name not in kept:
            kept[name] = mixed_requests(make_llm(name, **SMALL))
        return kept[name]

    return of
