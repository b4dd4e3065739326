"""Eight virtual CPU devices, strict array code, and models that tests share."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
_FLAG = "--xla_force_host_platform_device_count=8"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}".strip()

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "ci", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("ci")

GOLDEN = Path(__file__).parent / "oracle" / "golden"


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF of SmolLM2-135M-Instruct, fetched once into the user's cache."""
    from trillion_infer.weights.fetch import fetch_smollm2

    return fetch_smollm2()


MAX_LLMS = 8
"""Engines kept at once. Each compiled program takes a hundred memory maps, of which a process may have 65,530."""


@pytest.fixture(scope="session")
def make_llm() -> Callable:
    """make_llm(path or name of a tiny model, **options), shared by tests. `made`: the newest; others are closed.

    make_llm.fresh makes one that is the test's own.
    """
    from trillion_infer import LLM

    kept: dict = {}

    def fresh(model: str | Path, **options):
        path = GOLDEN / "tiny" / model if isinstance(model, str) else model
        return LLM(path, **{"dtype": "float32", "max_running": 8, "kv_memory": 16 * 2**20, "bundle": "", **options})

    def make(model: str | Path, **options):
        key = (model, *sorted(options.items()))
        llm = kept.pop(key, None)
        if llm is None:
            while len(kept) >= MAX_LLMS:
                kept.pop(next(iter(kept))).close()
                gc.collect()
            llm = fresh(model, **options)
        kept[key] = llm
        make.made = list(kept.values())
        return llm

    make.made, make.fresh = [], fresh
    return make


@pytest.fixture
def smollm2(make_llm, smollm2_path):
    """SmolLM2 in float32."""
    return make_llm(smollm2_path, kv_memory=400 * 2**20, max_running=8)


@pytest.fixture(autouse=True, scope="module")
def free_programs():
    """What a module's own functions compiled is dropped after it."""
    yield
    import jax

    jax.clear_caches()
    gc.collect()


AOT_SAMPLE = 6
"""Ahead-of-time compiles a test file keeps in an ordinary run, evenly spread over its matrix; --aot=all runs all."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--aot", choices=["sample", "all"], default="sample", help="how much of the compile matrices to run"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Thins out the matrices of ahead-of-time compiles, which take most of an hour as a whole."""
    if config.getoption("--aot") == "all":
        return
    by_file: dict[Path, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("aot"):
            by_file.setdefault(item.path, []).append(item)
    dropped = []
    for matrix in by_file.values():
        stride = max(1, -(-len(matrix) // AOT_SAMPLE))
        dropped += [item for place, item in enumerate(matrix) if place % stride]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        gone = set(dropped)
        items[:] = [item for item in items if item not in gone]
