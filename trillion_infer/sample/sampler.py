"""The sampler: logits to token ids on the device, inside the jitted step.

One program serves every mixture of requests: rare work stands behind `lax.cond` on flags computed from the rows, so a
batch that is greedy throughout pays one pass for the maximum.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt

from trillion_infer.sample import filters, processors
from trillion_infer.sample.chosen import Sampled
from trillion_infer.sample.logprobs import no_scores, score
from trillion_infer.sample.noise import gumbel, row_keys
from trillion_infer.sample.rows import RowParams
from trillion_infer.sample.state import SamplerState, Tables, record, slot_tables

MASK_EMPTY, NOT_FINITE = 1, 2
"""Bits of Sampled.flags: mask and bias left no token, so they were ignored; the logits hold NaN or no finite value."""


def sample(
    logits: Float[Array, "R V"],
    state: SamplerState,
    rows: RowParams,
    mask: UInt[Array, "R W"],
    *,
    has_mask: Bool[Array, ""],
) -> tuple[Sampled, SamplerState]:
    """Choose a token for each row and enter it into the state of the active rows' slots.

    logits: float32, columns beyond the vocabulary -inf. mask: bit v % 32 of word v // 32 allows token v; read only
    when `has_mask`. Of the active rows no two may share a slot.
    """
    token, flags = pick(logits, lambda: slot_tables(state, rows), changes_logits(state, rows), rows, mask, has_mask)
    wants_scores = processors.any_of(rows.active, rows.logprobs >= 0)
    scores = lax.cond(wants_scores, lambda: score(logits, token), lambda: no_scores(logits.shape[0]))
    logprob, rank, top_ids, top_logprobs = scores
    sampled = Sampled(token, logprob, rank, top_ids, top_logprobs, jnp.where(rows.active, flags, 0))
    return sampled, record(state, rows.slot, token, rows.active)


def changes_logits(state: SamplerState, rows: RowParams) -> Bool[Array, ""] | bool:
    """Some active row has penalties or a bias; False itself where the state serves none."""
    if not state.has_tables:
        return False
    return processors.any_of(rows.active, rows.penalised | rows.has_bias)


def pick(
    logits: Float[Array, "R V"],
    tables: Callable[[], Tables],
    has_tables: Bool[Array, ""] | bool,
    rows: RowParams,
    mask: UInt[Array, "R W"],
    has_mask: Bool[Array, ""],
) -> tuple[Int[Array, "R"], Int[Array, "R"]]:
    """Token and flags of each row. `tables()`, each row's (counts, prompt mask, bias), is read if `has_tables`."""

    def in_full() -> tuple[Array, Array]:
        x, empty = process(logits, tables, has_tables, rows, mask, has_mask)
        token, flags = choose(x, rows)
        return token, flags | jnp.where(empty, MASK_EMPTY, 0)

    plain = ~(has_mask | has_tables | jnp.any(rows.active & ~rows.greedy))
    return lax.cond(plain, lambda: likeliest(logits)[1:], in_full)


def process(
    logits: Float[Array, "R V"],
    tables: Callable[[], Tables],
    has_tables: Bool[Array, ""] | bool,
    rows: RowParams,
    mask: UInt[Array, "R W"],
    has_mask: Bool[Array, ""],
) -> tuple[Float[Array, "R V"], Bool[Array, "R"]]:
    """Logits after mask, bias and penalties, and the rows where those left nothing, which keep their own logits."""

    def penalised(x: Float[Array, "R V"]) -> Float[Array, "R V"]:
        counts, prompt, bias = tables()
        return processors.apply_penalties(x + bias, counts, prompt, rows)

    def changed() -> tuple[Array, Array]:
        x = lax.cond(has_mask, lambda: processors.apply_mask(logits, mask), lambda: logits)
        if has_tables is not False:
            x = lax.cond(has_tables, lambda: penalised(x), lambda: x)
        return keep_nonempty(x, logits)

    return lax.cond(has_mask | has_tables, changed, lambda: (logits, jnp.zeros(logits.shape[0], bool)))


