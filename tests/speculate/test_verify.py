"""Speculation gives what plain decoding gives: the tokens with certain drafts, the distribution with drawn ones.

The model is a table: the logits after token t are TABLE[t].
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from trillion_infer.sample import RowParams, SamplerState, init_slot, pack, sample, unpack
from trillion_infer.sample.bitmask import allow_all, forbid
from trillion_infer.sample.host import slot_chunks
from trillion_infer.speculate import DraftRequest
from trillion_infer.speculate.ngram import NgramDrafter
from trillion_infer.speculate.suffix import SuffixDrafter
from trillion_infer.speculate.verify import verify

VOCAB, ROWS, DRAFTS = 16, 3, 3
TABLE = np.random.default_rng(0).normal(size=(VOCAB, VOCAB)).astype(np.float32) * 2
P_VALUE = 1e-4

plain_step, verify_step, enter = jax.jit(sample), jax.jit(verify), jax.jit(init_slot)


def make_rows(num_rows, **fields):
    rows = RowParams.padding(num_rows)
    rows.slot[:] = np.arange(num_rows)
    rows.active[:] = True
    rows.seed[:] = np.stack([np.arange(num_rows), np.full(num_rows, 3)], axis=1)
    for name, value in fields.items():
        getattr(rows, name)[:] = value
    return rows


def on_device(rows):
    return unpack(jnp.asarray(pack(rows)))


def start(num_rows, prompt=(1, 2), bias=None):
    state = SamplerState.create(num_rows, VOCAB)
    for slot in range(num_rows):
        for header, chunk in slot_chunks(slot, prompt, (), bias or {}):
            state = enter(state, header, chunk)
    return state


def plain(first, rows, state, count, masks):
    """`count` tokens of each row, one step at a time: tokens [S, count], logprobs, state."""
    tokens, logprobs, last = [], [], np.full(len(rows.slot), first)
    for number in range(count):
        rows.index[:] = number
        out, state = plain_step(TABLE[last], state, on_device(rows), masks[:, number], has_mask=jnp.asarray(True))
        last = np.asarray(out.token)
        tokens.append(last)
        logprobs.append(np.asarray(out.logprob))
    return np.stack(tokens, 1), np.stack(logprobs, 1), state


def speculative(first, rows, state, count, masks, propose):
    """The same through the verifier; `propose(row, tokens so far)` names up to DRAFTS drafts."""
    num_rows = len(rows.slot)
    done, logprobs = [[] for _ in range(num_rows)], [[] for _ in range(num_rows)]
    while min(map(len, done)) < count:
        drafts, lengths = np.full((num_rows, DRAFTS), -7, np.int32), np.zeros(num_rows, np.int32)
        logits = np.full((num_rows, DRAFTS + 1, VOCAB), np.nan, np.float32)
        bits = np.zeros((num_rows, DRAFTS + 1, masks.shape[2]), np.uint32)
        for row in range(num_rows):
            rows.active[row] = len(done[row]) < count
            given = propose(row, done[row])[: max(0, min(DRAFTS, count - 1 - len(done[row])))]
            lengths[row], rows.index[row] = len(given), len(done[row])
            drafts[row, : len(given)] = given
            chain = [done[row][-1] if done[row] else first, *given]
            logits[row, : len(chain)] = TABLE[chain]
            if rows.active[row]:
                bits[row, : len(chain)] = masks[row, len(done[row]) : len(done[row]) + len(chain)]
        out, state = verify_step(
            jnp.asarray(logits), drafts, lengths, state, on_device(rows), bits, has_mask=jnp.asarray(True)
        )
        for row in range(num_rows):
            new = int(out.num_tokens[row])
            assert new == 0 or rows.active[row]
            done[row] += np.asarray(out.tokens)[row, :new].tolist()
            logprobs[row] += np.asarray(out.logprob)[row, :new].tolist()
            assert (np.asarray(out.tokens)[row, new:] == -1).all()
            assert not np.asarray(out.flags)[row].any()
    return np.array(done), np.array(logprobs), state


@settings(deadline=None, max_examples=20)
@given(data=st.data(), seed=st.integers(0, 2**31))
def test_certain_drafts_change_no_token_no_logprob_and_no_state(data, seed):
    one = st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, 0.7, 1.3]),
            "top_k": st.sampled_from([0, 1, 4]),
            "top_p": st.sampled_from([1.0, 0.7]),
            "min_p": st.sampled_from([0.0, 0.05]),
            "repetition": st.sampled_from([1.0, 1.3]),
            "presence": st.sampled_from([0.0, 0.5]),
            "frequency": st.sampled_from([0.0, 0.8]),
            "has_bias": st.booleans(),
        }
    )
    choices = [data.draw(one) for _ in range(ROWS)]
    rows = make_rows(ROWS, logprobs=0, **{name: [row[name] for row in choices] for name in choices[0]})
    count, rng = 9, np.random.default_rng(seed)
    masks = np.stack([allow_all(count, VOCAB) for _ in range(ROWS)])
    for row in range(ROWS):
        for position in range(count):
            forbid(masks[row, position], rng.choice(VOCAB, 3, replace=False).tolist())
    bias = {3: 2.0, 5: -np.inf}
    want, want_logprobs, want_state = plain(4, rows, start(ROWS, bias=bias), count, masks)

    def propose(row, done):
        """Right tokens for a while, then a guess."""
        right = want[row, len(done) :][: rng.integers(0, DRAFTS + 1)].tolist()
        return right + rng.integers(0, VOCAB, DRAFTS).tolist()[: rng.integers(0, DRAFTS + 1)]

    got, got_logprobs, got_state = speculative(4, rows, start(ROWS, bias=bias), count, masks, propose)
    assert np.array_equal(got, want), (got, want)
    np.testing.assert_allclose(got_logprobs, want_logprobs, atol=1e-5)
    assert np.array_equal(got_state.counts, want_state.counts)
    assert np.array_equal(got_state.last_token, want_state.last_token)


def test_right_drafts_are_all_taken_and_one_token_more():
    rows = make_rows(ROWS, temperature=[0.0, 1.0, 1.0])
    masks = np.stack([allow_all(4, VOCAB) for _ in range(ROWS)])
    want, _, _ = plain(4, rows, start(ROWS), 4, masks)
    rows.index[:] = 0
    logits = TABLE[np.concatenate([np.full((ROWS, 1), 4), want[:, :3]], axis=1)]
    out, _ = verify_step(
        jnp.asarray(logits), want[:, :3], np.full(ROWS, 3), start(ROWS), on_device(rows), masks,
        has_mask=jnp.asarray(False),
    )  # fmt: skip
    assert out.num_tokens.tolist() == [4] * ROWS
    assert np.array_equal(out.tokens, want)


def test_an_inactive_row_gives_nothing_and_changes_nothing():
    rows = make_rows(ROWS, active=[True, False, True])
    rows.slot[:] = [0, 2, 2]
    logits = np.broadcast_to(TABLE[4], (ROWS, DRAFTS + 1, VOCAB))
    masks = np.stack([allow_all(DRAFTS + 1, VOCAB) for _ in range(ROWS)])
    out, state = verify_step(
        jnp.asarray(logits), np.zeros((ROWS, DRAFTS), np.int32), np.zeros(ROWS, np.int32), start(ROWS),
        on_device(rows), masks, has_mask=jnp.asarray(False),
    )  # fmt: skip
    assert out.num_tokens.tolist() == [1, 0, 1]
    assert (np.asarray(out.tokens)[1] == -1).all()
    assert np.asarray(state.counts).sum(axis=1).tolist() == [1, 0, 1]


DRAWS = 20_000


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def draft_table(kind):
    """q(next | token) for each token: near the model, far from it, or sharing no token with what top-k keeps."""
    rng = np.random.default_rng(1)
    if kind == "good":
        return softmax(TABLE + rng.normal(size=TABLE.shape) * 0.3)
    if kind == "bad":
        return softmax(-TABLE)
    least = np.argsort(TABLE, axis=1)[:, :4]
    q = np.zeros_like(TABLE)
    np.put_along_axis(q, least, 0.25, axis=1)
    return q


@pytest.mark.parametrize("kind", ["good", "bad", "disjoint"])
@pytest.mark.parametrize("certain", [False, True])
def test_tokens_have_the_distribution_of_the_model(kind, certain):
    params = {"temperature": 1.0, "top_k": 8} if kind == "disjoint" else {"temperature": 1.0}
    kept = np.where(np.sort(TABLE, axis=1)[:, [-8]] <= TABLE, TABLE, -np.inf)
    p = softmax(kept if "top_k" in params else TABLE)
    q, rng, first = draft_table(kind), np.random.default_rng(2), 4
    drafts = np.zeros((DRAWS, 2), np.int32)
    last = np.full(DRAWS, first)
    for place in range(2):
        last = (rng.random((DRAWS, 1)) > np.cumsum(q[last], axis=1)).sum(axis=1).clip(max=VOCAB - 1)
        drafts[:, place] = last
    chain = np.concatenate([np.full((DRAWS, 1), first), drafts], axis=1)
    rows = make_rows(DRAWS, **params)
    state = SamplerState.create(DRAWS, VOCAB, penalties=False)
    out, _ = verify_step(
        jnp.asarray(TABLE[chain]), drafts, np.full(DRAWS, 2), state, on_device(rows),
        np.full((DRAWS, 3, 1), 0xFFFFFFFF, np.uint32), has_mask=jnp.asarray(False),
        draft_probs=None if certain else jnp.asarray(q[chain[:, :2]], jnp.float32),
    )  # fmt: skip
    tokens, count = np.asarray(out.tokens), np.asarray(out.num_tokens)
    _fits(tokens[:, 0], p[first])
    for place in (1, 2):
        for before in range(VOCAB):
            follow = tokens[(count > place) & (tokens[:, place - 1] == before), place]
            if len(follow) > 500:
                _fits(follow, p[before])
    if not certain:
        overlap = np.minimum(p[first], q[first]).sum()
        assert abs((count > 1).mean() - overlap) < 0.02, "accepts as often as any exact method can"


def _fits(tokens, p):
    p = p.astype(np.float64)
    seen = np.bincount(tokens, minlength=VOCAB)
    assert not seen[p == 0].any()
    common = p * len(tokens) >= 5
    seen_all = np.append(seen[common], seen[~common].sum())
    want_all = np.append(p[common], p[~common].sum()) * len(tokens)
    possible = want_all > 0
    want = want_all[possible] * (len(tokens) / want_all.sum())
    assert stats.chisquare(seen_all[possible], want).pvalue > P_VALUE


def test_greedy_rows_ignore_the_probabilities_of_the_drafts():
    best = TABLE.argmax(axis=1)
    right = [4, best[4], best[best[4]]]
    wrong = [4, best[4], (best[best[4]] + 1) % VOCAB]
    chain = np.array([right, wrong, right])
    rows = make_rows(3, temperature=[0.0, 0.0, 1.0])
    out, _ = verify_step(
        jnp.asarray(TABLE[chain]), chain[:, 1:], np.full(3, 2), start(3), on_device(rows),
        np.full((3, 3, 1), 0xFFFFFFFF, np.uint32), has_mask=jnp.asarray(False),
        draft_probs=jnp.full((3, 2, VOCAB), 1 / VOCAB),
    )  # fmt: skip
    assert out.tokens[0].tolist() == [*right[1:], best[right[2]]]
    assert out.tokens[1].tolist() == [*right[1:], -1]


@pytest.mark.parametrize("drafter", [NgramDrafter(), SuffixDrafter()], ids=lambda drafter: drafter.name)
def test_drafters_change_no_token_and_save_steps(drafter):
    rows = make_rows(ROWS, temperature=[0.0, 0.3, 1.0])
    masks = np.stack([allow_all(40, VOCAB) for _ in range(ROWS)])
    want, _, _ = plain(4, rows, start(ROWS), 40, masks)
    asked = [0] * ROWS

    def propose(row, done):
        asked[row] += len(done) < 40
        return drafter.propose([DraftRequest(row, [4, *done])], DRAFTS)[0].tokens

    got, _, _ = speculative(4, rows, start(ROWS), 40, masks, propose)
    assert np.array_equal(got, want)
    assert asked[0] < 25, "the greedy row runs in a circle, which both drafters see"
