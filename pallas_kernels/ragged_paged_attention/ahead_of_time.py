"""Compiles the operation for a device that is not here, in a scan over the layers of a pool, as models do."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels.common.slot_shard import SlotShard
from pallas_kernels.ragged_paged_attention import gpu
from pallas_kernels.ragged_paged_attention.api import ragged_paged_attention
from pallas_kernels.ragged_paged_attention.arg_specs import ArgSpec
from pallas_kernels.ragged_paged_attention.blocks import GpuBlocks
from sharding.topologies import kind_of


@dataclass(frozen=True)
class Batch:
    """A bucket: padded sequences and query tokens; max_q_len as the op takes it. blocks: in place of the tuned ones."""

    sequences: int
    tokens: int
    max_q_len: int | None
    blocks: GpuBlocks | None = None


DECODE = Batch(64, 64, 1)
PREFILL = Batch(16, 512, None)
MOSAIC = GpuBlocks(keys=64, rows=128, warps=8, stages=2, prefill="mosaic")


def pages_of(spec: ArgSpec, device: jax.Device) -> int:
    """Pages that make a pool of about a quarter of the device's memory."""
    lanes = -(-spec.dim // 128) * 128
    row = 2 * spec.kv_heads * lanes * jnp.dtype(spec.pool_dtype).itemsize
    kind = kind_of(device.device_kind)
    assert kind is not None, "devices come from sharding.topologies"
    return kind.memory // 4 // (spec.layers * spec.page_size // spec.shards * row)


def compile_layers(
    spec: ArgSpec, batch: Batch, device: jax.Device, backend: str
) -> tuple[jax.stages.Compiled, jax.ShapeDtypeStruct]:
    """The compiled scan and the pool that it updates in place.

    Args:
      device: from `sharding.topologies`. backend: `tpu` or `gpu`.
    """
    run = partial(ragged_paged_attention, backend=backend)
    if batch.blocks is not None:
        unused = dict.fromkeys(("soft_cap", "k_scale", "v_scale"))
        run = partial(gpu.ragged_paged_attention, blocks=batch.blocks, **unused)
    mesh = Mesh([device], ("x",))
    sequences = batch.sequences if spec.max_len <= 2**20 else 4
    pages = pages_of(spec, device)
    args = spec.abstract(backend, sequences, max(batch.tokens, sequences), pages)
    sinks = jax.ShapeDtypeStruct((spec.heads,), jnp.float32)
    q, k, v, pool, index, *lengths = args

    def layers(pool, scales, q, k, v, sinks, shard, *lengths):
        def body(carry, layer):
            x, pool, scales = carry
            out, *found = run(
                x,
                k,
                v,
                pool,
                layer,
                *lengths,
                sinks=sinks if spec.sinks else None,
                max_q_len=batch.max_q_len,
                kv_scales=scales,
                slots=SlotShard(shard, spec.shards) if spec.shards > 1 else None,
                **spec.keywords(),
            )
            if spec.shards > 1:
                out = (out * found.pop(0)[..., None]).astype(x.dtype)
            return (out, *found, *[None] * (2 - len(found))), None

        return jax.lax.scan(body, (q, pool, scales), jnp.arange(spec.layers, dtype=jnp.int32))[0]

    mapped = jax.shard_map(layers, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())
    compiled = (
        jax.jit(mapped, donate_argnums=(0, 1))
        .lower(pool, spec.scales(pages), q, k, v, sinks, index, *lengths)
        .compile()
    )
    return compiled, pool
