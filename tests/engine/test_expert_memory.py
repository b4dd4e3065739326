"""Experts in host memory: the tokens of an engine that holds them all, whatever the cache."""

import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.helpers import check_idle, greedy, tokens_of
from tests.engine.test_equalities import MIXED, prompts_of
from trillion_infer import LLM, ConfigError
from trillion_infer.layers.expert_cache import ExpertCache, bring_in, make_room, multiply_while_copying

pytestmark = pytest.mark.matrix

LAYERS, EXPERTS = 3, 4
SMALL = {"page_size": 8, "prefill_chunk": 16, "precompile": False}


NAMES = np.arange(LAYERS * EXPERTS, dtype=np.float32).reshape(LAYERS, EXPERTS)


@partial(jax.jit, static_argnames="at_once")
def bring(cache: ExpertCache, layer, needed, at_once: int) -> tuple[ExpertCache, jax.Array]:
    """Weights here are the names of their experts, so that a slot shows whose it holds. With 0 at once all are copied
    first; the array counts by name how often an expert was multiplied from its slot."""

    def read(expert):
        return (jnp.asarray(NAMES)[layer, expert][None, None],) * 2

    def product(cache, ready):
        slot = jnp.where(ready & needed, cache.slot_of[layer] - 1, len(cache.owner))
        names = jnp.append(cache.gate_up[:, 0], -1.0)[slot]
        return (names[:, None] == jnp.arange(NAMES.size)).astype(jnp.float32)

    cache, missing = make_room(cache, layer, needed)
    if at_once:
        nothing = jnp.zeros((EXPERTS, NAMES.size))
        total, cache = multiply_while_copying(cache, read, missing, product, at_once, nothing)
        return cache, total.sum(0)
    cache = bring_in(cache, read, missing)
    return cache, product(cache, jnp.ones(EXPERTS, bool)).sum(0)


@settings(max_examples=20)
@given(
    slots=st.sampled_from([EXPERTS, EXPERTS + 3, LAYERS * EXPERTS + 2]),
    at_once=st.sampled_from([0, 1, 3, 8]),
    steps=st.lists(
        st.tuples(st.integers(0, LAYERS - 1), st.sets(st.integers(0, EXPERTS - 1), max_size=EXPERTS)), max_size=12
    ),
)
def test_what_is_needed_is_in_the_slot_that_the_table_names(slots, at_once, steps):
    zeros, table = np.zeros((slots, 1), np.float32), np.zeros((LAYERS, EXPERTS), np.int32)
    cache = ExpertCache(zeros, zeros, table, np.zeros(slots, np.int32), table, np.zeros((1, 3), np.int32))
    found = copied = 0
    for layer, wanted in steps:
        held = set(np.flatnonzero(cache.slot_of[layer]).tolist())
        needed = np.isin(np.arange(EXPERTS), list(wanted))
        cache, multiplied = jax.tree.map(np.asarray, bring(cache, np.int32(layer), needed, at_once))
        found, copied = found + len(wanted & held), copied + len(wanted - held)
        assert np.flatnonzero(multiplied).tolist() == sorted(NAMES[layer, list(wanted)])
        assert multiplied.max(initial=0) <= 1
        for expert in wanted:
            slot = cache.slot_of[layer, expert] - 1
            assert slot >= 0
            assert cache.gate_up[slot, 0] == cache.down[slot, 0] == NAMES[layer, expert]
    for slot in np.flatnonzero(cache.owner):
        assert cache.slot_of.reshape(-1)[cache.owner[slot] - 1] == slot + 1
    assert np.count_nonzero(cache.slot_of) == np.count_nonzero(cache.owner)
    assert cache.counts[0].tolist() == [found, copied, len(steps)]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3_moe", {}),
        ("deepseek_v3", {}),
        ("llama4_scout", {}),
        ("gpt_oss", {}),
        ("gpt_oss_mxfp4", {}),
        ("qwen3_moe", {"quantize": "int8"}),
        ("qwen3_moe", {"mesh": "tensor=2"}),
        ("deepseek_v3", {"mesh": "expert=2,tensor=2"}),
        ("deepseek_v3", {"expert_memory": "disk"}),
        ("qwen3_moe", {"expert_memory": "disk", "mesh": "tensor=2"}),
        ("gpt_oss", {"attention": "gpu", "interpret": True}),
        ("qwen3_moe", {"attention": "gpu", "interpret": True, "mesh": "tensor=2"}),
    ],
)
def test_tokens_are_those_of_resident_experts(make_llm, name, options):
    resident = make_llm(name, **SMALL, **{**options, "expert_memory": None})
    streamed = make_llm(name, **SMALL, **{"expert_memory": "host", **options})
    assert tokens_of(streamed.generate(MIXED, greedy())) == tokens_of(resident.generate(MIXED, greedy()))
    stats, memory = streamed.stats(), streamed.memory()
    assert stats["expert_misses"] > 0
    assert 0 < stats["expert_hit_rate"] < 1
    away = memory["experts_on_disk" if options.get("expert_memory") == "disk" else "experts_on_host"]
    assert away > memory["expert_cache"] // 2 > 0
    assert memory["weights"] + away == resident.memory()["weights"]
    check_idle(streamed)


def test_a_cache_for_all_experts_reads_each_once(make_llm):
    llm = make_llm.fresh("qwen3_moe", **SMALL, expert_memory="host:1e7")
    for _ in range(2):
        llm.generate(MIXED, greedy())
        misses = llm.stats()["expert_misses"]
    spec = llm.model_config.layers[0].ffn
    assert misses <= spec.experts * len(llm.model_config.layers)
    assert llm.stats()["expert_hit_rate"] > 0.9
    llm.close()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("smollm2", {"expert_memory": "host"}, "the model has no experts"),
        ("qwen3_moe", {"expert_memory": "host:100"}, "the 8 experts of one layer have to fit. Use host:"),
        ("qwen3_moe", {"expert_memory": "host", "mesh": "data=2"}, "the mesh has data=2"),
        ("qwen3_moe", {"expert_memory": "tape"}, "expert_memory is 'tape'; it must be device, host, disk, or one"),
    ],
)
def test_what_cannot_be_is_refused_before_loading(make_llm, name, options, message):
    with pytest.raises(ConfigError, match=message):
        make_llm.fresh(name, **options)


@pytest.mark.slow
def test_two_gigabytes_of_experts_in_600_megabytes():
    """The same tokens; prints both speeds."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": 256,
        "hidden_size": 512,
        "num_hidden_layers": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "dtype": "bfloat16",
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_experts": 80,
        "num_experts_per_tok": 4,
        "intermediate_size": 512,
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
    }
    options = {"max_running": 2, "kv_memory": 2**24, "prefill_chunk": 64, "precompile": False, "prefix_caching": False}
    prompts, found = prompts_of(1, [40, 60], vocab=256), []
    for expert_memory in (None, "host:450e6", "disk:450e6"):
        llm = LLM(config, **options, expert_memory=expert_memory)
        llm.generate(prompts, greedy(4))
        start = time.perf_counter()
        found.append(tokens_of(llm.generate(prompts, greedy(32))))
        print(expert_memory, f"{64 / (time.perf_counter() - start):.1f} tokens/s", llm.stats().get("expert_hit_rate"))
        memory = llm.memory()
        if expert_memory:
            assert memory.pop(f"experts_on_{expert_memory[:4]}") > 2e9
            memory.pop("unaccounted")  # on CPU the interpreter and what other tests left
            assert sum(memory.values()) < 600e6
        llm.close()
    assert found[0] == found[1] == found[2]
