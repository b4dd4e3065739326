"""Shapes at which real models call the operation, on one device of a tensor-parallel mesh."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention.values import pool_shape, scale_shape


@dataclass(frozen=True)
class ArgSpec:
    """One model on one device: heads are what the device holds."""

    name: str
    layers: int
    heads: int
    kv_heads: int
    dim: int
    window: int | None = None
    chunk: int | None = None
    sinks: bool = False
    pool_dtype: str = "bfloat16"
    page_size: int = 64
    max_len: int = 8192
    scaled: bool = False  # an 8-bit pool with its scales as data
    shards: int = 1  # over which the slots of a page are split
    options: dict = field(default_factory=dict)

    def abstract(self, platform: str, sequences: int, tokens: int, pages: int) -> tuple:
        """Positional arguments of the op as ShapeDtypeStructs."""
        dtype = jnp.dtype(self.pool_dtype)
        slots = self.page_size // self.shards
        shape = pool_shape(self.layers, pages, slots, self.kv_heads, self.dim, dtype, platform)
        ints = [(), (sequences,), (sequences, self.max_len // self.page_size), (sequences + 1,), (2,)]
        return (
            jax.ShapeDtypeStruct((tokens, self.heads, self.dim), jnp.bfloat16),
            *[jax.ShapeDtypeStruct((tokens, self.kv_heads, self.dim), jnp.bfloat16)] * 2,
            jax.ShapeDtypeStruct(shape, dtype),
            *[jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ints],
        )

    def scales(self, pages: int) -> jax.ShapeDtypeStruct | None:
        """The scales of the pool, None where it has none."""
        shape = scale_shape(self.layers, pages, self.page_size // self.shards, self.kv_heads)
        return jax.ShapeDtypeStruct(shape, jnp.float32) if self.scaled else None

    def keywords(self) -> dict:
        """Keyword arguments of the op, without `sinks`."""
        return {"scale": self.dim**-0.5, "window": self.window, "chunk": self.chunk, **self.options}


SPECS = (
    ArgSpec("llama-3-8b", 32, 32, 8, 128),
    ArgSpec("llama-3-8b-tensor-8", 32, 4, 1, 128),
    ArgSpec("llama-3-8b-fp8", 32, 32, 8, 128, pool_dtype="float8_e4m3fn"),
    ArgSpec("llama-3-8b-int8", 32, 32, 8, 128, pool_dtype="int8", options={"k_scale": 0.05, "v_scale": 0.05}),
    ArgSpec("llama-3-8b-int8-scales", 32, 32, 8, 128, pool_dtype="int8", page_size=128, scaled=True),
    ArgSpec("llama-3-8b-fp8-scales", 32, 32, 8, 128, pool_dtype="float8_e4m3fn", page_size=128, scaled=True),
    ArgSpec("llama-3-8b-slots-4", 32, 32, 8, 128, shards=4),
    ArgSpec("llama-3-70b", 80, 64, 8, 128),
    ArgSpec("llama-3-70b-tensor-8", 80, 8, 1, 128),
    ArgSpec("qwen3-30b-a3b", 48, 32, 4, 128, max_len=32768),
    ArgSpec("gpt-oss-20b", 12, 64, 8, 64, sinks=True, max_len=131072),
    ArgSpec("gpt-oss-20b-window", 12, 64, 8, 64, window=128, sinks=True, max_len=131072),
    ArgSpec("smollm2-135m", 30, 9, 3, 64, page_size=16),
    ArgSpec("smollm2-135m-float32", 30, 9, 3, 64, pool_dtype="float32", page_size=16),
    ArgSpec("gemma-3-270m", 3, 4, 1, 256, max_len=32768),
    ArgSpec("gemma-3-270m-window", 15, 4, 1, 256, window=512, max_len=32768),
    ArgSpec("llama-4-scout", 12, 40, 8, 128, page_size=256, max_len=10485760),
    ArgSpec("llama-4-scout-chunk", 36, 40, 8, 128, chunk=8192, max_len=131072),
    ArgSpec("heads-of-80", 32, 32, 32, 80, max_len=4096),
)
