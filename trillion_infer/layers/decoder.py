"""A decoder from its description: embeddings, segments of stacked layers run by scans, final norm, logits."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from trillion_infer.config.model import AttentionSpec, DenseSpec, LayerSpec, ModelConfig, cache_key
from trillion_infer.config.stages import stage_plan
from trillion_infer.layers.attention import Attention
from trillion_infer.layers.context import Context, Ops, Sequences
from trillion_infer.layers.embedding import Embedding
from trillion_infer.layers.expert_cache import ExpertCache
from trillion_infer.layers.ffn import GatedFFN
from trillion_infer.layers.latent import LatentAttention
from trillion_infer.layers.moe import MoE
from trillion_infer.layers.norm import RMSNorm
from trillion_infer.layers.parameters import bind
from trillion_infer.layers.pipeline import Activations, MicroBatches, run_stages
from trillion_infer.layers.pools import Pools
from trillion_infer.layers.rope import rope_tables
from trillion_infer.params.decoder import Sizes, decoder_params
from trillion_infer.params.names import TensorNames
from trillion_infer.params.tree import Declared

Params = Mapping[str, Array]


@dataclass(frozen=True)
class StepInputs:
    """One shard's part of a batch. rope_lens: see rope_tables. sample_rows: which tokens' logits are wanted.

    token_axes: mesh axes beside `data` over which `tokens`, `rope_lens` and `sequences.positions` are split.
    max_q_len: promise that no sequence has more query tokens in this step.
    """

    tokens: Int[Array, "T"]
    rope_lens: Int[Array, "T"]
    sample_rows: Int[Array, "R"]
    sequences: Sequences
    token_axes: tuple[str, ...] = ()
    max_q_len: int | None = None


@dataclass(frozen=True)
class Taps:
    """The residual stream as it was after each number of layers in `after_layers`, while the layers run."""

    after_layers: tuple[int, ...]
    states: tuple[Float[Array, "T M"], ...]

    def with_states(self, states: tuple[Array, ...]) -> "Taps":
        return Taps(self.after_layers, states)

    def after(self, count: Int[Array, ""], x: Float[Array, "T M"]) -> "Taps":
        """`count` layers have run and left x."""
        states = (jnp.where(count == n, x, held) for n, held in zip(self.after_layers, self.states, strict=True))
        return self.with_states(tuple(states))


class Layer(nnx.Module):
    """One kind of layer, stacked over the repeats of its segment, with the parameters of `layer_params`."""

    def __init__(self, spec: LayerSpec, config: ModelConfig, declared: Declared, sizes: Sizes):
        norm = partial(RMSNorm.optional, eps=config.norm_eps, plus_one=config.norm_plus_one)
        self.key = cache_key(spec.mixer)
        self.mixer = (
            Attention(spec.mixer, config, declared["mixer"], sizes)
            if isinstance(spec.mixer, AttentionSpec)
            else LatentAttention(spec.mixer, declared["mixer"])
        )
        self.ffn = (
            GatedFFN(spec.ffn, declared["ffn"]) if isinstance(spec.ffn, DenseSpec) else MoE(spec.ffn, declared["ffn"])
        )
        self.mixer_norm = RMSNorm(declared["mixer_norm"], config.norm_eps, config.norm_plus_one)
        self.ffn_norm = RMSNorm(declared["ffn_norm"], config.norm_eps, config.norm_plus_one)
        self.mixer_post_norm, self.ffn_post_norm = norm(declared["mixer_post_norm"]), norm(declared["ffn_post_norm"])

    def __call__(
        self,
        x: Float[Array, "T M"],
        pools: Pools,
        pool_layer: Int[Array, ""],
        ctx: Context,
        mixture: tuple[Int[Array, ""], int],
    ) -> tuple[Float[Array, "T M"], Pools]:
        """mixture: which of the model's mixture layers this is, if it is one, and how many there are in a period."""
        mixed, pools = self.mixer(self.mixer_norm(x), pools, pool_layer, ctx)
        x = x + (mixed if self.mixer_post_norm is None else self.mixer_post_norm(mixed))
        normed = self.ffn_norm(x)
        if isinstance(self.ffn, MoE) and isinstance(pools[-1], ExpertCache):
            fed, cache = self.ffn.through_cache(normed, pools[-1], *mixture, ctx)
            pools = (*pools[:-1], cache)
        else:
            fed = self.ffn(normed, ctx)
        return x + (fed if self.ffn_post_norm is None else self.ffn_post_norm(fed)), pools


