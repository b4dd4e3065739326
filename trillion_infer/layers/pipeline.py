"""Pipeline stages inside one program: micro-batches pass from stage to stage by collective permutes (GPipe, arXiv
1811.06965, without the backward half).

In tick t stage s works on micro-batch t - s, so that M micro-batches take M + stages - 1 ticks. A stage without one
runs on an empty batch: it has nothing else to do, and the program stays the same on every device.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from trillion_infer.layers.context import Sequences
from trillion_infer.layers.pools import Pools

Activations = Float[Array, "t M"]
RunStage = Callable[[Activations, Pools, Sequences, Int[Array, "t"], Int[Array, ""]], tuple[Activations, Pools]]
"""run(x, pools, sequences, rope_lens, stage) -> x after the stage's layers, and the pools."""

AXIS = "stage"
MICRO_TOKENS = 16
"""Tokens a micro-batch has room for at least: for fewer, a product takes the time of reading its weights, and a split
would read them again."""


@dataclass(frozen=True)
class MicroBatches:
    """The tokens of a step cut into M runs of equal length, which may cut a sequence: an earlier part's keys are
    written by the time a later part reads them.

    token: the step's token at each place `[M, t]`. sequences, rope_lens: as of a step, with a leading axis M.
    """

    token: Int[Array, "M t"]
    starts: Int[Array, "M"]
    sequences: dict[str, Array | tuple[Array, ...]]
    rope_lens: Int[Array, "M t"]

    @property
    def count(self) -> int:
        return self.token.shape[0]

    @classmethod
    def of(cls, whole: Sequences, rope_lens: Int[Array, "T"], stages: int) -> "MicroBatches":
        """At most `stages` micro-batches, balanced by the tokens that the step really has."""
        tokens, rows = whole.positions.shape[0], whole.kv_lens.shape[0]
        count = max(1, min(stages, tokens // MICRO_TOKENS))
        size = -(-tokens // count)
        step = -(-whole.cu_q_lens[-1] // count)
        starts = jnp.arange(count, dtype=jnp.int32) * step
        token = jnp.minimum(starts[:, None] + jnp.arange(size, dtype=jnp.int32), tokens - 1)
        sequences = jax.vmap(lambda start: _cut(whole, start, start + step, min(rows, size)))(starts)
        sequences["positions"] = whole.positions[token]
        return cls(token, starts, sequences, rope_lens[token])

    def at(self, number: Int[Array, ""], is_real: Array) -> tuple[Sequences, Int[Array, "t"]]:
        """One micro-batch; without a token where it is not real."""
        fields = jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, number, keepdims=False), self.sequences)
        for name in ("cu_q_lens", "kv_lens", "num_seqs"):
            fields[name] = jnp.where(is_real, fields[name], 0)
        return Sequences(**fields), lax.dynamic_index_in_dim(self.rope_lens, number, keepdims=False)

    def places(self, tokens: int) -> Int[Array, "T"]:
        """Where each token of the step stands among the micro-batches laid end to end."""
        index = jnp.arange(tokens, dtype=jnp.int32)
        number = jnp.sum(index[:, None] >= self.starts[None, 1:], axis=1, dtype=jnp.int32)
        within = jnp.minimum(index - self.starts[number], self.token.shape[1] - 1)
        return number * self.token.shape[1] + within


def _cut(whole: Sequences, start: Int[Array, ""], stop: Int[Array, ""], rows: int) -> dict:
    """The sequences that have tokens in [start, stop), with the lengths they have after it; `rows` places for them."""
    cu, real = whole.cu_q_lens, whole.num_seqs[1]
    stop = jnp.minimum(stop, cu[-1])
    last = whole.kv_lens.shape[0] - 1
    first = jnp.minimum(jnp.sum(cu[1:] <= start, dtype=jnp.int32), last)
    row = first + jnp.arange(rows, dtype=jnp.int32)
    used = (row < real) & (cu[jnp.minimum(row, last)] < stop) & (start < stop)
    row = jnp.minimum(row, last)
    kv_lens = whole.kv_lens[row] - (cu[row + 1] - jnp.clip(cu[row + 1], start, stop))
    ends = jnp.where(used, jnp.clip(cu[row + 1], start, stop), jnp.maximum(stop, start)) - start
    count = jnp.sum(used, dtype=jnp.int32)
    decode = jnp.clip(whole.num_seqs[0] - first, 0, count)
    return {
        "kv_lens": jnp.where(used, kv_lens, 0),
        "cu_q_lens": jnp.concatenate([jnp.zeros(1, jnp.int32), ends]),
        "num_seqs": jnp.stack([decode, count]),
        "page_tables": tuple(table[row] for table in whole.page_tables),
    }


def run_stages(
    run: RunStage, x: Float[Array, "T M"], pools: Pools, batches: MicroBatches, stages: int
) -> tuple[Float[Array, "T M"], Pools]:
    """Every micro-batch through every stage; the activations after the last one, on all of them."""
    stage = lax.axis_index(AXIS)
    inputs = x[batches.token]
    onward = [(s, s + 1) for s in range(stages - 1)]

    def tick(carry, time):
        received, done, pools = carry
        number = time - stage
        is_real = (number >= 0) & (number < batches.count)
        number = jnp.clip(number, 0, batches.count - 1)
        sequences, rope_lens = batches.at(number, is_real)
        begins = lax.dynamic_index_in_dim(inputs, number, keepdims=False)
        y, pools = run(jnp.where(stage == 0, begins, received), pools, sequences, rope_lens, stage)
        kept = jnp.where(is_real, y, lax.dynamic_index_in_dim(done, number, keepdims=False))
        done = lax.dynamic_update_index_in_dim(done, kept, number, 0)
        return (lax.ppermute(y, AXIS, onward), done, pools), None

    ticks = jnp.arange(batches.count + stages - 1, dtype=jnp.int32)
    (_, done, pools), _ = lax.scan(tick, (jnp.zeros_like(inputs[0]), jnp.zeros_like(inputs), pools), ticks)
    flat = done.reshape(-1, done.shape[-1])[batches.places(x.shape[0])]
    return lax.psum(jnp.where(stage == stages - 1, flat, 0), AXIS), pools
