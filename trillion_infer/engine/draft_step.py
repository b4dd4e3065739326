"""Steps of a model that drafts: `extend` follows every step of the target, `chain` proposes tokens after it.

`extend` writes the drafter's KV of the positions that the target computed, into the pages that the target uses for
them, so that prefixes, preemption and rejected drafts need nothing more. `chain` writes at the positions after them,
in pages held for it; what it leaves there is overwritten by the step that computes those positions.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from trillion_infer.engine.batch import ON_DEVICE, BatchLayout, token_positions
from trillion_infer.engine.buckets import Bucket
from trillion_infer.layers.context import Sequences
from trillion_infer.layers.draft import DraftInputs, DraftModel
from trillion_infer.sample import PACKED_FIELDS

Start = dict[str, Array]
"""Where chains begin, a row a sequence, those that are drafted for first: token, states, kv_lens, slots; and how many
on each shard, count."""


def make_extend(draft: DraftModel, mesh: Mesh, bucket: Bucket, specs: Any, pools: Any):
    """extend(params, pools, table, packed, tokens, hidden, aux, new) -> (pools, start).

    packed: the target step's. tokens, hidden, aux: what `forward` gave beside the logits. new: (token [R],) of a step
    that sampled, (tokens [R, n], num_tokens [R]) of one that verified.
    """
    layout = BatchLayout(bucket)
    pools_count = len(draft.config.cache_keys)

    def shard(params, pools, table, batch: dict[str, Array], tokens, hidden, aux, new_ids, new_counts):
        batch = {name: value[0] for name, value in batch.items()}
        kv_lens, cu, slots = batch["kv_lens"], batch["cu_q_lens"], batch["slots"]
        sequence, positions = token_positions(bucket.tokens, kv_lens, cu)
        # A row's last token that stands is `gone` before its end; the token after it is the newest.
        count = jnp.maximum(new_counts, 1)
        newest = jnp.take_along_axis(new_ids, count[:, None] - 1, axis=1)[:, 0]
        newest = jnp.maximum(jnp.where(batch["following"] == ON_DEVICE, newest, batch["following"]), 0)
        gone = jnp.where(batch["following"] == ON_DEVICE, batch["draft_len"] - (count - 1), 0)
        real = jnp.arange(kv_lens.shape[0]) < batch["num_seqs"][1]
        last = cu[1:] - 1 - gone
        states = draft.begin(params, hidden, aux)
        if draft.shifted:
            tokens = jnp.roll(tokens, -1).at[jnp.where(real, last, bucket.tokens)].set(newest, mode="drop")
        rope_lens = jnp.maximum(batch["prompt_lens"][sequence], positions + 1)
        sequences = Sequences(positions, kv_lens, cu, batch["num_seqs"], (table[slots],) * pools_count)
        inputs = DraftInputs(tokens, states, rope_lens, sequences, 1 if bucket.is_decode else None)
        _, pools = draft.run(params, pools, inputs)
        wanted = real & (batch["draft_next"] > 0)
        order = jnp.argsort(~wanted, stable=True)
        start = {
            "token": newest[order],
            "kv_lens": (kv_lens - gone + (0 if draft.shifted else 1))[order],
            "slots": slots[order],
            "count": wanted.sum(dtype=jnp.int32)[None],
        }
        return pools, start if states is None else {**start, "states": states[last][order]}

    run = jax.shard_map(
        shard,
        mesh=mesh,
        in_specs=(specs, pools, P("data"), *(P("data"),) * 6),
        out_specs=(pools, P("data")),
        check_vma=False,
    )

    def extend(params, pools, table, packed: Int[Array, "d n"], tokens, hidden, aux, new: tuple[Array, ...]):
        fields = layout.unpack(packed)
        names = ("slots", "kv_lens", "cu_q_lens", "num_seqs", "prompt_lens", "following", "draft_next")
        batch = {name: fields[name] for name in names}
        drafts = layout.rows(packed)[:, PACKED_FIELDS:]
        batch["draft_len"] = drafts[:, -1] if bucket.verifies else jnp.zeros_like(batch["slots"])
        ids, counts = new if bucket.verifies else (new[0][:, None], jnp.ones_like(new[0]))
        return run(params, pools, table, batch, tokens, hidden, aux, ids, counts)

    return extend


def make_chain(draft: DraftModel, mesh: Mesh, length: int, specs: Any, pools: Any):
    """chain(params, pools, table, start) -> (pools, (tokens [R, length], their probabilities [R, length]))."""
    pools_count = len(draft.config.cache_keys)

    def shard(params, pools, table, start: Start):
        slots, count = start["slots"], start["count"][0]
        cu = jnp.minimum(jnp.arange(slots.shape[0] + 1, dtype=jnp.int32), count)
        active = jnp.arange(slots.shape[0]) < count
        tables = (table[slots],) * pools_count

        def one(carry, _):
            pools, token, states, kv_lens = carry
            positions = jnp.where(active, kv_lens - 1, 0)
            sequences = Sequences(positions, kv_lens, cu, jnp.stack([count, count]), tables)
            out, pools = draft.run(params, pools, DraftInputs(token, states, kv_lens, sequences, 1))
            token, chance = draft.best(params, out)
            return (pools, token, None if states is None else out, kv_lens + 1), (token, chance)

        carry = (pools, start["token"], start.get("states"), start["kv_lens"])
        (pools, *_), (tokens, chances) = lax.scan(one, carry, length=length)
        return pools, (tokens.T, chances.T)

    return jax.shard_map(
        shard,
        mesh=mesh,
        in_specs=(specs, pools, P("data"), P("data")),
        out_specs=(pools, P("data")),
        check_vma=False,
    )
