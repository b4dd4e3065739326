"""Small things the engine's tests share."""

import numpy as np
import pytest

from tests.conftest import GOLDEN
from trillion_infer import SamplingParams
from trillion_infer.core.outputs import RequestOutput

DRAFTING = "llama_deep"
HEAD = {
    "page_size": 8,
    "prefill_chunk": 16,
    "precompile": False,
    "max_running": 1,
    "speculate": f"eagle3:{GOLDEN / 'tiny' / 'eagle3_llama'}",
}
"""A tiny model and options that put a head beside it."""

Drafts = dict[tuple[int, ...], tuple[list[int], np.ndarray]]
"""By the text so far: what was drafted after it, and with which probabilities."""


def greedy(max_tokens: int = 16, **options) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=options.pop("ignore_eos", True), **options)


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


def check_idle(llm) -> None:
    """Nothing is left behind: free + cached == total pages, every slot free."""
    llm.engine.drain()
    llm.engine.check_integrity()
    stats = llm.stats()
    assert stats["running"] == stats["waiting"] == 0
    for name in {key.rpartition(".")[0] for key in stats if key.endswith(".pages_total")}:
        free, cached, total = (stats[f"{name}.pages_{part}"] for part in ("free", "cached", "total"))
        assert free + cached == total, f"{name}: {free} free + {cached} cached pages, {total} in all"


def note_drafts(engine, patch: pytest.MonkeyPatch) -> Drafts:
    """Has an engine's models draft at every step; what they offer from now on, the first time for a text."""
    found: Drafts = {}
    offer = engine.speculation.offer
    engine.speculation.draft_always()

    def note(drafted) -> None:
        for request, ids, chances in zip(drafted.requests, drafted.tokens, drafted.chances, strict=True):
            if request is not None:
                found.setdefault(tuple(request.known_ids()), (np.asarray(ids).tolist(), np.asarray(chances)))
        offer(drafted)

    patch.setattr(engine.speculation, "offer", note)
    return found


def equal_drafts(ours: Drafts, theirs: Drafts) -> None:
    """After every text that both drafted for, the drafts are the same."""
    both = ours.keys() & theirs.keys()
    assert len(both) > min(len(ours), len(theirs)) / 2 > 10
    assert {text: ours[text][0] for text in both} == {text: theirs[text][0] for text in both}
    for text in both:
        np.testing.assert_allclose(ours[text][1], theirs[text][1], rtol=1e-4)
