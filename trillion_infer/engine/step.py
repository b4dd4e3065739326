"""The step, the same for every bucket and mesh: `forward` from a batch to logits, `choose` from logits to tokens.

Two programs rather than one, because the sampler is the larger part of the compile and depends on the number of rows
only: buckets share it. Everything between them stays on the device.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, UInt

from sharding.rules import VOCAB_AXES
from trillion_infer.engine.batch import ON_DEVICE, BatchLayout, token_positions
from trillion_infer.engine.buckets import SCORE_ROWS, Bucket
from trillion_infer.engine.state import DeviceState, specs_of
from trillion_infer.layers.context import Ops, Sequences
from trillion_infer.layers.decoder import Decoder, Params, Pools, StepInputs
from trillion_infer.sample import PACKED_FIELDS, RowParams, Sampled, SamplerState, Verified, sample, score, unpack
from trillion_infer.speculate.verify import verify


def make_forward(
    model: Decoder,
    mesh: Mesh,
    bucket: Bucket,
    state: DeviceState,
    ops: Ops,
    weights: Params,
    aux_layers: tuple[int, ...] | None = None,
):
    """forward(params, pools, tables, last_token, packed) -> (pools, rows, logits, hidden).

    packed: BatchLayout's array, one row a data shard. rows: packed sampling parameters, with slots of the whole
    mesh. logits `[data*S*width, V]` float32. hidden `[data*T, M]`: final hidden states of every token. `state` and
    `weights` give shapes and shardings only. With `aux_layers`, for models that draft: a fifth result,
    (tokens, aux), the ids `[data*T]` and, for each of those numbers of layers, the residual stream after them
    `[data*T, M]`.
    """
    layout = BatchLayout(bucket)
    slots = state.tables[0].shape[0] // mesh.shape["data"]
    run = _sharded_forward(model, mesh, bucket, state, ops, weights, aux_layers or ())

    def forward(params, pools: Pools, tables, last_token: Int[Array, "N"], packed: Int[Array, "d n"]):
        batch = _batch(layout, packed, last_token, slots)
        logits, hidden, aux, pools = run(params, pools, tables, batch)
        out = pools, layout.rows(packed), logits, hidden
        return out if aux_layers is None else (*out, (batch["tokens"].reshape(-1), aux))

    return forward


def make_layers(model: Decoder, mesh: Mesh, bucket: Bucket, state: DeviceState, ops: Ops, weights: Params):
    """layers(params, pools, tables, last_token, packed, x, between) -> (pools, rows, logits, x).

    A part of `forward`: the repeats `between` two numbers `[2]` of the model's segments laid end to end, on the
    residual stream x `[data*T, M]` that those before left. Logits are zeros before the last one. Every device along
    `sequence` computes all tokens.
    """
    layout = BatchLayout(bucket)
    slots = state.tables[0].shape[0] // mesh.shape["data"]
    sizes = dict(mesh.shape)
    pools, tables = specs_of(state.pools), tuple(P("data") for _ in state.tables)

    def shard(params: Params, pools: Pools, tables, batch: dict[str, Array], x, between):
        inputs = _inputs({name: value[0] for name, value in batch.items()}, tables, (), None)
        return model.some_layers(params, pools, inputs, sizes, ops, x, between)

    run = jax.shard_map(
        shard,
        mesh=mesh,
        in_specs=(specs_of(weights), pools, tables, P("data"), P("data"), P()),
        out_specs=(P("data", VOCAB_AXES), P("data"), pools),
        check_vma=False,
    )

    def layers(params, pools: Pools, tables, last_token, packed, x: Float[Array, "n M"], between: Int[Array, "2"]):
        logits, x, pools = run(params, pools, tables, _batch(layout, packed, last_token, slots), x, between)
        return pools, layout.rows(packed), logits, x

    return layers


def _batch(
    layout: BatchLayout, packed: Int[Array, "d n"], last_token: Int[Array, "N"], slots: int
) -> dict[str, Int[Array, "d ..."]]:
    """What the layers are to know of a packed batch. slots: requests a data shard."""
    fields = layout.unpack(packed)
    offset = (jnp.arange(packed.shape[0], dtype=jnp.int32) * slots)[:, None]
    of_each = jax.vmap(partial(token_positions, layout.bucket.tokens))
    sequence, positions = of_each(fields["kv_lens"], fields["cu_q_lens"])
    newest = last_token[jnp.take_along_axis(fields["slots"] + offset, sequence, axis=1)]
    tokens = jnp.where(fields["tokens"] == ON_DEVICE, newest, fields["tokens"])
    rope_lens = jnp.maximum(jnp.take_along_axis(fields["prompt_lens"], sequence, axis=1), positions + 1)
    picked = {name: fields[name] for name in ("slots", "kv_lens", "cu_q_lens", "num_seqs", "sample_rows")}
    return {"tokens": tokens, "positions": positions, "rope_lens": rope_lens, **picked}


def _inputs(
    batch: dict[str, Array], tables: Sequence[Array], token_axes: tuple[str, ...], max_q_len: int | None
) -> StepInputs:
    """One shard's batch, of which it has its own tokens."""
    sequences = Sequences(
        positions=batch["positions"],
        kv_lens=batch["kv_lens"],
        cu_q_lens=batch["cu_q_lens"],
        num_seqs=batch["num_seqs"],
        page_tables=tuple(table[batch["slots"]] for table in tables),
    )
    tokens, rope_lens, sample_rows = batch["tokens"], batch["rope_lens"], batch["sample_rows"]
    return StepInputs(tokens, rope_lens, sample_rows, sequences, token_axes, max_q_len)


