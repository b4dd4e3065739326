"""Engines on the Pallas kernels, interpreted on CPU: the same tokens as on the reference, float32."""

import pytest

from tests.conftest import GOLDEN, few_buckets
from tests.engine.helpers import greedy, tokens_of

OPTIONS = {"page_size": 8, "prefill_chunk": 16, "max_running": 4, "max_model_len": 96, "precompile": False}
PROMPTS = [[5], list(range(4, 30)), list(range(9, 49)), [7, 8, 9] * 7]
MODELS = {
    "smollm2": "chunked prefill and decode",
    "gemma3_text": "decode past windows",
    "deepseek_v3": "latent attention, experts",
    "gpt_oss": "sinks, windows, experts",
    "llama4_scout": "chunks",
}
SPECULATION = [
    ("smollm2", "ngram"),
    ("deepseek_v3", "ngram"),
    ("gemma3_text", "ngram"),  # rejected drafts move a window back
    ("smollm2", f"draft:{GOLDEN / 'tiny' / 'smollm2'}"),  # a model that drafts, with KV of its own
]


QUICK = {("smollm2", "tpu"), ("deepseek_v3", "gpu")}
"""What an ordinary run keeps, under a minute: both attention ops, and experts; `make test-slow` runs all."""
CASES = [
    pytest.param(name, attention, marks=() if (name, attention) in QUICK else pytest.mark.slow)
    for name in MODELS
    for attention in ("tpu", "gpu")
]


@pytest.fixture
def tokens(make_llm, monkeypatch):
    """tokens(name, **options) of an engine that is closed before the next is made; with those of drafts accepted."""
    monkeypatch.setattr("trillion_infer.engine.build.make_buckets", few_buckets)

    def of(name: str, **options) -> tuple[list[list[int]], int]:
        llm = make_llm.fresh(name, **OPTIONS, **options)
        if options.get("speculate"):
            llm.engine.speculation.draft_always()
        found = tokens_of(llm.generate(PROMPTS, greedy(12)))
        accepted = sum(int(value) for key, value in llm.stats().items() if key.endswith(".accepted"))
        llm.close()
        return found, accepted

    return of


@pytest.mark.parametrize(("name", "attention"), CASES)
def test_interpreted_kernels_give_the_tokens_of_the_reference(tokens, name, attention):
    expected = tokens(name, attention="reference")
    assert tokens(name, attention=attention, interpret=True) == expected


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["tpu", "gpu"])
@pytest.mark.parametrize(("name", "speculate"), SPECULATION, ids=lambda value: value.partition(":")[0])
def test_interpreted_kernels_verify_drafts(tokens, name, speculate, attention):
    expected, _ = tokens(name, attention="reference")
    found, accepted = tokens(name, attention=attention, interpret=True, speculate=speculate)
    assert found == expected
    assert accepted > 0
