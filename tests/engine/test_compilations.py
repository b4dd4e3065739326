"""After warm-up nothing is compiled, and nothing is copied that need not be."""

import itertools
import math
import os
import random
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.engine.helpers import check_idle
from trillion_infer import SamplingParams
from trillion_infer.engine.programs import abstract, compile_program


def mixed_requests(count: int, vocab: int) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(0)
    prompts = [[rng.randrange(4, vocab) for _ in range(rng.randrange(1, 70))] for _ in range(count)]
    params = [
        SamplingParams(
            temperature=rng.choice([0.0, 0.7, 1.3]),
            top_k=rng.choice([0, 1, 5]),
            top_p=rng.choice([1.0, 0.9]),
            min_p=rng.choice([0.0, 0.1]),
            seed=rng.choice([None, 3]),
            max_tokens=rng.randrange(1, 24),
            min_tokens=rng.choice([0, 1]),
            logprobs=rng.choice([None, 0, 5]),
            prompt_logprobs=rng.choice([None, None, 2]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            presence_penalty=rng.choice([0.0, 0.5]),
            logit_bias=rng.choice([None, {5: -100.0, 7: 2.0}]),
            n=rng.choice([1, 1, 2]),
        )
        for _ in range(count)
    ]
    return prompts, params


@pytest.mark.matrix
@pytest.mark.parametrize("mesh", [None, "tensor=2", "data=2", "stage=2"])
def test_200_mixed_requests_compile_nothing(make_llm, mesh):
    llm = make_llm("smollm2", page_size=8, prefill_chunk=16, **({"mesh": mesh} if mesh else {}))
    compiled: list[str] = []

    def listen(event: str, duration: float, **kwargs: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    before = llm.stats()["compilations"]
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        outputs = llm.generate(*mixed_requests(200, 128))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert all(output.finished for output in outputs)
    assert llm.stats()["compilations"] == before
    assert compiled == []
    check_idle(llm)


@pytest.mark.parametrize("attention", ["auto", "reference"])
@pytest.mark.parametrize("which", ["decode", "mixed"])
def test_no_step_copies_a_pool(make_llm, attention, which):
    """Looks at the compiled program: no copy of a pool's shape, and temporaries under 2% of a pool."""
    blueprint = make_llm("gemma3_text", page_size=8, prefill_chunk=16, attention=attention).blueprint
    programs = blueprint.programs(tuple(20_000 for _ in blueprint.layouts))
    bucket = (programs.buckets.decode if which == "decode" else programs.buckets.mixed)[-1]
    program = programs.forward(bucket)
    shapes = "|".join({",".join(map(str, pool.shape)) for pool in programs.state.pools})
    text = program.run.as_text()
    copies = [line for line in text.splitlines() if re.search(rf"= \S*\[({shapes})\]\S* copy\(", line)]
    assert not copies
    smallest = min(math.prod(pool.shape) * pool.dtype.itemsize for pool in programs.state.pools)
    assert program.temp_bytes < 0.02 * smallest


def test_second_start_takes_its_programs_from_the_cache_u59(make_llm, tmp_path):
    """A fresh cache is filled by the first engine; the second asks XLA for nothing new."""
    hits: list[str] = []

    def listen(event: str, **kwargs: object) -> None:
        hits.append(event)

    from tests.conftest import GOLDEN
    from trillion_infer import LLM
    from trillion_infer.engine.compile_cache import enable_compile_cache

    options = {"dtype": "float32", "max_running": 2, "kv_memory": 2**20, "compile_cache": str(tmp_path), "bundle": ""}
    previous = jax.config.jax_compilation_cache_dir
    try:
        LLM(GOLDEN / "tiny" / "smollm2", **options).wait_for_programs()
        jax.monitoring.register_event_listener(listen)
        LLM(GOLDEN / "tiny" / "smollm2", **options).wait_for_programs()
    finally:
        jax.monitoring.unregister_event_listener(listen)
        if previous:
            enable_compile_cache(previous)
    assert "/jax/compilation_cache/cache_hits" in hits
    assert "/jax/compilation_cache/cache_misses" not in hits


def test_without_precompile_only_what_runs_is_compiled_u59(make_llm):
    llm = make_llm("smollm2", page_size=8, precompile=False)
    assert llm.stats()["compilations"] == 1  # its KV pools are there
    llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=3))
    assert 1 < llm.stats()["compilations"] < len(llm.engine.programs.names())


def test_a_program_is_traced_once():
    """The shapes of its results are asked before it is lowered, of the same trace."""
    here, traces = NamedSharding(Mesh(jax.devices()[:1], ("data",)), PartitionSpec()), []

    def double(x: jax.Array) -> jax.Array:
        traces.append(x.shape)
        return 2 * x

    program = compile_program("double", double, (abstract(here, (3,)),), ())
    assert program.run(jnp.arange(3)).tolist() == [0, 2, 4]
    assert traces == [(3,)]


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_10000_steps_compile_nothing_and_leave_memory_flat(make_llm):
    """Prints what the process had resident after each thousand."""
    llm = make_llm.fresh("smollm2", page_size=8, prefill_chunk=16, max_running=4)
    compiled, ids, steps, resident = llm.stats()["compilations"], itertools.count(), 0, []
    while steps < 10_000:
        batch = zip(*mixed_requests(40, 128), strict=True)
        waiting = []
        for prompt, params in batch:
            prepared = llm.generator.prepare(f"request-{next(ids)}", prompt, params)
            llm.generator.submit(prepared)
            waiting.append(prepared[0].request_id)
        while any(not llm.generator.output(each).finished for each in waiting):
            llm.generator.step()
            steps += 1
            if steps % 1000 == 0:
                resident.append(resident_bytes())
        for each in waiting:
            llm.generator.take(each)
    print([f"{each / 2**20:.1f} MiB" for each in resident])
    assert llm.stats()["compilations"] == compiled
    assert resident[9] - resident[1] < 8 * 2**20
    check_idle(llm)
    llm.close()
