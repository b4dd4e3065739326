"""Engines on the Pallas kernels, interpreted on CPU: the same tokens as on the reference, float32."""

import pytest

from tests.engine.helpers import greedy, tokens_of

pytestmark = pytest.mark.slow
OPTIONS = {"page_size": 8, "prefill_chunk": 16, "max_running": 4, "max_model_len": 96, "precompile": False}
PROMPTS = [[5], list(range(4, 30)), list(range(9, 49)), [7, 8, 9] * 7]
MODELS = {
    "smollm2": "chunked prefill and decode",
    "gemma3_text": "decode past windows",
    "deepseek_v3": "latent attention, experts",
    "gpt_oss": "sinks, windows, experts",
    "llama4_scout": "chunks",
}


@pytest.mark.parametrize("attention", ["tpu", "gpu"])
@pytest.mark.parametrize("name", MODELS)
def test_interpreted_kernels_give_the_tokens_of_the_reference(make_llm, name, attention):
    plain = make_llm.fresh(name, attention="reference", **OPTIONS)
    expected = tokens_of(plain.generate(PROMPTS, greedy(12)))
    plain.close()
    kernels = make_llm.fresh(name, attention=attention, interpret=True, **OPTIONS)
    assert tokens_of(kernels.generate(PROMPTS, greedy(12))) == expected
    kernels.close()
