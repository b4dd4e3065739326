"""Shapes at which real models call the operation, on one device."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class ArgSpec:
    """One model on one device: heads are what the device holds; with `shards`, it holds so much less of every page."""

    name: str
    layers: int
    heads: int
    rank: int = 512
    rope: int = 64
    page_size: int = 64
    max_len: int = 131072
    shards: int = 1
    pool_dtype: str = "bfloat16"  # one of 8 bits has its scales as data

    def pool(self, platform: str, pages: int) -> jax.ShapeDtypeStruct:
        """The pool, its last axis padded to whole lanes on TPU."""
        width = self.rank + self.rope
        width = -(-width // 128) * 128 if platform == "tpu" else width
        return jax.ShapeDtypeStruct(
            (self.layers, pages, self.page_size // self.shards, width), jnp.dtype(self.pool_dtype)
        )

    def scales(self, pages: int) -> jax.ShapeDtypeStruct | None:
        """The scales of the pool, None where it has none."""
        shape = (self.layers, pages, 2, self.page_size // self.shards)
        return jax.ShapeDtypeStruct(shape, jnp.float32) if jnp.dtype(self.pool_dtype).itemsize == 1 else None

    def abstract(self, platform: str, sequences: int, tokens: int, pages: int) -> tuple:
        """Positional arguments of the op as ShapeDtypeStructs."""
        queries = [(tokens, self.heads, self.rank), (tokens, self.heads, self.rope)]
        new = [(tokens, self.rank), (tokens, self.rope)]
        ints = [(), (sequences,), (sequences, self.max_len // self.page_size), (sequences + 1,), (2,)]
        return (
            *[jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in queries + new],
            self.pool(platform, pages),
            *[jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ints],
        )

    @property
    def scale(self) -> float:
        """Of a head of 128 + 64 dims before absorption, YaRN's factor left out."""
        return 192**-0.5


SPECS = (
    ArgSpec("kimi-k2.5", 61, 64, max_len=262144),
    ArgSpec("kimi-k2.5-tensor-8", 61, 8, max_len=262144),
    ArgSpec("kimi-k2.5-slots-4", 61, 64, page_size=128, max_len=262144, shards=4),
    ArgSpec("kimi-k2.5-slots-8", 61, 64, page_size=128, max_len=262144, shards=8),
    ArgSpec("kimi-k2.5-int8", 61, 64, page_size=128, max_len=262144, pool_dtype="int8"),
    ArgSpec("kimi-k2.5-fp8", 61, 64, page_size=128, max_len=262144, pool_dtype="float8_e4m3fn"),
    ArgSpec("deepseek-v3", 61, 128),
    ArgSpec("deepseek-v3-tensor-8", 61, 16),
)
