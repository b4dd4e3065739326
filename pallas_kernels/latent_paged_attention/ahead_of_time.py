"""Compiles the operation for a device that is not here, in a scan over the layers of a pool, as models do."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels.common.slot_shard import SlotShard
from pallas_kernels.latent_paged_attention.api import latent_paged_attention
from pallas_kernels.latent_paged_attention.arg_specs import ArgSpec


@dataclass(frozen=True)
class Batch:
    """A bucket: padded sequences and query tokens; max_q_len as the op takes it."""

    sequences: int
    tokens: int
    max_q_len: int | None


DECODE = Batch(64, 64, 1)
PREFILL = Batch(16, 512, None)
POOL_BYTES = 8 << 30


def compile_layers(
    spec: ArgSpec, batch: Batch, device: jax.Device, backend: str
) -> tuple[jax.stages.Compiled, jax.ShapeDtypeStruct]:
    """The compiled scan and the pool that it updates in place.

    Args:
      device: from `sharding.topologies`. backend: `tpu` or `gpu`.
    """
    row = spec.pool(backend, 1).shape[-1] * jnp.dtype(spec.pool_dtype).itemsize
    pages = POOL_BYTES // (spec.layers * spec.page_size // spec.shards * row)
    q_latent, q_rope, latent, k_rope, pool, index, *lengths = spec.abstract(
        backend, batch.sequences, batch.tokens, pages
    )

    def layers(pool, scales, q_latent, q_rope, latent, k_rope, shard, *lengths):
        def body(carry, layer):
            x, pool, scales = carry
            out, *found = latent_paged_attention(
                x,
                q_rope,
                latent,
                k_rope,
                pool,
                layer,
                *lengths,
                scale=spec.scale,
                max_q_len=batch.max_q_len,
                slots=SlotShard(shard, spec.shards) if spec.shards > 1 else None,
                kv_scales=scales,
                backend=backend,
            )
            if spec.shards > 1:
                out = (out * found.pop(0)[..., None]).astype(x.dtype)
            return (out, *found, *[None] * (2 - len(found))), None

        return jax.lax.scan(body, (q_latent, pool, scales), jnp.arange(spec.layers, dtype=jnp.int32))[0]

    mapped = jax.shard_map(layers, mesh=Mesh([device], ("x",)), in_specs=PartitionSpec(), out_specs=PartitionSpec())
    lowered = jax.jit(mapped, donate_argnums=(0, 1)).lower(
        pool, spec.scales(pages), q_latent, q_rope, latent, k_rope, index, *lengths
    )
    return lowered.compile(), pool
