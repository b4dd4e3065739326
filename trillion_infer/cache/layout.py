"""Device arrays of the KV pools: shapes, sharding, bytes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding.rules import SERVE_RULES, kv_plan, partition_spec
from trillion_infer.config.model import AttentionSpec, CacheKey, ModelConfig, cache_key
from trillion_infer.config.stages import stage_plan

LANES = 128


@dataclass(frozen=True)
class PoolLayout:
    """One pool, `[L, P, p, 2K/pack, pack, D]` for attention and `[L, P, p, R]` for latent entries.

    layers: those of all stages, each of which has room for as many. heads: physical KV heads (replicas and padding
    counted). pages are those of all `data` shards together. head_axis, slot_axis: logical axes of the heads and of the
    slots of a page.
    """

    key: CacheKey
    layers: int
    page_size: int
    heads: int
    dim: int
    dtype: str
    pack: int
    head_axis: str | None
    slot_axis: str

    def shape(self, pages: int) -> tuple[int, ...]:
        if self.key.kind == "latent":
            return (self.layers, pages, self.page_size, self.dim)
        return (self.layers, pages, self.page_size, 2 * self.heads // self.pack, self.pack, self.dim)

    @property
    def spec(self) -> PartitionSpec:
        """Layers over `stage`, pages over `data`, slots of each page and heads as the rules say."""
        return partition_spec(("layers", "pages", self.slot_axis, self.head_axis), SERVE_RULES)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers and heads."""
        return math.prod(self.shape(1)) * jnp.dtype(self.dtype).itemsize

    def abstract(self, pages: int, mesh: Mesh) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape(pages), jnp.dtype(self.dtype), sharding=NamedSharding(mesh, self.spec))


def pool_layouts(
    config: ModelConfig, page_size: int, dtype: str, sizes: Mapping[str, int], platform: str
) -> tuple[PoolLayout, ...]:
    """One layout a cache key of the model, in the model's order."""
    stages = sizes["stage"]
    layers_of = stage_plan(config, stages)
    pack = 4 // jnp.dtype(dtype).itemsize if platform == "tpu" else 1
    layouts = []
    for key in config.cache_keys:
        mixer = next(layer.mixer for layer in config.layers if cache_key(layer.mixer) == key)
        heads, head_axis, slot_axis = 1, None, "latent_slots"
        if isinstance(mixer, AttentionSpec):
            plan, head_axis, slot_axis = kv_plan(mixer.heads, mixer.kv_heads, sizes)
            heads = plan.physical_kv_heads
        dim = -(-key.dim // LANES) * LANES if platform == "tpu" else key.dim
        layers = stages * layers_of.pool_slots(key)
        layouts.append(PoolLayout(key, layers, page_size, heads, dim, dtype, pack, head_axis, slot_axis))
    return tuple(layouts)
