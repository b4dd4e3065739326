"""Eight virtual CPU devices, strict array code, and models that tests share."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
_FLAGS = {"xla_force_host_platform_device_count": 8, "xla_backend_optimization_level": 0}
"""Most of the suite's time is compiling tiny models, which LLVM's optimisations would double; `make test-slow`,
`test-aot` and `test-oldest` set the level that users have."""
for _name, _value in _FLAGS.items():
    if _name not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --{_name}={_value}".strip()

import gc
from collections.abc import Callable, Iterator
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


def few_buckets(*sizes: int):
    """The largest bucket of each kind: compiling an interpreted kernel takes seconds, and they all run the same one."""
    from trillion_infer.engine.buckets import Buckets, make_buckets

    made = make_buckets(*sizes)
    of_one = [bucket for bucket in made.verify if bucket.sequences == 1]
    return Buckets(made.decode[-1:], made.mixed[-1:], tuple(sorted({*of_one[-1:], *made.verify[-1:]})))


@pytest.fixture(scope="session")
def make_llm(pytestconfig) -> Iterator[Callable]:
    """make_llm(path or name of a tiny model, **options), shared by tests. `made`: the newest; others are closed.

    make_llm.fresh makes one that is the test's own. Both run the kernels that `--kernels` names, interpreted.
    """
    from trillion_infer import LLM, ConfigError

    kept, patch = {}, pytest.MonkeyPatch()
    usual = {"dtype": "float32", "max_running": 8, "kv_memory": 16 * 2**20, "bundle": ""}
    if platform := pytestconfig.getoption("--kernels"):
        usual |= {"attention": platform, "interpret": True}
        patch.setattr("trillion_infer.engine.build.make_buckets", few_buckets)

    def fresh(model: str | Path, **options):
        path = GOLDEN / "tiny" / model if isinstance(model, str) else model
        options = {**usual, **options}
        try:
            llm = LLM(path, **options)
        except ConfigError as error:
            if not platform or "kernels read pages" not in str(error):
                raise
            llm = LLM(path, **{**options, "page_size": None})  # the least that these kernels can read
        llm.wait_for_programs()  # so that steps and compilations can be counted
        return llm

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
    yield make
    patch.undo()


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


AOT_SAMPLE = 4
"""Ahead-of-time compiles a test file keeps in an ordinary run, evenly spread over its matrix; --aot=all runs all."""

MATRIX_SAMPLE = 2
"""Parameters a test marked `matrix` keeps in an ordinary run, each of which builds engines; --matrix=all runs all. A
test marked `matrix(1)`, whose engines take long to compile, keeps the first."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kernels", choices=["tpu", "gpu"], help="run engines of tiny models on these, interpreted")
    parser.addoption("--rows", type=Path, help="folder for rows of docs/kernels.json, a file a compiled kernel")
    for name, what in (("--aot", "of the compile matrices"), ("--matrix", "of the matrices of engines")):
        parser.addoption(name, choices=["sample", "all"], default="sample", help=f"how much {what} to run")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Thins out matrices that take most of an hour as a whole."""
    groups: dict[tuple[object, int], list[pytest.Item]] = {}
    for item in items:
        if config.getoption("--aot") == "sample" and item.get_closest_marker("aot"):
            groups.setdefault((item.path, AOT_SAMPLE), []).append(item)
        elif config.getoption("--matrix") == "sample" and (matrix := item.get_closest_marker("matrix")):
            most = matrix.args[0] if matrix.args else MATRIX_SAMPLE
            groups.setdefault((item.nodeid.partition("[")[0], most), []).append(item)
    dropped = set(_beyond(groups))
    if dropped:
        config.hook.pytest_deselected(items=list(dropped))
        items[:] = [item for item in items if item not in dropped]


def _beyond(groups: dict[tuple[object, int], list[pytest.Item]]) -> list[pytest.Item]:
    """What a spread sample of each group leaves out; a group's key ends with how many it keeps at most."""
    left = []
    for (_, most), group in groups.items():
        stride = max(1, -(-len(group) // most))
        left += [item for place, item in enumerate(group) if place % stride]
    return left
