"""debug_kernels: a bad page table is one typed error, whatever the backend, and never a crash."""

import jax
import numpy as np
import pytest

from tests.engine.helpers import greedy, tokens_of
from trillion_infer import ConfigError
from trillion_infer.core.errors import KernelInputError
from trillion_infer.engine.state import DeviceState


def spoil(engine, page):
    """Every entry of every page table becomes `page`."""
    state = engine._state
    tables = tuple(
        jax.device_put(np.full(table.shape, page, np.int32), table.sharding)  # as a broken allocator would
        for table in state.tables
    )
    engine._state = DeviceState(state.pools, tables, state.sampler)


@pytest.mark.parametrize("options", [{}, {"attention": "reference"}], ids=["auto", "reference"])
@pytest.mark.parametrize(("name", "op"), [("smollm2", "ragged_paged_attention"), ("deepseek_v3", "latent_paged")])
def test_a_bad_table_is_an_error_that_names_op_sequence_block_and_page(make_llm, name, op, options):
    llm = make_llm.fresh(name, **options, debug_kernels=True, precompile=False, page_size=8)
    llm.generator.add("a", [5, 6, 7], greedy(40))
    for _ in range(3):
        llm.generator.step()
    spoil(llm.engine, 99999)
    with pytest.raises(KernelInputError, match=rf"{op}.*: page 99999 of block 0 of sequence 0 is outside 0\.\."):
        llm.generator.step()


def test_checks_change_no_token(make_llm):
    prompts = [list(range(4, 40)), [5], list(range(9, 30))]
    plain = make_llm("gemma3_text", page_size=8, prefill_chunk=16)
    checked = make_llm.fresh("gemma3_text", page_size=8, prefill_chunk=16, debug_kernels=True, precompile=False)
    assert tokens_of(checked.generate(prompts, greedy())) == tokens_of(plain.generate(prompts, greedy()))


@pytest.mark.parametrize("attention", ["pallas", "tpu", "gpu"])
def test_pallas_kernels_that_cannot_run_here_are_refused_with_what_to_do(make_llm, attention):
    with pytest.raises(ConfigError, match=f"attention is '{attention}', but Pallas kernels .* do not run on cpu"):
        make_llm.fresh("smollm2", attention=attention)