class Decoder(nnx.Module):
    """A model for a mesh of these sizes, with the parameters of `decoder_params`; `forward` runs it with the arrays
    loaded."""

    def __init__(self, config: ModelConfig, names: TensorNames, sizes: Sizes):
        declared = decoder_params(config, names, sizes)
        self.config, self.names = config, names
        self.plan = stage_plan(config, sizes["stage"])
        self.embed = Embedding(config, declared["embed"])
        self.head = None if config.tied else Embedding(config, declared["head"])
        self.norm = RMSNorm(declared["norm"], config.norm_eps, config.norm_plus_one)
        self.segments = nnx.List(
            nnx.List(
                Layer(spec, config, declared["segments"][str(number)][str(place)], sizes)
                for place, spec in enumerate(segment.period)
            )
            for number, segment in enumerate(self.plan.segments)
        )

    def forward(
        self, params: Params, pools: Pools, inputs: StepInputs, axis_sizes: Mapping[str, int], ops: Ops
    ) -> tuple[Float[Array, "R V_shard"], Float[Array, "T M"], Pools]:
        """Logits of the wanted rows, final hidden states of every token (normed), and the pools with new entries."""
        x, _, pools = self.states(params, pools, inputs, axis_sizes, ops)
        return self.logits(params, x[inputs.sample_rows], axis_sizes, ops), x, pools

    def states(
        self,
        params: Params,
        pools: Pools,
        inputs: StepInputs,
        axis_sizes: Mapping[str, int],
        ops: Ops,
        aux_layers: tuple[int, ...] = (),
    ) -> tuple[Float[Array, "T M"], tuple[Float[Array, "T M"], ...], Pools]:
        """Final hidden states (normed), the residual stream after each number of layers in `aux_layers` (0: the
        embeddings; not over pipeline stages), and the pools with new entries."""
        ctx = self._context(inputs, axis_sizes, ops)
        embed = bind(self.embed, params, "embed.")
        x = embed(inputs.tokens, ctx)
        taps = Taps(aux_layers, tuple(x if layers == 0 else jnp.zeros_like(x) for layers in aux_layers))
        if axis_sizes["stage"] == 1:
            x, pools, taps = self._run_layers(x, pools, params, ctx, jnp.int32(0), taps)
        else:
            assert not aux_layers, "stages hand on the last of their states only"
            x, pools = self._run_pipeline(x, pools, params, inputs, axis_sizes, ops)
        x = ctx.whole_tokens(bind(self.norm, params, "norm.")(x))
        return x, tuple(ctx.whole_tokens(state) for state in taps.states), pools

    def some_layers(
        self,
        params: Params,
        pools: Pools,
        inputs: StepInputs,
        axis_sizes: Mapping[str, int],
        ops: Ops,
        x: Float[Array, "T M"],
        between: Int[Array, "2"],
    ) -> tuple[Float[Array, "R V_shard"], Float[Array, "T M"], Pools]:
        """The repeats `between` two numbers of the segments laid end to end, on what those before left: logits of the
        wanted rows (zeros before the last repeat), the residual stream, and the pools with new entries.

        Not over pipeline stages. Before the first repeat x is not read.
        """
        ctx = self._context(inputs, axis_sizes, ops)
        start, stop = between[0], between[1]
        embed = bind(self.embed, params, "embed.")
        x = lax.cond(start == 0, lambda: embed(inputs.tokens, ctx).astype(x.dtype), lambda: x)
        x, pools, _ = self._run_layers(x, pools, params, ctx, jnp.int32(0), Taps((), ()), (start, stop))

        def logits():
            normed = bind(self.norm, params, "norm.")(x)
            return self.logits(params, normed[inputs.sample_rows], axis_sizes, ops)

        shape = jax.eval_shape(logits)
        repeats = sum(map(self.plan.slots, range(len(self.segments))))
        return lax.cond(stop == repeats, logits, lambda: jnp.zeros(shape.shape, shape.dtype)), x, pools

    def _context(self, inputs: StepInputs, axis_sizes: Sizes, ops: Ops) -> Context:
        ropes = {layer.mixer.rope for layer in self.config.layers if layer.mixer.rope is not None}
        positions = inputs.sequences.positions
        return Context(
            sequences=inputs.sequences,
            ropes={rope: rope_tables(rope, positions, inputs.rope_lens) for rope in ropes},
            cache_index={key: i for i, key in enumerate(self.config.cache_keys)},
            axis_sizes=axis_sizes,
            ops=ops,
            token_axes=inputs.token_axes,
            max_q_len=inputs.max_q_len,
        )

    def logits(self, params: Params, x: Float[Array, "R M"], axis_sizes: Mapping[str, int], ops: Ops):
        """Logits of hidden states that `forward` gave."""
        ctx = Context(_NO_SEQUENCES, {}, {}, axis_sizes, ops)
        name, module = ("embed.", self.embed) if self.head is None else ("head.", self.head)
        return bind(module, params, name).logits(x, ctx, self.config.logit_cap)

    def _run_pipeline(self, x, pools: Pools, params: Params, inputs: StepInputs, axis_sizes: Sizes, ops: Ops):
        """The layers of all stages, a micro-batch at a time."""
        batches = MicroBatches.of(inputs.sequences, inputs.rope_lens, axis_sizes["stage"])

        def run(x: Activations, pools: Pools, sequences: Sequences, rope_lens, stage):
            micro = replace(inputs, sequences=sequences, rope_lens=rope_lens)
            x, pools, _ = self._run_layers(x, pools, params, self._context(micro, axis_sizes, ops), stage, Taps((), ()))
            return x, pools

        return run_stages(run, x, pools, batches, axis_sizes["stage"])

    def _run_layers(
        self,
        x,
        pools: Pools,
        params: Params,
        ctx: Context,
        stage: Int[Array, ""],
        taps: "Taps",
        between: tuple[Int[Array, ""], Int[Array, ""]] | None = None,
    ):
        """Every layer of this stage, or those of the repeats `between` two numbers."""
        first = done = 0
        for number, segment in enumerate(self.plan.segments):
            slots, run = self.plan.slots(number), None
            if between is not None:
                run = jnp.clip(between[0] - done, 0, slots), jnp.clip(between[1] - done, 0, slots)
            x, pools, taps = self._run_segment(number, first, x, pools, params, ctx, stage, taps, run)
            first += len(segment.period) * sum(self.plan.counts[number])
            done += slots
        return x, pools, taps

    def _run_segment(
        self,
        number: int,
        first: int,
        x,
        pools: Pools,
        params: Params,
        ctx: Context,
        stage: Int[Array, ""],
        taps: "Taps",
        run: tuple[Int[Array, ""], Int[Array, ""]] | None,
    ):
        """This stage's repeats of a segment, which begins at layer `first`, or a `run` of them. Where stages differ in
        their number the loop ends early."""
        layers, plan = self.segments[number], self.plan
        offsets, per_period = [], dict.fromkeys(self.config.cache_keys, 0)
        for layer in layers:
            offsets.append(per_period[layer.key])
            per_period[layer.key] += 1
        mixtures = [isinstance(layer.ffn, MoE) for layer in layers]
        first_mixture = sum(
            slots * sum(isinstance(layer.ffn, MoE) for layer in earlier)
            for earlier, slots in zip(self.segments[:number], map(plan.slots, range(number)), strict=True)
        )
        base = {key: _by_stage(plan.pool_starts(number, key), stage) for key in per_period}

        def one_period(repeat, carry):
            x, pools, seen = carry
            for place, layer in enumerate(layers):
                bound = bind(layer, params, f"segments.{number}.{place}.", repeat)
                pool_layer = base[layer.key] + repeat * per_period[layer.key] + offsets[place]
                mixture = first_mixture + repeat * sum(mixtures) + sum(mixtures[:place])
                x, pools = bound(x, pools, pool_layer, ctx, (mixture, sum(mixtures)))
                seen = taps.with_states(seen).after(first + repeat * len(layers) + place + 1, x).states
            return x, pools, seen

        carry = (x, pools, taps.states)
        if run is not None:
            x, pools, seen = lax.fori_loop(*run, one_period, carry)
        elif plan.is_even(number):
            x, pools, seen = _repeat(one_period, plan.slots(number), carry)
        else:
            count = _by_stage(plan.counts[number], stage)
            x, pools, seen = lax.fori_loop(jnp.int32(0), count, one_period, carry)
        return x, pools, taps.with_states(seen)


def _repeat(one_period, count: int, carry):
    def step(carry, repeat):
        return one_period(repeat, carry), None

    return lax.scan(step, carry, jnp.arange(count, dtype=jnp.int32))[0]


def _by_stage(values: tuple[int, ...], stage: Int[Array, ""]) -> Int[Array, ""]:
    """The stage's own value."""
    return jnp.int32(values[0]) if len(set(values)) == 1 else jnp.asarray(values, jnp.int32)[stage]


_NONE = np.zeros(0, np.int32)
_NO_SEQUENCES = Sequences(_NONE, _NONE, _NONE, _NONE, ())  # pyright: ignore[reportArgumentType]
