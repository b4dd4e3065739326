"""After every test of the engine, every page of every engine is home."""

from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tests.engine.helpers import check_idle
from tests.engine.mixed_requests import MixedRequests, mixed_requests
from tests.engine.test_equalities import SMALL

NO_SHARE = "two devices cannot share pages of 8 latents, and blocks are found by pages of one size"
EIGHT_BITS = "in eight bits the KV heads of these models do not fill a TPU's words, nor their latents its lanes"
CANNOT_BE_INTERPRETED = (
    ("test_interpret.py", "", "names its kernels itself"),
    ("test_smollm2.py", "", "real weights take minutes a test"),
    ("test_pallas_kernels_that_cannot_run_here_are_refused", "", "interpreted, they can run here"),
    ("_copies_a_pool", "", "it reads XLA's program and the native one; tests/plan reads the kernels'"),
    ("test_quantised_kv.py", "tpu", EIGHT_BITS),
    ("test_kv_is_converted_", "tpu", EIGHT_BITS),
    ("_another_mesh[deepseek_v3", "tpu", NO_SHARE),
    ("test_another_mesh_finds_what_one_device_stored[deepseek_v3", "tpu", NO_SHARE),
    ("whatever_their_mesh[deepseek_v3", "tpu", NO_SHARE),
)
"""With --kernels: part of a test's name, whose kernels (of any: ""), and why it cannot run on them."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --kernels only engines of make_llm run them: other tests would say what they say without it."""
    kernels = config.getoption("--kernels")
    if not kernels:
        return
    here = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    without = {item for item in here if "make_llm" not in getattr(item, "fixturenames", ())}
    for item in here:
        for part, platform, reason in CANNOT_BE_INTERPRETED:
            if part in item.nodeid and platform in ("", kernels):
                item.add_marker(pytest.mark.skip(reason=reason))
    if without:
        config.hook.pytest_deselected(items=list(without))
        items[:] = [item for item in items if item not in without]


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
