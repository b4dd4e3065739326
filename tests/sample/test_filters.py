"""The cuts equal the numpy oracle's, ties included, however they are found."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trillion_infer.sample import filters

from . import oracle

coarse = st.lists(st.integers(-6, 6), min_size=16, max_size=16)  # few values: many ties
probability = st.floats(0.01, 1.0)

keep_top_k, keep_top_p = jax.jit(filters.keep_top_k), jax.jit(filters.keep_top_p)
candidates, settle = jax.jit(filters.candidates), jax.jit(filters.settle)


def _scaled(values):
    x = jnp.asarray(values, jnp.float32)[None, :] / 2
    return x - x.max()


@settings(deadline=None, max_examples=60)
@given(values=coarse, top_k=st.integers(0, 20), top_p=probability)
def test_bisection_keeps_the_tokens_of_the_sorted_oracle(values, top_k, top_p):
    scaled = _scaled(values)
    kept = keep_top_p(keep_top_k(scaled, jnp.array([top_k])), jnp.array([top_p]))
    want = oracle.distribution(np.asarray(scaled)[0], top_k=max(top_k, 2) if top_k else 0, top_p=top_p)
    if top_k != 1:
        _same_support(np.asarray(kept)[0] > -np.inf, want, scaled, top_p)


@settings(deadline=None, max_examples=60)
@given(values=coarse, top_k=st.integers(0, 20), top_p=probability)
def test_candidates_keep_the_tokens_of_the_sorted_oracle(values, top_k, top_p):
    scaled = _scaled(values)
    kept, ids, settled = candidates(scaled, jnp.array([top_k]), jnp.array([top_p]))
    assert bool(settled[0])
    support = np.zeros(16, bool)
    support[np.asarray(ids)[0][np.asarray(kept)[0] > -np.inf]] = True
    if top_k != 1:
        want = oracle.distribution(np.asarray(scaled)[0], top_k=top_k, top_p=top_p)
        _same_support(support, want, scaled, top_p)


def _same_support(support, want, scaled, top_p):
    if np.array_equal(support, want > 0):
        return
    # A sum that falls on top_p to the last bits may round either way.
    lower = np.sort(np.cumsum(np.sort(oracle.softmax(np.asarray(scaled, np.float64)[0]))[::-1]))
    pytest.fail(f"kept {np.flatnonzero(support)}, want {np.flatnonzero(want)}; top_p {top_p}, sums {lower}")


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.5), (0, 0.999), (200, 1.0), (200, 0.9), (1000, 0.3), (5000, 1.0)])
def test_cuts_beyond_the_candidates_are_exact(top_k, top_p):
    logits = np.random.default_rng(1).normal(size=(4, 1000)).astype(np.float32)
    scaled = jnp.asarray(logits - logits.max(axis=1, keepdims=True))
    kept = keep_top_p(keep_top_k(scaled, jnp.full(4, top_k)), jnp.full(4, top_p, jnp.float32))
    for row, got in zip(np.asarray(scaled), np.asarray(kept) > -np.inf, strict=True):
        want = oracle.distribution(row, top_k=top_k, top_p=top_p) > 0
        assert np.array_equal(got, want), (got.sum(), want.sum())


def test_a_row_whose_cut_is_beyond_the_candidates_is_not_settled():
    flat = jnp.zeros((1, 1000))
    assert not bool(candidates(flat, jnp.array([0]), jnp.array([0.9]))[2][0])
    assert not bool(candidates(flat, jnp.array([129]), jnp.array([1.0]))[2][0])
    assert bool(candidates(flat, jnp.array([128]), jnp.array([0.9]))[2][0])
    assert bool(candidates(flat, jnp.array([0]), jnp.array([0.1]))[2][0])


def test_equal_logits_fall_by_id():
    kept = keep_top_k(jnp.zeros((1, 300)), jnp.array([130]))
    assert np.array_equal(np.flatnonzero(np.asarray(kept)[0] == 0), np.arange(130))
    kept = keep_top_p(jnp.zeros((1, 300)), jnp.array([0.5]))
    assert np.array_equal(np.flatnonzero(np.asarray(kept)[0] == 0), np.arange(150))


def test_excluded_tokens_stay_excluded():
    scaled = jnp.where(jnp.arange(256)[None, :] % 2 == 0, 0.0, -jnp.inf)
    for kept in (keep_top_k(scaled, jnp.array([200])), keep_top_p(scaled, jnp.array([0.99]))):
        assert np.all(np.asarray(kept)[0, 1::2] == -np.inf)


def test_first_max_takes_the_smallest_id():
    top, token = filters.first_max(jnp.array([[1.0, 3.0, 3.0], [0.0, -1.0, 0.0]]))
    assert token.tolist() == [1, 0]
    assert top.tolist() == [3.0, 0.0]


@settings(deadline=None, max_examples=60)
@given(values=coarse, noise=coarse, top_k=st.integers(0, 20), top_p=st.sampled_from([1.0, 0.93, 0.71, 0.37]))
def test_settling_takes_the_best_of_the_kept_tokens(values, noise, top_k, top_p):
    scaled = _scaled(values)
    kept = np.asarray(keep_top_p(keep_top_k(scaled, jnp.array([top_k])), jnp.array([top_p])))[0] > -np.inf
    noisy = jnp.asarray(noise, jnp.float32)[None]
    token = settle(scaled, noisy, noisy.argmax(axis=1), jnp.array([top_k]), jnp.array([top_p]))
    assert int(token[0]) == int(np.argmax(np.where(kept, noise, -np.inf)))
