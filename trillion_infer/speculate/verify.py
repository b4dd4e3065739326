"""The one verifier: which drafted tokens stand, and the token after them.

Position j of a row holds the logits after the drafts before j. Masks, biases and penalties apply at each position, with
the drafts before it counted as output, before any comparison.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt

from trillion_infer.sample import filters, sampler
from trillion_infer.sample.chosen import Verified
from trillion_infer.sample.logprobs import no_scores, score
from trillion_infer.sample.noise import ACCEPT, RESIDUAL, gumbel, row_keys, uniforms
from trillion_infer.sample.rows import RowParams
from trillion_infer.sample.state import SamplerState, Tables, record_many, slot_tables


def verify(
    logits: Float[Array, "S n V"],
    draft_ids: Int[Array, "S n-1"],
    draft_len: Int[Array, "S"],
    state: SamplerState,
    rows: RowParams,
    mask: UInt[Array, "S n W"],
    *,
    has_mask: Bool[Array, ""],
    draft_probs: Float[Array, "S n-1 V"] | None = None,
) -> tuple[Verified, SamplerState]:
    """Accept a prefix of each row's first `draft_len` drafts, add one token, and enter them into the state.

    Without `draft_probs` the drafts are taken as certain. Each position then draws as `sample` would, with the same
    random numbers, and a draft stands if it is the token drawn: accepted with probability p, replaced from p without
    it, and a request gets the very tokens that it would get without speculation, seeded sampling included.

    With `draft_probs` (the distribution each draft was drawn from, with noise of stream DRAFT or other) a draft stands
    with probability min(1, p/q), and else is replaced from max(0, p - q) (arXiv 2211.17192, algorithm 1). That accepts
    more when q is close to p, and the tokens then depend on the drafts too.

    `rows.index` is that of the first position. Greedy rows keep exactly the drafts that are the likeliest tokens.
    """
    num_rows, width, vocab = logits.shape
    flat = logits.reshape(num_rows * width, vocab)
    each = _positions(rows, draft_len, width)
    mask = mask.reshape(num_rows * width, -1)
    drafted = jnp.arange(width - 1)[None, :] < draft_len[:, None]

    def tables() -> Tables:
        return _advance(slot_tables(state, each), draft_ids, drafted)

    changes = sampler.changes_logits(state, each)
    if draft_probs is None:
        choice, flags = sampler.pick(flat, tables, changes, each, mask, has_mask)
        choice = choice.reshape(num_rows, width)
        stands = choice[:, :-1] == draft_ids
    else:
        x, empty = sampler.process(flat, tables, changes, each, mask, has_mask)
        token, flags = sampler.choose(x, each)
        flags |= jnp.where(empty, sampler.MASK_EMPTY, 0)
        stands, choice = _accept(x, token, each, draft_ids, drafted, draft_probs)

    accepted = jnp.cumprod((stands & drafted).astype(jnp.int32), axis=1).sum(axis=1)
    place = jnp.arange(width)[None, :]
    chain = jnp.where(place < accepted[:, None], jnp.pad(draft_ids, ((0, 0), (0, 1))), choice)
    count = jnp.where(rows.active, accepted + 1, 0)
    produced = place < count[:, None]

    wants_scores = jnp.any(rows.active & (rows.logprobs >= 0))
    scores = lax.cond(wants_scores, lambda: score(flat, chain.reshape(-1)), lambda: no_scores(num_rows * width))
    logprob, rank, top_ids, top_logprobs = (field.reshape(num_rows, width, *field.shape[1:]) for field in scores)
    flags = jnp.where(produced, flags.reshape(num_rows, width), 0)
    tokens = jnp.where(produced, chain, -1)
    verified = Verified(tokens, count, logprob, rank, top_ids, top_logprobs, flags)
    return verified, record_many(state, rows.slot, chain, count)


def _positions(rows: RowParams, draft_len: Int[Array, "S"], width: int) -> RowParams:
    """One row per position, active as far as the drafts reach."""
    each = jax.tree.map(lambda field: jnp.repeat(field, width, axis=0), rows)
    place = jnp.tile(jnp.arange(width), rows.slot.shape[0])
    active = each.active & (place <= jnp.repeat(draft_len, width))
    return dataclasses.replace(each, index=each.index + place, active=active)


def _advance(tables: Tables, draft_ids: Int[Array, "S n-1"], drafted: Bool[Array, "S n-1"]) -> Tables:
    """Tables of every position, with the drafts before it counted as output."""
    counts, prompt, bias = tables
    num_rows, length = draft_ids.shape
    before = jnp.arange(length)[None, :] < jnp.arange(length + 1)[:, None]
    ids = jnp.where(before[None] & drafted[:, None, :], draft_ids[:, None, :], counts.shape[1])
    ids = ids.reshape(num_rows * (length + 1), length)
    return counts.at[jnp.arange(ids.shape[0])[:, None], ids].add(1, mode="drop"), prompt, bias


def _accept(
    x: Float[Array, "R V"],
    token: Int[Array, "R"],
    each: RowParams,
    draft_ids: Int[Array, "S n-1"],
    drafted: Bool[Array, "S n-1"],
    draft_probs: Float[Array, "S n-1 V"],
) -> tuple[Bool[Array, "S n-1"], Int[Array, "S n"]]:
    """Which drafts stand on their own, and each position's token if the drafts end there."""
    num_rows, length = draft_ids.shape
    choice = token.reshape(num_rows, length + 1)

    def by_chance() -> tuple[Array, Array]:
        p = sampler.probabilities(x, each).reshape(num_rows, length + 1, -1)[:, :-1]
        at_draft = jnp.maximum(draft_ids, 0)[:, :, None]
        p_draft = jnp.take_along_axis(p, at_draft, axis=2)[:, :, 0]
        q_draft = jnp.take_along_axis(draft_probs, at_draft, axis=2)[:, :, 0]
        nothing = jnp.zeros((token.shape[0], 1), jnp.int32)
        chance = uniforms(row_keys(each.seed, each.index, ACCEPT), nothing).reshape(num_rows, length + 1)[:, :-1]
        left = jnp.maximum(p - draft_probs, 0.0)
        left = jnp.where((left.max(axis=2) > 0)[:, :, None], left, p)  # rounding may leave nothing of an equal q
        keys = row_keys(each.seed, each.index, RESIDUAL).reshape(num_rows, length + 1, 2)[:, :-1]
        left = left.reshape(num_rows * length, -1)
        noisy = jnp.log(left) + gumbel(keys.reshape(-1, 2), filters.ids_like(left))
        replacement = filters.first_max(noisy)[1].reshape(num_rows, length)
        instead = jnp.where(drafted, replacement, choice[:, :-1])
        return chance * q_draft < p_draft, jnp.concatenate([instead, choice[:, -1:]], axis=1)

    def by_rank() -> tuple[Array, Array]:
        return choice[:, :-1] == draft_ids, choice

    return lax.cond(jnp.any(each.active & ~each.greedy), by_chance, by_rank)