def keep_nonempty(
    processed: Float[Array, "R V"], logits: Float[Array, "R V"]
) -> tuple[Float[Array, "R V"], Bool[Array, "R"]]:
    """`processed`, but the untouched logits in rows where no token is left; and which rows those are."""
    empty = jnp.max(processed, axis=1) == -jnp.inf
    return jnp.where(empty[:, None], logits, processed), empty


def likeliest(x: Float[Array, "R V"]) -> tuple[Float[Array, "R"], Int[Array, "R"], Int[Array, "R"]]:
    """(largest logit, its token, NOT_FINITE flag) of each row."""
    top, token = filters.first_max(x)
    return top, token, jnp.where(jnp.isfinite(top), 0, NOT_FINITE)


def choose(x: Float[Array, "R V"], rows: RowParams) -> tuple[Int[Array, "R"], Int[Array, "R"]]:
    """Token and NOT_FINITE flag of each row, from logits that were processed: the likeliest, or a draw."""
    top, token, flags = likeliest(x)
    drawn = rows.active & ~rows.greedy & (flags == 0)
    return lax.cond(jnp.any(drawn), lambda: _draw(x, top, token, rows, drawn), lambda: token), flags


def _draw(
    x: Float[Array, "R V"], top: Float[Array, "R"], token: Int[Array, "R"], rows: RowParams, drawn: Bool[Array, "R"]
) -> Int[Array, "R"]:
    """`token`, and in the rows `drawn` one by the probabilities after temperature, min-p, top-k and top-p."""
    scaled = _scaled(x, top, rows)
    keys = row_keys(rows.seed, rows.index)
    limited = drawn & ((rows.top_k > 0) | (rows.top_p < 1.0))

    def from_candidates() -> tuple[Array, Array]:
        values, ids, decided = filters.candidates(scaled, rows.top_k, rows.top_p)
        noisy = values + gumbel(keys, ids)
        best = noisy == noisy.max(axis=1)[:, None]
        smallest = jnp.where(best, ids, x.shape[1]).min(axis=1)
        decided &= limited
        return jnp.where(decided, smallest, token), drawn & ~decided

    token, rest = lax.cond(jnp.any(limited), from_candidates, lambda: (token, drawn))

    def from_all() -> Int[Array, "R"]:
        top_k, top_p = jnp.where(rest, rows.top_k, 0), jnp.where(rest, rows.top_p, 1.0)
        noisy = lax.optimization_barrier(scaled + gumbel(keys, filters.ids_like(scaled)))
        best = filters.first_max(noisy)[1]

        def within_limits() -> Int[Array, "R"]:
            return filters.settle(scaled, noisy, best, top_k, top_p)

        return jnp.where(rest, lax.cond(jnp.any(rest & limited), within_limits, lambda: best), token)

    return lax.cond(jnp.any(rest), from_all, lambda: token)


def _scaled(x: Float[Array, "R V"], top: Float[Array, "R"], rows: RowParams) -> Float[Array, "R V"]:
    return processors.scale(x, jnp.where(jnp.isfinite(top), top, 0.0), rows)


def probabilities(x: Float[Array, "R V"], rows: RowParams) -> Float[Array, "R V"]:
    """The distribution that `choose` draws from, of processed logits; a greedy row is all on its likeliest token."""
    top, token = filters.first_max(x)
    drawn = rows.active & ~rows.greedy
    kept, top_k, top_p = _scaled(x, top, rows), jnp.where(drawn, rows.top_k, 0), jnp.where(drawn, rows.top_p, 1.0)
    kept = lax.cond(jnp.any(top_k > 0), lambda: filters.keep_top_k(kept, top_k), lambda: kept)
    kept = lax.cond(jnp.any(top_p < 1.0), lambda: filters.keep_top_p(kept, top_p), lambda: kept)
    weight = jnp.exp(kept)
    chosen = (filters.ids_like(x) == token[:, None]).astype(jnp.float32)
    return jnp.where(rows.greedy[:, None], chosen, weight / filters.row_sum(weight)[:, None])
