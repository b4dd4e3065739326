"""The step draws from the distribution that the parameters name, and reproducibly."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from trillion_infer.sample import MASK_EMPTY, NOT_FINITE, SamplerState
from trillion_infer.sample.bitmask import allow_all, pack_mask

from . import oracle
from .helpers import chi_square, draws, enter_history, fresh, on_device, rows_of, run, step

LOGITS = np.random.default_rng(3).normal(size=16).astype(np.float32)
DRAWS = 20_000
P_VALUE = 1e-4


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 1.7},
        {"temperature": 1.0, "top_k": 4},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 0.8, "top_k": 8, "top_p": 0.9, "min_p": 0.02},
    ],
    ids=str,
)
def test_histogram_is_the_distribution(params):
    want = oracle.distribution(LOGITS, **params)
    p_value = chi_square(draws(LOGITS, DRAWS, **params), want)
    assert p_value > P_VALUE, p_value


def test_histogram_over_token_indices_is_the_distribution():
    tokens = draws(LOGITS, DRAWS, temperature=1.0, seed=(1, 2), index=np.arange(DRAWS))
    assert chi_square(tokens, oracle.distribution(LOGITS)) > P_VALUE


def test_histogram_beyond_the_candidates_is_the_distribution():
    logits = np.random.default_rng(5).normal(size=400).astype(np.float32) / 2
    for params in ({"top_p": 0.9}, {"top_k": 200}, {"top_k": 300, "top_p": 0.7}):
        params = {"temperature": 1.0, **params}
        p_value = chi_square(draws(logits, DRAWS // 5, **params), oracle.distribution(logits, **params))
        assert p_value > P_VALUE, (params, p_value)


def test_neighbouring_indices_are_independent():
    tokens = draws(LOGITS, DRAWS, temperature=1.0, seed=(1, 2), index=np.arange(DRAWS))
    p = oracle.distribution(LOGITS)
    pairs = tokens[0::2] * 16 + tokens[1::2]
    coarse = np.minimum(np.argsort(np.argsort(-p)), 4)  # the likeliest four and the rest
    q = np.bincount(coarse, weights=p)
    assert chi_square(coarse[pairs // 16] * 5 + coarse[pairs % 16], np.outer(q, q).ravel()) > P_VALUE


@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-5, 1e-6, 1e-9, 0.0])
def test_tiny_temperatures_are_greedy(temperature):  # U01
    assert np.all(draws(LOGITS, DRAWS, temperature=temperature) == LOGITS.argmax())


def test_top_k_one_is_greedy_even_with_ties():  # U02
    assert np.all(draws(np.zeros(16), DRAWS, temperature=1.0, top_k=1) == 0)


def test_top_k_off_still_varies():  # U02
    assert len(set(draws(LOGITS, DRAWS, temperature=1.0, top_k=0)[:20].tolist())) > 1


@settings(deadline=None, max_examples=15)
@given(st.data())
def test_a_seeded_row_draws_the_same_in_any_batch(data):  # U05
    kinds = st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, 0.8, 1.5]),
            "top_k": st.sampled_from([0, 1, 5, 150]),
            "top_p": st.sampled_from([1.0, 0.5, 0.99]),
            "seed": st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)),
            "index": st.integers(0, 1000),
        }
    )
    mine = data.draw(kinds)
    place = data.draw(st.integers(0, 7))
    logits = np.random.default_rng(9).normal(size=(8, 400)).astype(np.float32)
    rows = rows_of(8)
    for row in range(8):
        for name, value in (mine if row == place else data.draw(kinds)).items():
            getattr(rows, name)[row] = value
    rows.slot[:] = data.draw(st.permutations(range(8)))
    alone = rows_of(8, **mine)
    together = run(logits, rows)[0].token[place]
    assert together == run(np.broadcast_to(logits[place], (8, 400)), alone)[0].token[0]


def test_padding_rows_change_no_state_and_may_hold_nan():
    state = enter_history(fresh(), 2, prompt=[1], output=[5, 5])
    rows = rows_of(4, active=[True, False, False, True])
    rows.slot[:] = [0, 2, 2, 1]
    out, after = run(np.where(rows.active[:, None], np.zeros((4, 16)), np.nan), rows, state)
    assert not out.flags.any()
    assert after.last_token.tolist() == [0, 0, 5, 0, 0, 0, 0, 0]
    assert np.asarray(after.counts)[2, 5] == 2
    assert np.asarray(after.counts).sum() == 4


histories = st.lists(st.integers(0, 15), max_size=12)


@settings(deadline=None, max_examples=40)
@given(
    prompt=histories,
    output=histories,
    rep=st.floats(0.5, 2.0),
    pres=st.floats(-2, 2),
    freq=st.floats(-2, 2),
    bias=st.dictionaries(st.integers(0, 15), st.floats(-5, 5)),
    allowed=st.lists(st.booleans(), min_size=16, max_size=16),
)
def test_greedy_token_is_the_likeliest_after_every_processor(prompt, output, rep, pres, freq, bias, allowed):
    state = enter_history(fresh(), 0, prompt=prompt, output=output, bias=bias)
    rows = rows_of(1, repetition=rep, presence=pres, frequency=freq, has_bias=bool(bias))
    out, _ = run(LOGITS[None], rows, state, mask=pack_mask(np.asarray(allowed)[None]))
    dense = np.zeros(16)
    for token, value in bias.items():
        dense[token] = value
    want = oracle.processed(
        LOGITS, allowed=allowed, bias=dense, prompt=prompt, output=output, rep=rep, pres=pres, freq=freq
    )
    assert want[out.token[0]] >= want.max() - 1e-4, (out.token[0], want)
    assert bool(out.flags[0] & MASK_EMPTY) == (not any(allowed))


def test_each_penalty_counts_what_it_should():  # U22
    logits = np.array([[2.0, 1.9, 0.0, -4.0]], np.float32)
    state = enter_history(fresh(), 0, prompt=[0])
    assert run(logits, rows_of(1, repetition=1.5), state)[0].token[0] == 1, "repetition counts the prompt at once"
    assert run(logits, rows_of(1, presence=2.0), state)[0].token[0] == 0, "presence does not"
    assert run(logits, rows_of(1, frequency=2.0), state)[0].token[0] == 0, "frequency does not"
    assert run(logits, rows_of(1), state)[0].token[0] == 0


def test_penalties_grow_with_the_tokens_of_the_steps():  # U22
    state = fresh()
    tokens = []
    for index in range(6):
        out, state = run(np.array([[1.0, 0.9, 0.8, 0.7]]), rows_of(1, index=index, frequency=0.25), state)
        tokens.append(int(out.token[0]))
    assert tokens == [0, 1, 2, 0, 3, 1]


def test_a_preempted_request_continues_with_the_same_tokens():  # U22, U50
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(20, 1, 16)).astype(np.float32)
    prompt, params = [3, 4, 3], {"temperature": 0.9, "repetition": 1.3, "presence": 0.5, "frequency": 0.5}

    def go(state, first, last, slot):
        tokens = []
        for index in range(first, last):
            rows = rows_of(1, index=index, has_bias=True, **params)
            rows.slot[:] = slot
            out, state = run(logits[index], rows, state)
            tokens.append(int(out.token[0]))
        return tokens

    entered = enter_history(fresh(), 0, prompt, bias={9: 3.0})
    whole = go(entered, 0, 20, 0)
    dirty = enter_history(fresh(), 2, [1] * 700, [2] * 700, {5: 90.0})
    again = enter_history(dirty, 2, prompt, whole[:8], {9: 3.0})
    assert int(again.last_token[2]) == whole[7]
    assert go(again, 8, 20, 2) == whole[8:]


def test_a_slot_left_by_a_penalised_request_is_clean_for_one_that_asks_nothing():
    state = enter_history(fresh(), 0, output=[3] * 50, bias={4: 100.0})
    plain = run(LOGITS[None], rows_of(1, temperature=1.0))[0].token
    assert np.array_equal(run(LOGITS[None], rows_of(1, temperature=1.0), state)[0].token, plain)


def test_minus_infinite_bias_forbids():
    likeliest = int(LOGITS.argmax())
    state = enter_history(fresh(), 0, bias={likeliest: -np.inf})
    assert run(LOGITS[None], rows_of(1, has_bias=True), state)[0].token[0] != likeliest


def test_an_empty_mask_is_flagged_and_spoils_only_its_row():
    mask = np.array([[0], [0b1000]], np.uint32)
    out, _ = run(np.stack([LOGITS, LOGITS]), rows_of(2, temperature=[1.0, 1.0]), mask=mask)
    assert out.flags.tolist() == [MASK_EMPTY, 0]
    assert out.token[1] == 3


def test_logits_that_are_not_finite_are_flagged_and_spoil_only_their_row():
    logits = np.stack([LOGITS, np.where(np.arange(16) == 3, np.nan, LOGITS), np.full(16, -np.inf), LOGITS])
    for temperature in (0.0, 1.0):
        out, _ = run(logits, rows_of(4, temperature=temperature, logprobs=5))
        assert out.flags.tolist() == [0, NOT_FINITE, NOT_FINITE, 0]
        assert np.all((out.token >= 0) & (out.token < 16))
        assert np.all(np.isfinite(out.logprob))
        assert np.all(np.isfinite(out.top_logprobs))


def test_padding_columns_are_never_drawn():
    logits = np.where(np.arange(16) < 10, 0, -np.inf)
    assert draws(logits, DRAWS, temperature=2.0).max() < 10


def test_no_tables_still_samples():
    state = SamplerState.create(8, 16, penalties=False)
    _, state = run(np.stack([LOGITS, LOGITS]), rows_of(2), state)
    assert state.last_token[:2].tolist() == [LOGITS.argmax()] * 2


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9, "top_k": 300}], ids=str
)
def test_a_vocabulary_over_eight_devices_gives_the_same(params):
    mesh = Mesh(np.array(jax.devices()[:8]), ("tensor",))
    logits = np.random.default_rng(0).normal(size=(8, 1024)).astype(np.float32)
    rows = rows_of(8, logprobs=3, repetition=1.2, **params)
    state = enter_history(fresh(1024), 1, [5, 6], [7])
    want, want_state = run(logits, rows, state, mask=allow_all(8, 1024))
    spread = jax.tree.map(
        lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), state, SamplerState.specs("tensor")
    )
    placed = jax.device_put(jnp.asarray(logits), NamedSharding(mesh, P(None, "tensor")))
    got, got_state = step(placed, spread, on_device(rows), allow_all(8, 1024), has_mask=jnp.asarray(True))
    assert np.array_equal(got.token, want.token)
    assert np.array_equal(got.top_ids, want.top_ids)
    np.testing.assert_allclose(got.logprob, want.logprob, atol=1e-5)
    assert np.array_equal(got_state.counts, want_state.counts)
