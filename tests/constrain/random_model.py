"""A model that knows nothing: it draws any allowed token, and heads for the end once it has written enough."""

import random

import numpy as np

from trillion_infer.constrain import GrammarState


def allowed(state: GrammarState, vocab_size: int) -> np.ndarray:
    """Ids that the mask allows, in order."""
    words = np.full(-(-vocab_size // 32) + 2, 0xFFFFFFFF, np.uint32)
    state.mask(words)
    ids = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
    assert len(ids), "an all-false mask"
    assert ids[-1] < vocab_size
    return ids


def write(state: GrammarState, tokenizer, seed: int, wander: int = 25, limit: int = 600) -> str | None:
    """Text drawn under the mask up to end-of-sequence; None if that did not come within `limit` tokens."""
    rng, ids = random.Random(seed), []
    closing = [i for text in ("<|end|>", '"', "]", "}", "0") for i in tokenizer.encode(text, add_special_tokens=False)]
    while len(ids) < limit:
        choices = allowed(state, tokenizer.vocab_size)
        only_end = set(choices.tolist()) <= tokenizer.eos_ids
        assert state.is_complete or not only_end, "the end was not foreseen"
        assert state.may_end == bool(set(choices.tolist()) & tokenizer.eos_ids)
        ends = [i for i in choices.tolist() if i in tokenizer.eos_ids]
        if ends and (len(ids) >= wander or rng.random() < 0.2):
            assert state.accept(ends[:1]) == 1
            return tokenizer.decode(ids, skip_special_tokens=False)
        near = [i for i in closing if i in choices] if len(ids) >= wander or rng.random() < 0.3 else []
        chosen = near[0] if near and len(ids) >= wander else rng.choice(near or choices.tolist())
        if chosen in tokenizer.eos_ids:
            continue
        assert state.accept([chosen]) == 1
        ids.append(chosen)
    return None