def make_choose(slots: int):
    """choose(sampler, rows, logits, mask, has_mask) -> (sampler, sampled). `slots`: requests a data shard."""

    def choose(
        sampler: SamplerState,
        rows: Int[Array, "d F S"],
        logits: Array,
        mask: UInt[Array, "R W"],
        has_mask: Bool[Array, ""],
    ) -> tuple[SamplerState, Sampled]:
        params, _ = _unpack_rows(rows, slots)
        sampled, sampler = sample(logits, sampler, params, mask, has_mask=has_mask)
        return sampler, sampled

    return choose


def make_accept(slots: int):
    """accept(sampler, rows, logits, mask, has_mask) -> (sampler, verified): `choose` for rows with drafts."""

    def accept(
        sampler: SamplerState,
        rows: Int[Array, "d F+n S"],
        logits: Array,
        mask: UInt[Array, "R*n W"],
        has_mask: Bool[Array, ""],
    ) -> tuple[SamplerState, Verified]:
        params, drafts = _unpack_rows(rows, slots)
        ids, counts = drafts[:-1].T, drafts[-1]
        logits = logits.reshape(counts.shape[0], drafts.shape[0], logits.shape[1])
        masks = mask.reshape(*logits.shape[:2], mask.shape[1])
        verified, sampler = verify(logits, ids, counts, sampler, params, masks, has_mask=has_mask)
        return sampler, verified

    return accept


def _unpack_rows(rows: Int[Array, "d F S"], slots: int) -> tuple[RowParams, Int[Array, "n R"]]:
    """Parameters of all shards' rows, with slots of the whole mesh, and the fields behind them."""
    shards, fields, sequences = rows.shape
    flat = rows.swapaxes(0, 1).reshape(fields, shards * sequences)
    params = unpack(flat[:PACKED_FIELDS])
    offset = jnp.repeat(jnp.arange(shards, dtype=jnp.int32) * slots, sequences)
    return replace(params, slot=params.slot + offset), flat[PACKED_FIELDS:]


def _sharded_forward(
    model: Decoder,
    mesh: Mesh,
    bucket: Bucket,
    state: DeviceState,
    ops: Ops,
    weights: Params,
    aux_layers: tuple[int, ...],
):
    """The decoder on every shard of the mesh; collectives are where the layers say.

    Along `sequence` every device computes its part of the tokens, or, where there is one a request or pipeline stages
    cut them into micro-batches, all of them.
    """
    divides = mesh.shape["sequence"] > 1 and bucket.tokens % mesh.shape["sequence"] == 0
    split = divides and mesh.shape["stage"] == 1 and not bucket.is_decode
    token_axes = ("sequence",) if split else ()
    max_q_len = 1 if bucket.is_decode else None
    params = specs_of(weights)
    pools = specs_of(state.pools)
    tables = tuple(P("data") for _ in state.tables)

    def shard(params: Params, pools: Pools, tables, batch: dict[str, Array]):
        batch = {name: value[0] for name, value in batch.items()}
        for name in ("tokens", "rope_lens", "positions"):
            batch[name] = own_part(batch[name], token_axes, mesh)
        inputs, sizes = _inputs(batch, tables, token_axes, max_q_len), dict(mesh.shape)
        hidden, aux, pools = model.states(params, pools, inputs, sizes, ops, aux_layers)
        return model.logits(params, hidden[inputs.sample_rows], sizes, ops), hidden, aux, pools

    return jax.shard_map(
        shard,
        mesh=mesh,
        in_specs=(params, pools, tables, P("data")),
        out_specs=(P("data", VOCAB_AXES), P("data"), P("data"), pools),
        check_vma=False,
    )


def own_part(x: Int[Array, "T"], axes: tuple[str, ...], mesh: Mesh) -> Int[Array, "t"]:
    """This device's part of an array that all devices along the mesh axes have; inside shard_map."""
    if not axes:
        return x
    count = x.shape[0] // math.prod(mesh.shape[axis] for axis in axes)
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axes) * count, count)


def make_score(model: Decoder, mesh: Mesh, ops: Ops, weights: Params):
    """score(params, hidden [n, M], start, targets [SCORE_ROWS]) -> logprob, rank, top ids and top logprobs."""
    specs = specs_of(weights)

    def logits_of(params, hidden):
        return jax.shard_map(
            lambda p, h: model.logits(p, h, dict(mesh.shape), ops),
            mesh=mesh,
            in_specs=(specs, P()),
            out_specs=P(None, VOCAB_AXES),
            check_vma=False,
        )(params, hidden)

    def run(params, hidden, start: Int[Array, ""], targets: Int[Array, "r"]):
        rows = jnp.minimum(start + jnp.arange(SCORE_ROWS, dtype=jnp.int32), hidden.shape[0] - 1)
        return score(logits_of(params, hidden[rows]), targets)

    return run
