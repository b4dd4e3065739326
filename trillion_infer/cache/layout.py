"""Device arrays of the KV pools: shapes, sharding, bytes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding.rules import SERVE_RULES, kv_plan, partition_spec, shards
from trillion_infer.config.model import AttentionSpec, CacheKey, ModelConfig, cache_key
from trillion_infer.config.stages import stage_plan
from trillion_infer.core.errors import ConfigError
from trillion_infer.layers.pools import QuantisedPool

LANES = 128
KV_FORMATS = {"int8": "int8", "fp8": "float8_e4m3fn"}
"""dtype of the numbers in a quantised pool, by the name that `kv_dtype` has for it."""


@dataclass(frozen=True)
class PoolLayout:
    """One pool, `[L, P, p, 2K/pack, pack, D]` for attention and `[L, P, p, R]` for latent entries; where dtype has
    eight bits, with scales `[L, P, 2K, p]` and `[L, P, 2, p]` beside it.

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
    def quantised(self) -> bool:
        """True where the pool has scales."""
        return self.dtype in KV_FORMATS.values()

    @property
    def scale_rows(self) -> int:
        """Scales of one slot."""
        return 2 if self.key.kind == "latent" else 2 * self.heads

    def scale_shape(self, pages: int) -> tuple[int, ...]:
        return (self.layers, pages, self.scale_rows, self.page_size)

    @property
    def scale_spec(self) -> PartitionSpec:
        """As `spec`, with the heads before the slots."""
        return partition_spec(("layers", "pages", self.head_axis, self.slot_axis), SERVE_RULES)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers and heads, scales included."""
        scales = 4 * math.prod(self.scale_shape(1)) if self.quantised else 0
        return math.prod(self.shape(1)) * jnp.dtype(self.dtype).itemsize + scales

    @property
    def pool_spec(self) -> Any:
        """The spec of each array of the pool."""
        return QuantisedPool(self.spec, self.scale_spec) if self.quantised else self.spec  # pyright: ignore

    def abstract(self, pages: int, mesh: Mesh) -> Any:
        """The pool as `jax.ShapeDtypeStruct`s with their shardings."""
        values = jax.ShapeDtypeStruct(self.shape(pages), jnp.dtype(self.dtype), sharding=NamedSharding(mesh, self.spec))
        if not self.quantised:
            return values
        at = NamedSharding(mesh, self.scale_spec)
        scales: Any = jax.ShapeDtypeStruct(self.scale_shape(pages), jnp.float32, sharding=at)
        return QuantisedPool(values, scales)  # pyright: ignore[reportArgumentType]


def pool_layouts(
    config: ModelConfig, page_size: int, dtype: str, sizes: Mapping[str, int], platform: str
) -> tuple[PoolLayout, ...]:
    """One layout a cache key of the model, in the model's order.

    Raises ConfigError where a device's keys and values do not fill the words of a TPU.
    """
    dtype = KV_FORMATS.get(dtype, dtype)
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
            rows = 2 * heads // shards(SERVE_RULES, head_axis, sizes)
            if rows % pack:
                raise ConfigError(
                    f"KV of {dtype} is packed by {pack} rows on a TPU, and a device has {rows} (keys and values of "
                    f"{rows // 2} heads). Use kv_dtype=bfloat16, or fewer devices over the heads."
                )
        dim = -(-key.dim // LANES) * LANES if platform == "tpu" else key.dim
        layers = stages * layers_of.pool_slots(key)
        layouts.append(PoolLayout(key, layers, page_size, heads, dim, dtype, pack, head_axis, slot_axis))
    return tuple(layouts)
